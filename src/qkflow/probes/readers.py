"""One way to ask any model about a text: its scores where it answers, its maps, and which tokens its answer comes from.

Rows are padded on the right. Tokens of qkflow's models see only what comes before them, so what lies behind the end of
a text changes nothing in it, and no mask is needed. Reading leaves a model as it was: no gradient stays in a parameter,
and parts in training mode stay in it, though nothing is dropped while reading.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.models import Classifier, Decoder
from qkflow.models.one_layer import OneLayer
from qkflow.probes.maps import kept_inputs, unchanged
from qkflow.probes.pooling import Map

Tokens = Int[Tensor, "b t"]
Lengths = Int[Tensor, " b"]
Asks = Literal["last", "first"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Reading:
    """What a model makes of some texts."""

    logits: Float[Tensor, "b c"]
    """The scores of each answer."""
    maps: tuple[Map, ...] | None = None
    """The map of each layer, zero at padding, if they were asked for; layers may differ in their heads."""
    asked: Int[Tensor, " b"] | None = None
    """The place of each row at which the answer is read off; `None`: its last token."""


@runtime_checkable
class Reader(Protocol):
    """Something that reads texts, right-padded, and answers at one place of each."""

    def read(self, tokens: Tokens, lengths: Lengths, *, maps: bool = False) -> Reading:
        """The scores of each answer, and the maps if they are asked for."""
        ...

    def saliency(self, tokens: Tokens, lengths: Lengths) -> Float[Tensor, "b t"]:
        """How much each token decides: |gradient . embedding| of the score of the model's own answer; 0 at padding."""
        ...


def reader(model: nn.Module, *, asks: Asks | None = None) -> Reader:
    """A reader of a `Classifier`, a `Decoder` (its answer is the next token), a `OneLayer`, or a model of transformers.

    Those must be loaded with `attn_implementation="eager"`, and may answer at their first token (`asks="first"`, as
    BERT does); unless told, one whose tokens see later ones is taken to.

    >>> from qkflow.models import ClassifierConfig
    >>> model = Classifier(ClassifierConfig(width=32, layers=2, heads=4, vocabulary=50, classes=3))
    >>> got = reader(model).read(torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([3, 2]), maps=True)
    >>> tuple(got.logits.shape), [tuple(layer.shape) for layer in got.maps]
    ((2, 3), [(2, 4, 3, 3), (2, 4, 3, 3)])
    """
    if any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__):
        from qkflow.probes.hf_readers import HFReader  # it reads what transformers made; nothing else needs it

        return HFReader(model, asks)
    if asks == "first":
        raise UsageError(f"a {type(model).__name__} answers at the last token: asks='first' is for encoders")
    if isinstance(model, Classifier | Decoder):
        return _StackReader(model)
    if isinstance(model, OneLayer):
        return _OneLayerReader(model)
    raise UsageError(
        f"a reader needs a Classifier, a Decoder, a OneLayer or a model of transformers, got {type(model).__name__}:"
        " write a class with read() and saliency() for it, as qkflow.probes.readers.Reader says"
    )


class _StackReader:
    """Reads a stack of mechanisms at the last token."""

    def __init__(self, model: Classifier | Decoder) -> None:
        self.model = model

    def read(self, tokens: Tokens, lengths: Lengths, *, maps: bool = False) -> Reading:
        tokens, lengths = checked(tokens, lengths, self.model.embedding.weight)
        mechanisms = self.model.mechanisms if maps else []
        with unchanged(self.model), torch.no_grad():
            with kept_inputs(mechanisms) as seen:
                logits = self._logits(tokens, lengths)
            if not maps:
                return Reading(logits=logits)
            padding = ~read_places(tokens, lengths)[:, None, :, None]
            found = (layer.weights(x).masked_fill(padding, 0) for layer, x in zip(mechanisms, seen, strict=True))
            return Reading(logits=logits, maps=tuple(found))

    def saliency(self, tokens: Tokens, lengths: Lengths) -> Float[Tensor, "b t"]:
        tokens, lengths = checked(tokens, lengths, self.model.embedding.weight)
        with unchanged(self.model):
            found = embedding_saliency(self.model.embedding, lambda: self._logits(tokens, lengths))
        return found * read_places(tokens, lengths)

    def _logits(self, tokens: Tokens, lengths: Lengths) -> Float[Tensor, "b c"]:
        x, _ = self.model.read(tokens)
        last = x[torch.arange(len(x), device=x.device), lengths - 1]  # before the head: a vocabulary is wide
        return self.model.logits(last) if isinstance(self.model, Decoder) else self.model.head(last)


class _OneLayerReader:
    """Reads the one-layer model, in which only the last token asks: the others are given themselves to look at."""

    def __init__(self, model: OneLayer) -> None:
        self.model = model

    def read(self, tokens: Tokens, lengths: Lengths, *, maps: bool = False) -> Reading:
        tokens, lengths = checked(tokens, lengths, next(self.model.parameters()))
        layout = Layout.padded(lengths, tokens.shape[1])
        with unchanged(self.model), torch.no_grad():
            logits = self.model(tokens, layout)
            if not maps:
                return Reading(logits=logits)
            found = torch.diag_embed(read_places(tokens, lengths).to(logits.dtype))
            found[torch.arange(len(tokens), device=tokens.device), lengths - 1] = self.model.weights(tokens, layout)
            return Reading(logits=logits, maps=(found[:, None],))

    def saliency(self, tokens: Tokens, lengths: Lengths) -> Float[Tensor, "b t"]:
        tokens, lengths = checked(tokens, lengths, next(self.model.parameters()))
        layout = Layout.padded(lengths, tokens.shape[1])
        with unchanged(self.model), torch.enable_grad():
            x = self.model.embed(tokens).detach().requires_grad_()
            return decisive([x], self.model.read(x, layout)) * layout.valid


def checked(tokens: Tokens, lengths: Lengths, weight: Float[Tensor, "vocabulary d"]) -> tuple[Tokens, Lengths]:
    """The texts where the model is, if it knows their tokens."""
    known, (b, t) = weight.shape[0], tokens.shape
    if not b or len(lengths) != b or int(lengths.min()) < 1 or int(lengths.max()) > t:
        raise UsageError(f"lengths must be one number from 1 to {t} for each of {b} rows, got {lengths.tolist()}")
    if int(tokens.min()) < 0 or int(tokens.max()) >= known:
        raise UsageError(
            f"tokens must be from 0 to {known - 1}, got {int(tokens.min())} to {int(tokens.max())}:"
            " use the vocabulary that the model was trained with"
        )
    return tokens.to(weight.device), lengths.to(weight.device)


def read_places(tokens: Tokens, lengths: Lengths) -> Bool[Tensor, "b t"]:
    """True where there is a text, false at padding."""
    return torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]


def embedding_saliency(embedding: nn.Module, logits: Callable[[], Float[Tensor, "b c"]]) -> Float[Tensor, "b t"]:
    """The saliency of what a model takes from its embedding while `logits` runs it."""
    given: list[Tensor] = []

    def take(_: nn.Module, __: tuple[Any, ...], x: Tensor) -> Tensor:
        given.append(x.detach().requires_grad_())
        return given[-1]

    hook = embedding.register_forward_hook(take)
    try:
        with torch.enable_grad():
            return decisive(given, logits())
    finally:
        hook.remove()


def decisive(given: Sequence[Float[Tensor, "b t d"]], logits: Float[Tensor, "b c"]) -> Float[Tensor, "b t"]:
    """|gradient . x| of each row's highest score, for the stream that it was made from."""
    (x,) = given
    (gradient,) = torch.autograd.grad(logits.max(-1).values.sum(), x)
    return (gradient * x.detach()).sum(-1).abs()
