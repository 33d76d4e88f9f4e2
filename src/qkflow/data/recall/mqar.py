"""Multi-query associative recall (MQAR, https://arxiv.org/abs/2312.04927): key-value pairs, then one query per key.

    k7 v2 k1 v5 k3 v2 . . k1 v5 . k3 v2 . . . k7 v2 .
    N pairs           N queries `key value` among fillers

Keys, values and fillers are disjoint sets of tokens. The keys of an instance are distinct, its values may repeat. The
answers are the values after the second occurrence of each key. All orders and placements of the queries are equally
likely.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from qkflow.data.recall.base import Instances, RecallCell, check_minimum
from qkflow.data.splitmix import Seed, randint, random_uint64
from qkflow.data.text.corpus import CELL_DTYPE
from qkflow.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class MQAR:
    """Configuration of multi-query associative recall.

    >>> MQAR(pairs=(2, 4), length=32).chance
    0.015625
    """

    name: ClassVar[str] = "mqar"
    axes: ClassVar[tuple[str, ...]] = ("pairs",)
    """Axes of the test grid."""

    pairs: tuple[int, ...] = (4, 8, 16)
    """Numbers of pairs: sampled from these in training, one test cell each."""
    length: int = 64
    """Tokens per instance, at least four per pair."""
    keys: int = 64
    """Number of different keys."""
    values: int = 64
    """Number of different values."""
    fillers: int = 1
    """Number of different fillers."""
    train: int = 100_000
    validation: int = 512
    each: int = 200
    """Test instances per number of pairs."""
    seed: int = 0

    def __post_init__(self) -> None:
        names = ("pairs", "length", "keys", "values", "fillers", "train", "validation", "each")
        check_minimum(self.name, 1, {name: getattr(self, name) for name in names})
        most = max(self.pairs)
        if most > self.keys:
            raise UsageError(f"mqar: {most} pairs need {most} keys, got keys={self.keys}: use more keys or fewer pairs")
        if 4 * most > self.length:
            raise UsageError(
                f"mqar: {most} pairs need {4 * most} tokens (4 per pair and its query), got length={self.length}: "
                f"use length={4 * most} or more, or fewer pairs"
            )

    @property
    def words(self) -> tuple[str, ...]:
        """Keys `k0 ..`, values `v0 ..`, fillers `.`, `.1 ..`, in the order of their tokens."""
        keys, values = (f"k{n}" for n in range(self.keys)), (f"v{n}" for n in range(self.values))
        return (*keys, *values, ".", *(f".{n}" for n in range(1, self.fillers)))

    @property
    def chance(self) -> float:
        """Accuracy of guessing among the values."""
        return 1 / self.values

    def grid(self) -> tuple[RecallCell, ...]:
        """Return one cell per number of pairs."""
        return tuple(RecallCell(pairs, self.length, None) for pairs in self.pairs)

    def draw(self, cell: RecallCell | None = None, *, seed: Seed, count: int, first: int = 0) -> Instances:
        """Generate instances number `first` to `first + count - 1` of the stream of `seed`.

        They have the number of pairs of a test `cell`, or any of `pairs` if it is None.

        >>> config = MQAR(pairs=(2,), length=12)
        >>> instances = config.draw(seed=0, count=1)
        >>> " ".join(config.words[token] for token in instances.tokens[0])
        'k48 v40 k35 v63 . . . k35 v63 . k48 v40'
        >>> instances.answers.tolist()
        [[0, 8, 9], [0, 11, 12]]
        """
        choices = self.pairs if cell is None or cell.pairs is None else (cell.pairs,)
        n_filler_draws = self.length if self.fillers > 1 else 0
        numbers = random_uint64(seed, first + np.arange(count), 1 + n_filler_draws + self.keys + self.length)
        pairs = np.array(choices)[randint(numbers[:, 0], len(choices))]
        tokens = np.empty((count, self.length), dtype=np.int64)
        is_answer = np.zeros((count, self.length), dtype=bool)
        for n_pairs in choices:
            rows = pairs == n_pairs
            tokens[rows], is_answer[rows] = _with_pairs(self, n_pairs, numbers[rows, 1 + n_filler_draws :])
        if self.fillers > 1:
            is_filler = tokens == self.keys + self.values
            tokens += is_filler * randint(numbers[:, 1 : 1 + n_filler_draws], self.fillers)
        instance, begin = np.nonzero(is_answer)
        cells = np.empty(count, dtype=CELL_DTYPE)
        cells["pairs"], cells["length"], cells["depth"] = pairs, self.length, -1
        return Instances(tokens, np.column_stack([instance, begin, begin + 1]), cells)


def _with_pairs(config: MQAR, n_pairs: int, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and answer mask, both `[n, length]`, of instances with `n_pairs` pairs."""
    count, n_slots = len(numbers), config.length - 3 * n_pairs
    widths = [config.keys, n_pairs, n_pairs, n_slots]
    for_keys, for_values, for_order, for_slots = np.split(numbers[:, : sum(widths)], np.cumsum(widths)[:-1], axis=1)
    keys = _permutations(for_keys)[:, :n_pairs]
    values = config.keys + randint(for_values, config.values)
    order = _permutations(for_order)

    tokens = np.full((count, config.length), config.keys + config.values)
    tokens[:, 0 : 2 * n_pairs : 2] = keys
    tokens[:, 1 : 2 * n_pairs : 2] = values
    # after the pairs come `n_slots` fillers and queries; each query takes one more token than a filler
    slots = np.sort(_permutations(for_slots)[:, :n_pairs], axis=1)
    position = 2 * n_pairs + slots + np.arange(n_pairs)
    row = np.arange(count)[:, None]
    tokens[row, position] = np.take_along_axis(keys, order, axis=1)
    tokens[row, position + 1] = np.take_along_axis(values, order, axis=1)
    is_answer = np.zeros((count, config.length), dtype=bool)
    is_answer[row, position + 1] = True
    return tokens, is_answer


def _permutations(numbers: np.ndarray) -> np.ndarray:
    """Return a random permutation of 0 .. m-1 for each row of `[n, m]` random numbers."""
    return np.argsort(numbers, axis=1, kind="stable")
