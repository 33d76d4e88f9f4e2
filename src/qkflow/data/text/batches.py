r"""Training batches and evaluation windows as pure functions of the data, a seed and a step.

Training reads the token stream in windows of `context + 1` tokens (inputs and shifted targets) that start `context`
tokens apart. Each epoch shifts all windows by a random offset and visits each window once, in the order of a
permutation of {0 .. n-1}. The permutation is a Feistel network on pairs (l, r) in Z_a x Z_a with a = ceil(sqrt(n)):

    (l, r) -> (r, l + f_i(r) mod a),        f_i: hash with key i of (seed, epoch)                    (1)

iterated until the result is below n (cycle walking). It needs no stored state, so the batch of any step can be
computed directly, and a resumed run reads the same batches as an uninterrupted one.

A recall task is read in whole instances, each once per epoch. Only its answer tokens are scored.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from qkflow.data.splitmix import mix64
from qkflow.data.text.corpus import Split
from qkflow.errors import UsageError

ROUNDS = 6
_GOLDEN_RATIO = (1 + 5**0.5) / 2


class Batch(NamedTuple):
    """The data of one training step."""

    tokens: np.ndarray
    """int64 `[batch_size, context + 1]`: `tokens[:, :-1]` are the inputs, `tokens[:, 1:]` the targets."""
    scored: np.ndarray | None
    """bool `[batch_size, context]`: the targets that enter the loss; None means all of them."""


class Window(NamedTuple):
    """A window of a held-out document: inputs are `tokens[begin : begin + length]`, targets are shifted by one."""

    document: int
    """Index of the document in the split."""
    begin: int
    """Index of the first input token in the split's token stream."""
    length: int
    """Number of inputs (and targets)."""
    skip: int
    """Number of leading targets that an earlier window has already scored."""


def get_batch(split: Split, *, seed: int, step: int, batch_size: int, context: int) -> Batch:
    """Return the batch of a training step. It depends on the arguments only, so any step can be read directly.

    >>> split = Split(tokens=np.arange(100), documents=np.array([[1, 100]]), sizes=np.array([99]))
    >>> tokens, scored = get_batch(split, seed=0, step=3, batch_size=2, context=4)
    >>> tokens.shape, bool((np.diff(tokens) == 1).all()), scored
    ((2, 5), True, None)

    In a recall task each row is one instance, and only the answers are scored:

    >>> spans, answers = np.array([[1, 5], [6, 10]]), np.array([[4, 5], [9, 10]])
    >>> split = Split(tokens=np.arange(11), documents=spans, sizes=np.array([1, 1]), answers=answers)
    >>> tokens, scored = get_batch(split, seed=0, step=0, batch_size=2, context=4)
    >>> sorted(tokens.tolist()), scored.tolist()[0]
    ([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], [False, False, False, True])
    """
    n_windows = epoch_windows(split, context=context)
    _check_batch_size(split, batch_size, n_windows, context)
    begins = np.empty(batch_size, dtype=np.int64)
    index = step * batch_size + np.arange(batch_size)
    for epoch in range(int(index[0]) // n_windows, int(index[-1]) // n_windows + 1):
        rows = index // n_windows == epoch
        offset, keys = _epoch_random(seed, epoch)
        order = _permute(index[rows] % n_windows, n_windows, keys)
        if split.answers is None:
            n_offsets = min(context, len(split.tokens) - n_windows * context)  # the last window must still fit
            begins[rows] = offset % n_offsets + context * order
        else:
            begins[rows] = split.documents[order, 0] - 1
    positions = begins[:, None] + np.arange(context + 1)
    tokens = split.tokens[positions].astype(np.int64)
    return Batch(tokens, None if split.answers is None else _inside_spans(split.answers, positions[:, 1:]))


def epoch_windows(split: Split, *, context: int) -> int:
    """Return the number of training windows per epoch; raise a `UsageError` if there are none.

    A recall task has one window per instance, and `context` must equal the length of its instances.
    """
    if context < 1:
        raise UsageError(f"context must be at least 1, got {context}")
    if split.answers is not None:
        lengths = np.diff(split.documents)
        if (lengths != context).any():
            got = " or ".join(map(str, np.unique(lengths).tolist()))
            raise UsageError(f"context is {context}, but the task's instances have {got} tokens: use --context {got}")
        return len(split.documents)
    n_tokens = len(split.tokens)
    if n_tokens < context + 1:
        raise UsageError(
            f"the corpus has {n_tokens} tokens, but a window needs context + 1 = {context + 1}: "
            "lower --context or use more text"
        )
    return max(1, n_tokens // context - 1)


def scored(split: Split, begin: int, length: int) -> np.ndarray:
    """Return bool `[length]`: which targets `tokens[begin + 1 : begin + 1 + length]` are scored.

    Every token of a text is scored; in a recall task only the answers are.

    >>> task = Split(tokens=np.arange(6), documents=np.array([[1, 5]]), sizes=np.array([2]), answers=np.array([[3, 5]]))
    >>> scored(task, 0, 4).tolist()
    [False, False, True, True]
    """
    if split.answers is None:
        return np.ones(length, dtype=bool)
    return _inside_spans(split.answers, begin + 1 + np.arange(length))


def windows(split: Split, *, context: int, stride: int | None = None, limit: int | None = None) -> list[Window]:
    """Return the windows that score every token of the held-out documents once, in document order.

    Args:
        split: The documents.
        context: Maximum window length in tokens.
        stride: Tokens by which consecutive windows advance (default: `context`). With a smaller stride each scored
            token sees more context, and a window scores only the tokens that no earlier window has scored.
        limit: Use at most this many tokens (but at least one window), as evenly spaced windows of as many documents
            as possible.

    >>> split = Split(tokens=np.arange(8), documents=np.array([[1, 8]]), sizes=np.array([7]))
    >>> windows(split, context=4)
    [Window(document=0, begin=0, length=4, skip=0), Window(document=0, begin=4, length=3, skip=0)]
    """
    stride = context if stride is None else stride
    if not 1 <= stride <= context:
        raise UsageError(f"stride must be from 1 to context = {context}, got {stride}")
    if limit is not None and limit < 1:
        raise UsageError(f"limit must be at least 1 token, got {limit}")
    sizes = np.diff(split.documents).ravel()
    counts = 1 + np.maximum(0, -(-(sizes - context) // stride))  # windows per document
    result = []
    total = int((sizes + (counts - 1) * (context - stride)).sum())
    selected = _select_windows(
        np.minimum(sizes, context), counts, limit if limit is not None and limit < total else None
    )
    for document, number in selected:
        offset = number * stride
        length = min(context, int(sizes[document]) - offset)
        begin = int(split.documents[document, 0]) - 1 + offset
        result.append(Window(document, begin, length, context - stride if offset else 0))
    return result


def _check_batch_size(split: Split, batch_size: int, n_windows: int, context: int) -> None:
    if batch_size < 1:
        raise UsageError(f"batch size must be at least 1, got {batch_size}")
    if batch_size > n_windows:
        if split.answers is None:
            available = f"{n_windows} windows of {context} tokens: lower --batch or --context"
        else:
            available = f"{n_windows} training instances: lower --batch, or request more from the task (train=N)"
        raise UsageError(f"batch size {batch_size} is too large for the corpus, which has {available}")


def _inside_spans(spans: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return which positions lie in a span: those with an odd number of span borders at or before them."""
    return np.searchsorted(spans.reshape(-1), positions, side="right") % 2 == 1


def _select_windows(lengths: np.ndarray, counts: np.ndarray, limit: int | None) -> Iterator[tuple[int, int]]:
    """Yield (document, number of the window) of all windows, or of evenly spaced ones with at most `limit` tokens.

    Args:
        lengths: The length of each document's longest window.
        counts: The number of windows of each document.
        limit: The token limit.

    Every document gets at least one window if the limit allows; the others are shared in proportion to `counts`.
    """
    chosen = np.arange(len(counts))
    quota = counts
    if limit is not None:
        if (spare := limit - int(lengths.sum())) < 0:
            n_documents = max(1, int(limit * len(counts) // lengths.sum()))
            chosen = (2 * np.arange(n_documents) + 1) * len(counts) // (2 * n_documents)
            while n_documents > 1 and lengths[chosen].sum() > limit:
                n_documents -= 1
                chosen = (2 * np.arange(n_documents) + 1) * len(counts) // (2 * n_documents)
            quota = np.ones_like(counts)
        else:
            share = min(1.0, spare / int(lengths @ (counts - 1)))
            quota = 1 + np.diff(np.floor(np.cumsum(counts - 1) * share), prepend=0).astype(np.int64)
    for document in chosen.tolist():
        count, n_windows = int(counts[document]), int(quota[document])
        shift = document * _GOLDEN_RATIO % 1  # beginnings, middles and ends of documents, not beginnings only
        for number in range(n_windows):
            yield document, int((number + shift) * count / n_windows)


def _epoch_random(seed: int, epoch: int) -> tuple[int, np.ndarray]:
    """Return the random offset of an epoch and the keys `[ROUNDS]` of its permutation."""
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * (ROUNDS + 1)).digest()
    numbers = np.frombuffer(digest, dtype="<u8")
    return int(numbers[0]), numbers[1:]


def _permute(index: np.ndarray, count: int, keys: np.ndarray) -> np.ndarray:
    """Map `index` through the permutation of {0 .. count-1} that `keys` select."""
    side = np.uint64(math.isqrt(count - 1) + 1)
    image = index.astype(np.uint64)
    walking = np.ones(len(image), dtype=bool)
    while walking.any():
        left, right = image[walking] // side, image[walking] % side
        for key in keys:  # (1); the hash is shifted so that the sum cannot overflow
            left, right = right, (left + (mix64(right + key) >> np.uint64(1))) % side
        image[walking] = left * side + right
        walking = image >= count
    return image.astype(np.int64)
