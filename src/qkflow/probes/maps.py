"""Attention maps of every layer of a model, for any mechanism: what each token takes from each earlier one.

The model runs as it is; each mechanism is then asked for its `weights` on the very input it was given. The law of the
map (weights times values is the output before the projection) makes them what the layer computes with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkflow.errors import UsageError
from qkflow.mechanisms.base import Exhibit, Mechanism, Stream
from qkflow.models import Decoder


@dataclass(frozen=True, kw_only=True, eq=False)
class Look:
    """One layer on one text."""

    weights: Float[Tensor, "h t s"]
    """The influence of token s on token t in each head, float32 on the CPU; rows need not sum to one."""
    exhibits: tuple[Exhibit, ...]
    """What its mechanism has to show of its own."""


def maps(model: Decoder, tokens: Sequence[int] | Int[Tensor, " t"]) -> list[Float[Tensor, "h t s"]]:
    """The attention map of each layer on one text. Layers of a hybrid stack may differ in their heads.

    >>> from qkflow.models import DecoderConfig
    >>> mixed = DecoderConfig(width=32, layers=2, heads=4, hidden=64, mechanism=("standard", "differential"))
    >>> [tuple(layer.shape) for layer in maps(Decoder(mixed), [72, 105, 33])]
    [(4, 3, 3), (2, 3, 3)]
    """
    return [layer.weights for layer in look(model, tokens)]


def look(model: Decoder, tokens: Sequence[int] | Int[Tensor, " t"]) -> list[Look]:
    """The map and the exhibits of each layer on one text.

    >>> from qkflow.models import DecoderConfig
    >>> model = Decoder(DecoderConfig(width=32, layers=2, heads=4, hidden=64, mechanism="differential"))
    >>> [exhibit.series for exhibit in look(model, [72, 105])[0].exhibits]
    [('learned', 'published start')]
    """
    ids = torch.as_tensor(tokens, dtype=torch.int64)
    if ids.ndim != 1 or not len(ids):
        raise UsageError(f"a map needs one row of at least one token, got the shape {list(ids.shape)}")
    if ids.min() < 0 or ids.max() >= model.config.vocabulary:
        known = model.config.vocabulary
        raise UsageError(
            f"tokens go from 0 to {known - 1}, got {int(ids.min())} to {int(ids.max())}: use its tokenizer"
        )
    mechanisms = [cast(Mechanism, block.mechanism) for block in model.blocks]
    with torch.no_grad():
        given = read_inputs(model, mechanisms, ids.to(model.embedding.weight.device))
        return [
            Look(weights=layer.weights(x)[0].float().cpu(), exhibits=layer.exhibits(x))
            for layer, x in zip(mechanisms, given, strict=True)
        ]


def read_inputs(model: Decoder, mechanisms: Sequence[Mechanism], ids: Int[Tensor, " t"]) -> list[Stream]:
    """What each mechanism is given when the model reads `ids`, without dropout."""
    seen: list[Stream] = []

    def keep(_: nn.Module, given: tuple[Any, ...]) -> None:
        seen.append(given[0])

    hooks = [layer.register_forward_pre_hook(keep) for layer in mechanisms]
    training = model.training
    model.eval()
    try:
        model(ids[None])
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return seen
