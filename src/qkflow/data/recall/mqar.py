"""Multi-query associative recall (MQAR, https://arxiv.org/abs/2312.04927): pairs first, then every key is asked once.

    k7 v2 k1 v5 k3 v2 . . k1 v5 . k3 v2 . . . k7 v2 .
    N pairs           the rest: N questions `key value` among fillers

Keys, values and fillers are different tokens; the keys of an instance are distinct, its values need not be. The
answers are the values after the second mention of each key. Every order of the questions, and every way to place them
that splits none, is equally likely.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from qkflow.data.recall.base import Cell, Instances, at_least
from qkflow.data.splitmix import Seed, randint, random_uint64
from qkflow.data.text.corpus import CELL_DTYPE
from qkflow.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class MQAR:
    """Which associations are to be recalled.

    >>> MQAR(pairs=(2, 4), length=32).chance
    0.015625
    """

    pairs: tuple[int, ...] = (4, 8, 16)
    """Numbers of pairs: drawn from these in training, a cell each in the test."""
    length: int = 64
    """Tokens of an instance, at least four a pair."""
    keys: int = 64
    """Different keys."""
    values: int = 64
    """Different values."""
    fillers: int = 1
    """Different fillers."""
    train: int = 100_000
    """Training instances."""
    validation: int = 512
    """Validation instances."""
    each: int = 200
    """Test instances for each number of pairs."""
    seed: int = 0
    """Which instances are drawn."""

    def __post_init__(self) -> None:
        counts = {"keys": self.keys, "values": self.values, "fillers": self.fillers}
        parts = {"train": self.train, "validation": self.validation, "each": self.each}
        at_least(self.name, 1, {"pairs": self.pairs, "length": self.length, **counts, **parts})
        most = max(self.pairs)
        if most > self.keys:
            raise UsageError(
                f"mqar: {most} pairs need {most} different keys, got keys={self.keys}: give more keys or fewer pairs"
            )
        if 4 * most > self.length:
            need = f"{most} pairs need {4 * most} tokens (a pair and its question are 4)"
            raise UsageError(f"mqar: {need}, got length={self.length}: give length={4 * most} or more, or fewer pairs")

    @property
    def name(self) -> str:
        """`mqar`."""
        return "mqar"

    @property
    def words(self) -> tuple[str, ...]:
        """Keys `k0 ..`, values `v0 ..`, fillers `.`, `.1 ..`: in this order, so that a token's number says which."""
        keys, values = (f"k{n}" for n in range(self.keys)), (f"v{n}" for n in range(self.values))
        return (*keys, *values, ".", *(f".{n}" for n in range(1, self.fillers)))

    @property
    def chance(self) -> float:
        """A guess among the values."""
        return 1 / self.values

    @property
    def axes(self) -> tuple[str, ...]:
        """Accuracy is read against the number of pairs."""
        return ("pairs",)

    def grid(self) -> tuple[Cell, ...]:
        """A cell for each number of pairs."""
        return tuple(Cell(pairs, self.length, None) for pairs in self.pairs)

    def draw(self, cell: Cell | None, *, seed: Seed, first: int, count: int) -> Instances:
        """Instances with the cell's number of pairs, or with one drawn from all."""
        config = self if cell is None or cell.pairs is None else replace(self, pairs=(cell.pairs,))
        return mqar(config, seed=seed, count=count, first=first)


def mqar(config: MQAR, *, seed: Seed, count: int, first: int = 0) -> Instances:
    """Instances `first` to `first + count - 1` of the stream that `seed` chooses.

    >>> config = MQAR(pairs=(2,), length=12)
    >>> made = mqar(config, seed=0, count=1)
    >>> " ".join(config.words[token] for token in made.tokens[0])
    'k48 v40 k35 v63 . . . k35 v63 . k48 v40'
    >>> made.answers.tolist()
    [[0, 8, 9], [0, 11, 12]]
    """
    filling = config.length if config.fillers > 1 else 0
    numbers = random_uint64(seed, first + np.arange(count), 1 + filling + config.keys + config.length)
    pairs = np.array(config.pairs)[randint(numbers[:, 0], len(config.pairs))]
    tokens = np.empty((count, config.length), dtype=np.int64)
    scored = np.zeros((count, config.length), dtype=bool)
    for some in config.pairs:
        rows = pairs == some
        tokens[rows], scored[rows] = _of_pairs(config, some, numbers[rows, 1 + filling :])
    if config.fillers > 1:
        blank = tokens == config.keys + config.values
        tokens += blank * randint(numbers[:, 1 : 1 + filling], config.fillers)
    instance, begin = np.nonzero(scored)
    cells = np.empty(count, dtype=CELL_DTYPE)
    cells["pairs"], cells["length"], cells["depth"] = pairs, config.length, -1
    return Instances(tokens, np.column_stack([instance, begin, begin + 1]), cells)


def _of_pairs(config: MQAR, pairs: int, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and which of them are answers, both `[n, length]`, for instances with `pairs` pairs."""
    count, pieces = len(numbers), config.length - 3 * pairs
    widths = [config.keys, pairs, pairs, pieces]
    chosen, valued, ordered, placed = np.split(numbers[:, : sum(widths)], np.cumsum(widths)[:-1], axis=1)
    keys = _shuffled(chosen)[:, :pairs]
    values = config.keys + randint(valued, config.values)
    order = _shuffled(ordered)

    tokens = np.full((count, config.length), config.keys + config.values)
    tokens[:, 0 : 2 * pairs : 2] = keys
    tokens[:, 1 : 2 * pairs : 2] = values
    # after the pairs come `pieces` fillers and questions in all; each question takes a second token
    piece = np.sort(_shuffled(placed)[:, :pairs], axis=1)
    place = 2 * pairs + piece + np.arange(pairs)
    row = np.arange(count)[:, None]
    tokens[row, place] = np.take_along_axis(keys, order, axis=1)
    tokens[row, place + 1] = np.take_along_axis(values, order, axis=1)
    scored = np.zeros((count, config.length), dtype=bool)
    scored[row, place + 1] = True
    return tokens, scored


def _shuffled(numbers: np.ndarray) -> np.ndarray:
    """A random permutation of 0 .. m-1 for each row of `[n, m]` random numbers."""
    return np.argsort(numbers, axis=1, kind="stable")
