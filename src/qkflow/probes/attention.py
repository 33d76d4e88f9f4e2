r"""What each layer of a model attends to on one text, in numbers: for every mechanism that has a map.

entropy     H = -\sum_s a_s \log a_s in nats of a head's row, a its shares; then the mean over heads
attended    exp(H): as many tokens, attended to evenly, would have it too; then the mean over heads
strongest   the two different tokens with the largest weight between them in any head
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor

from qkflow.errors import UsageError
from qkflow.probes.confidence import entropy, mass
from qkflow.probes.pooling import Pooling, pooled

TAU = 0.5
"""The mass from which attention is called confident."""
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What one token takes from an earlier one in a head; all count from 0."""

    by: int
    source: int
    head: int
    weight: float


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """A layer's attention; numbers are means over heads, and not finite where a layer attends to nothing."""

    entropy_last: float
    """Of the last token, in nats."""
    attended_last: float
    """Tokens."""
    entropy: float
    """The mean over all tokens."""
    attended: float
    strongest: Taken | None
    """None for a single token."""


@dataclass(frozen=True, kw_only=True)
class Attended:
    """A model's attention on one text."""

    layers: tuple[LayerAttention, ...]
    pooled: Mapping[Pooling, tuple[float, ...]]
    """The share of each token in the last one's attention, layers pooled in each way."""


@dataclass(frozen=True, kw_only=True)
class Confidence:
    """How much of the last token's attention lies on words that were named."""

    places: tuple[int, ...]
    """Their tokens."""
    mass: Mapping[Pooling, float]
    even: float
    """What they would have if all tokens had the same share."""


def attended(maps: Sequence[Float[Tensor, "_ t t"]]) -> Attended:
    """The figures of every layer, and the pooled attention of the last token.

    >>> even = torch.ones(1, 2, 2).tril() / torch.tensor([[1.0], [2.0]])
    >>> found = attended([even])
    >>> found.layers[0].attended_last, found.pooled["average"]
    (2.0, (0.5, 0.5))
    """
    whole = [layer.double()[None] for layer in maps]
    lengths = torch.tensor([whole[0].shape[-1]])
    shares: dict[Pooling, tuple[float, ...]] = {how: _numbers(pooled(whole, lengths, how)) for how in POOLINGS}
    return Attended(layers=tuple(map(_layer, maps)), pooled=shares)


def confidence_on(found: Attended, places: Sequence[int]) -> Confidence:
    """The mass on some tokens under each pooling."""
    count = len(found.pooled["average"])
    inside = torch.zeros(1, count, dtype=torch.bool)
    inside[0, list(places)] = True
    on: dict[Pooling, float] = {
        how: float(mass(torch.tensor([own], dtype=torch.float64), inside)) for how, own in found.pooled.items()
    }
    return Confidence(places=tuple(places), mass=on, even=len(places) / count)


def places_of(words: str, pieces: Sequence[bytes]) -> tuple[int, ...]:
    """The tokens that spell some words of a text, wherever they stand in it as whole words.

    >>> places_of("author guards", [b"the", b" auth", b"or", b" of", b" guards"])
    (1, 2, 4)
    """
    text = b"".join(pieces).decode("utf-8", "surrogateescape")
    if not words.split():
        raise UsageError("--rationale has no words: give words of the text")
    spans = []
    for word in words.split():
        found = [match.span() for match in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", text)]
        if not found:
            raise UsageError(f"--rationale names {word!r}, which is no word of what was read: give words of the text")
        spans += [tuple(len(text[:end].encode("utf-8", "surrogateescape")) for end in span) for span in found]
    begins = [sum(map(len, pieces[:place])) for place in range(len(pieces))]
    inside = [
        place
        for place, (begin, piece) in enumerate(zip(begins, pieces, strict=True))
        if any(begin < end and first < begin + len(piece) for first, end in spans)
    ]
    return tuple(inside)


def _layer(weights: Float[Tensor, "h t t"]) -> LayerAttention:
    heads, count, _ = weights.shape
    each = entropy(weights.double().flatten(0, 1)).unflatten(0, (heads, count))
    last, every = each[:, -1], each.flatten()
    return LayerAttention(
        entropy_last=_mean(last),
        attended_last=_mean(last.exp()),
        entropy=_mean(every),
        attended=_mean(every.exp()),
        strongest=_strongest(weights),
    )


def _strongest(weights: Float[Tensor, "h t t"]) -> Taken | None:
    count = weights.shape[-1]
    if count < 2:
        return None
    size = weights.abs().nan_to_num(0.0) * torch.ones(count, count).tril(-1)
    place = int(size.argmax())
    head, by, source = place // count**2, place // count % count, place % count
    return Taken(by=by, source=source, head=head, weight=float(weights[head, by, source]))


def _numbers(shares: Float[Tensor, "1 t"]) -> tuple[float, ...]:
    return tuple(shares[0].tolist())


def _mean(values: Float[Tensor, " n"]) -> float:
    known = values[values.isfinite()]
    return float(known.mean()) if len(known) else math.nan
