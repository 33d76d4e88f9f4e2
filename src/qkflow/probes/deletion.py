"""Texts with some of their words taken away, and what a model makes of many of them at once.

Words are deleted, not masked: the row closes up behind them, so that a model counts its positions from 0 without a gap,
as in any text. Places that are kept (a question, the token that asks) never go. Where the last word goes, the answer is
asked for at the word before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from qkflow.probes.readers import Reader, Reading

Row = tuple[int, ...]

_TOKENS = 2**11
"""Tokens read at once, at most: more do not fit into the caches of a CPU, and take longer."""
_NUMBERS = 2**24
"""Numbers in the maps of a batch, at most: 64 MB in single precision."""
_HEADS = 64
"""Maps a model has, layers times heads, until it is known."""
_DIGITS = 2.0**14
"""Scores that agree to this precision are ties: batches differ in rounding, and must not in what they delete."""


def ranked(scores: Float64[np.ndarray, " t"], kept: Sequence[int] = ()) -> list[int]:
    """The places that may go, the highest score first; scores that agree to four digits are ties, and go by place.

    >>> ranked(np.array([0.1, 0.5, 0.3, 0.5]), kept=[2])
    [1, 3, 0]
    """
    significand, exponent = np.frexp(scores)
    rounded = np.ldexp(np.rint(significand * _DIGITS), exponent)
    held = set(kept)
    return [place for place in np.argsort(-rounded, kind="stable").tolist() if place not in held]


def divided(tokens: Row, order: Sequence[int], count: int) -> tuple[Row, Row]:
    """The text without the first `count` places of the order, and with no others of it; a text keeps its last token.

    >>> divided((10, 11, 12, 13), order=[2, 0, 1], count=1)
    ((10, 11, 13), (12, 13))
    >>> divided((10,), order=[0], count=1)
    ((10,), (10,))
    """
    top, others = set(order[:count]), set(order[count:])
    without = tuple(token for place, token in enumerate(tokens) if place not in top)
    return without or tokens[-1:], tuple(token for place, token in enumerate(tokens) if place not in others)


def counted(part: float, places: int) -> int:
    """How many places a part of them is: rounded up, and at least one if there is one.

    >>> [counted(0.05, places) for places in (0, 1, 20, 21)]
    [0, 1, 1, 2]
    """
    return min(places, max(1, math.ceil(part * places - 1e-9)))  # 7 % of 100 is 7.000000000000001


def readings(
    reader: Reader, rows: Sequence[Row], *, batch: int, maps: bool = False
) -> Iterator[tuple[list[int], Int[Tensor, "b t"], Int[Tensor, " b"], Reading]]:
    """All rows, those of like length together and padded on the right: which they are, and what was made of them."""
    order, at, heads = sorted(range(len(rows)), key=lambda i: -len(rows[i])), 0, _HEADS
    while at < len(order):
        t = len(rows[order[at]])
        room = _NUMBERS // (t * t * heads) if maps else _TOKENS // t
        here = order[at : at + max(1, min(batch, room))]
        lengths = np.array([len(rows[i]) for i in here])
        padded = np.zeros((len(here), t), dtype=np.int64)
        padded[np.arange(t) < lengths[:, None]] = np.fromiter(chain.from_iterable(rows[i] for i in here), np.int64)
        tokens, counts = torch.from_numpy(padded), torch.from_numpy(lengths)
        reading = reader.read(tokens, counts, maps=maps)
        if reading.maps is not None:
            heads = max(1, sum(layer.shape[1] for layer in reading.maps))
        yield here, tokens, counts, reading
        at += len(here)


def chances(
    reader: Reader, asked: Sequence[tuple[Row, int]], *, batch: int, known: Mapping[tuple[Row, int], float]
) -> dict[tuple[Row, int], float]:
    """The probability of an answer given a text, for each of the two; none is read twice, or if it is known."""
    found = dict(known)
    new = [one for one in dict.fromkeys(asked) if one not in found]
    for here, _, _, reading in readings(reader, [row for row, _ in new], batch=batch):
        answers = torch.tensor([new[i][1] for i in here])
        for i, log_p in zip(here, log_probability(reading.logits, answers).tolist(), strict=True):
            found[new[i]] = math.exp(log_p)
    return found


def log_probability(logits: Float[Tensor, "b c"], answers: Int[Tensor, " b"]) -> Float64[Tensor, " b"]:
    """The logarithm of each row's probability of one answer."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    chosen = scores.gather(1, answers.to(scores.device)[:, None])[:, 0]
    return (chosen.double() - scores.logsumexp(-1).double()).cpu()
