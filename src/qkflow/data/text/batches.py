r"""Which tokens a step sees, and which windows an evaluation reads: pure functions of the data and a few numbers.

Training reads the stream in windows of `context + 1` tokens (inputs and targets) that begin `context` apart. Every
epoch shifts them by a random offset and takes each once, in an order that is a permutation of {0 .. n-1}: a Feistel
network on pairs (l, r) in Z_a x Z_a with a = ceil(sqrt(n)), a round being

    (l, r) -> (r, l + f_i(r) mod a),        f_i a hash with key i of (seed, epoch)

walked along its cycle until it lands below n. A bijection by construction, with no state to save: the windows of any
step of any run are known at once.

A recall task is learnt in whole instances instead, each once an epoch in such an order; only its answers are scored.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from qkflow.data.splitmix import mixed
from qkflow.data.text.corpus import Split
from qkflow.errors import UsageError

ROUNDS = 6
CHOICES = 64  # numbers of documents tried for a limit


class Window(NamedTuple):
    """A stretch of one held-out document: inputs `tokens[begin : begin + length]`, targets one further along."""

    document: int
    """Which document of the split."""
    begin: int
    """Where the first input token lies in the split's tokens."""
    length: int
    """How many inputs there are, and targets."""
    skip: int
    """How many of the first targets are context only: an earlier window scored them."""


class Lesson(NamedTuple):
    """What one training step sees."""

    tokens: np.ndarray
    """int64 `[batch, context + 1]`: inputs, and targets one further along."""
    scored: np.ndarray | None
    """bool `[batch, context]`: which targets count; None: all."""


def lesson(split: Split, *, seed: int, step: int, batch: int, context: int) -> Lesson:
    """The tokens of one training step, and which of its targets count: of a text all, of a recall task the answers.

    >>> spans, answers = np.array([[1, 5], [6, 10]]), np.array([[4, 5], [9, 10]])
    >>> split = Split(tokens=np.arange(11), documents=spans, sizes=np.array([1, 1]), answers=answers)
    >>> tokens, scored = lesson(split, seed=0, step=0, batch=2, context=4)
    >>> sorted(tokens.tolist()), scored.tolist()[0]
    ([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], [False, False, False, True])
    """
    if split.answers is None:
        return Lesson(_text(split, seed, step, batch, context), None)
    count = epoch_windows(split, context=context)
    _check_batch(batch, count, f"{count} instances to learn from; lower --batch, or ask the task for more (train=N)")
    begins = np.empty(batch, dtype=np.int64)
    for epoch, rows, index in _epochs(step, batch, count):
        _, keys = _random(seed, epoch)
        begins[rows] = split.documents[_permuted(index, count, keys), 0] - 1
    places = begins[:, None] + np.arange(context + 1)
    return Lesson(split.tokens[places].astype(np.int64), _inside(split.answers, places[:, 1:]))


def scored(split: Split, begin: int, length: int) -> np.ndarray:
    """Which of the targets `tokens[begin + 1 : begin + 1 + length]` count, bool `[length]`: all, or a task's answers.

    >>> task = Split(tokens=np.arange(6), documents=np.array([[1, 5]]), sizes=np.array([2]), answers=np.array([[3, 5]]))
    >>> scored(task, 0, 4).tolist()
    [False, False, True, True]
    """
    if split.answers is None:
        return np.ones(length, dtype=bool)
    return _inside(split.answers, begin + 1 + np.arange(length))


def batch(split: Split, *, seed: int, step: int, batch: int, context: int) -> np.ndarray:
    """The tokens of one training step, int64 `[batch, context + 1]`.

    >>> split = Split(tokens=np.arange(100), documents=np.array([[1, 100]]), sizes=np.array([99]))
    >>> rows = batch(split, seed=0, step=3, batch=2, context=4)
    >>> rows.shape, (np.diff(rows) == 1).all()
    ((2, 5), np.True_)
    """
    return _text(split, seed, step, batch, context)


def epoch_windows(split: Split, *, context: int) -> int:
    """How many training windows an epoch has, or a `UsageError` where there is not even one.

    A recall task has one for each instance, and takes no other context than their length.
    """
    tokens = len(split.tokens)
    if context < 1:
        raise UsageError(f"context is {context}: give at least 1")
    if split.answers is not None:
        lengths = np.diff(split.documents)
        if (lengths != context).any():
            got = " or ".join(map(str, np.unique(lengths).tolist()))
            raise UsageError(f"context is {context}, but the task's instances have {got} tokens: give --context {got}")
        return len(split.documents)
    if tokens < context + 1:
        need = f"a window needs context + 1 = {context + 1}"
        raise UsageError(f"the corpus has {tokens} tokens; {need}: lower --context or give more text")
    return max(1, tokens // context - 1)


def windows(split: Split, *, context: int, stride: int | None = None, limit: int | None = None) -> list[Window]:
    """The windows that score every token of the held-out documents once, document by document, in order.

    `stride` (the context length unless given) is how far each window moves on: a smaller one gives tokens more context,
    and a window scores only those that are new in it. `limit` takes whole documents, evenly spaced, with at most so
    many tokens together (but always one document).

    >>> split = Split(tokens=np.arange(8), documents=np.array([[1, 8]]), sizes=np.array([7]))
    >>> windows(split, context=4)
    [Window(document=0, begin=0, length=4, skip=0), Window(document=0, begin=4, length=3, skip=0)]
    """
    stride = context if stride is None else stride
    if not 1 <= stride <= context:
        raise UsageError(f"stride {stride} with context {context}: give a stride from 1 to the context")
    if limit is not None and limit < 1:
        raise UsageError(f"limit is {limit} tokens: give at least 1")
    found = []
    for document in _chosen(split.documents, limit).tolist():
        begin, end = split.documents[document].tolist()
        size, at = end - begin, 0
        while True:
            skip = context - stride if at else 0
            found.append(Window(document, begin - 1 + at, min(context, size - at), skip))
            if at + context >= size:
                break
            at += stride
    return found


def _text(split: Split, seed: int, step: int, batch: int, context: int) -> np.ndarray:
    """The rows of a step, windows of the stream."""
    count = epoch_windows(split, context=context)
    _check_batch(batch, count, f"{count} windows of {context} tokens; lower --batch or --context")
    room = min(context, len(split.tokens) - count * context)  # offsets from which the last window still fits
    begins = np.empty(batch, dtype=np.int64)
    for epoch, rows, index in _epochs(step, batch, count):
        random, keys = _random(seed, epoch)
        begins[rows] = random % room + context * _permuted(index, count, keys)
    return split.tokens[begins[:, None] + np.arange(context + 1)].astype(np.int64)


def _check_batch(batch: int, count: int, has: str) -> None:
    if batch < 1:
        raise UsageError(f"batch is {batch}: give at least 1")
    if batch > count:
        raise UsageError(f"batch {batch} is too large for the corpus: it has {has}")


def _epochs(step: int, batch: int, count: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """The epochs that a step is in, the rows of the step that belong to each, and their places in its order."""
    index = step * batch + np.arange(batch)
    for epoch in range(step * batch // count, (step * batch + batch - 1) // count + 1):
        rows = index // count == epoch
        yield epoch, rows, index[rows] % count


def _inside(answers: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Which places lie in a span: those with an odd number of the spans' borders at or before them."""
    return np.searchsorted(answers.reshape(-1), places, side="right") % 2 == 1


def _chosen(documents: np.ndarray, limit: int | None) -> np.ndarray:
    """Indices of all documents, or of evenly spaced ones with as near to `limit` tokens as their lengths allow."""
    count, sizes = len(documents), np.diff(documents).ravel()
    if limit is None or sizes.sum() <= limit:
        return np.arange(count)
    most = int((np.cumsum(np.sort(sizes)) <= limit).sum())  # no choice of more documents than this can fit
    best, tokens = np.array([sizes.argmin()]), 0
    for number in np.unique(np.linspace(1, max(most, 1), CHOICES, dtype=np.int64))[::-1].tolist():
        for quarter in (2, 1, 3, 0):  # of a spacing, before the first
            spaced = (4 * np.arange(number) + quarter) * count // (4 * number)
            if tokens < (total := int(sizes[spaced].sum())) <= limit:
                best, tokens = spaced, total
    return best


def _random(seed: int, epoch: int) -> tuple[int, np.ndarray]:
    """A random number for an epoch's offset, and the keys `[ROUNDS]` of its order."""
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * (ROUNDS + 1)).digest()
    numbers = np.frombuffer(digest, dtype="<u8")
    return int(numbers[0]), numbers[1:]


def _permuted(index: np.ndarray, count: int, keys: np.ndarray) -> np.ndarray:
    """The images `[n]` of `index` under the permutation of {0 .. count-1} that `keys` choose."""
    side = np.uint64(math.isqrt(count - 1) + 1)
    now = index.astype(np.uint64)
    walking = np.ones(len(now), dtype=bool)
    while walking.any():
        left, right = now[walking] // side, now[walking] % side
        for key in keys:
            left, right = right, (left + _hashed(right, key)) % side
        now[walking] = left * side + right
        walking = now >= count
    return now.astype(np.int64)


def _hashed(x: np.ndarray, key: np.uint64) -> np.ndarray:
    """A hash of x, shifted so that adding to it cannot overflow."""
    return mixed(x + key) >> np.uint64(1)
