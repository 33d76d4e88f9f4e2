"""Attention maps of every layer of a model, for any mechanism: what each token takes from each earlier one.

The model runs as it is; each mechanism is then asked for its `weights` on the very input it was given. The law of the
map (weights times values is the output before the projection) makes them what the layer computes with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkflow.errors import UsageError
from qkflow.mechanisms.base import Diagnostic, Mechanism, Stream
from qkflow.models import Stack


@dataclass(frozen=True, kw_only=True, eq=False)
class Look:
    """One layer on one text."""

    weights: Float[Tensor, "h t s"]
    """The influence of token s on token t in each head, float32 on the CPU; rows need not sum to one."""
    exhibits: tuple[Diagnostic, ...]
    """What its mechanism has to show of its own."""


def maps(model: Stack, tokens: Sequence[int] | Int[Tensor, " t"]) -> list[Float[Tensor, "h t s"]]:
    """The attention map of each layer on one text. Layers of a hybrid stack may differ in their heads.

    >>> from qkflow.models import Decoder, DecoderConfig
    >>> mixed = DecoderConfig(width=32, layers=2, heads=4, hidden=64, mechanism=("standard", "differential"))
    >>> [tuple(layer.shape) for layer in maps(Decoder(mixed), [72, 105, 33])]
    [(4, 3, 3), (2, 3, 3)]
    """
    return [layer.weights for layer in look(model, tokens)]


def look(model: Stack, tokens: Sequence[int] | Int[Tensor, " t"]) -> list[Look]:
    """The map and the exhibits of each layer on one text.

    >>> from qkflow.models import Decoder, DecoderConfig
    >>> model = Decoder(DecoderConfig(width=32, layers=2, heads=4, hidden=64, mechanism="differential"))
    >>> [exhibit.series for exhibit in look(model, [72, 105])[0].exhibits]
    [('learned', 'published start')]
    """
    with torch.no_grad():
        return [
            Look(weights=layer.weights(x)[0].float().cpu(), exhibits=layer.exhibits(x))
            for layer, x in read_inputs(model, tokens)
        ]


def read_inputs(model: Stack, tokens: Sequence[int] | Int[Tensor, " t"]) -> list[tuple[Mechanism, Stream]]:
    """Every mechanism with what it is given when the model reads one text, without dropout."""
    ids, known = torch.as_tensor(tokens, dtype=torch.int64), model.embedding.num_embeddings
    if ids.ndim != 1 or not len(ids) or ids.min() < 0 or ids.max() >= known:
        raise UsageError(
            f"a look needs one row of at least one token from 0 to {known - 1}, got the shape {list(ids.shape)}"
            f"{f' from {int(ids.min())} to {int(ids.max())}' if ids.numel() else ''}: use the model's tokenizer"
        )
    with unchanged(model), torch.no_grad(), kept_inputs(model.mechanisms) as seen:
        model(ids[None].to(model.embedding.weight.device))
    return list(zip(model.mechanisms, seen, strict=True))


@contextmanager
def kept_inputs(mechanisms: Sequence[Mechanism]) -> Iterator[list[Stream]]:
    """A list that fills with what each mechanism is given while a model runs inside."""
    seen: list[Stream] = []

    def keep(_: nn.Module, given: tuple[Any, ...]) -> None:
        seen.append(given[0])

    hooks = [layer.register_forward_pre_hook(keep) for layer in mechanisms]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Nothing is dropped inside, and every part is in the mode that it was in afterwards."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
