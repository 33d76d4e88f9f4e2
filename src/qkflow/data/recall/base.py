"""What all recall tasks share: instances, and random numbers that are the same everywhere.

Numbers come from SplitMix64 with a counter, not from numpy's generators, whose streams may change with its version:

    x_ij = mix(mix(h(seed) + g (i + 1)) + g (j + 1)),    g = 2^64 / golden ratio

is the j-th number of instance i, so that an instance depends on the seed and its own place alone.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from qkflow.data.splitmix import mixed
from qkflow.errors import UsageError

GOLDEN = np.uint64(0x9E3779B97F4A7C15)

Seed = int | str
"""What a stream of instances is chosen by."""


class Cell(NamedTuple):
    """A place of a test grid; None where a task has no such thing."""

    pairs: int | None
    """Pairs to remember."""
    length: int
    """Tokens of an instance."""
    depth: int | None
    """Where the needle lies, in percent of the haystack."""


class Instances(NamedTuple):
    """Questions with their texts, all of one length."""

    tokens: np.ndarray
    """int64 `[n, length]`: text, questions and answers."""
    answers: np.ndarray
    """int64 `[m, 3]`: instance, and where in it an answer begins and ends, in order."""
    cells: np.ndarray
    """`[n]` of dtype `CELL`."""

    def where(self, kept: np.ndarray) -> Instances:
        """The instances that a bool mask `[n]` keeps, in their order."""
        number = np.cumsum(kept) - 1
        answers = self.answers[kept[self.answers[:, 0]]]
        answers = np.column_stack([number[answers[:, 0]], answers[:, 1:]])
        return Instances(self.tokens[kept], answers, self.cells[kept])


def draws(seed: Seed, instances: np.ndarray, columns: int) -> np.ndarray:
    """Random uint64 `[n, columns]`, a row for each numbered instance.

    >>> draws(0, np.array([7]), 2).tolist() == draws(0, np.array([6, 7]), 3)[1:, :2].tolist()
    True
    """
    start = np.frombuffer(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), dtype="<u8")
    rows = mixed(start + GOLDEN * (instances.astype(np.uint64) + np.uint64(1)))
    return mixed(rows[:, None] + GOLDEN * np.arange(1, columns + 1, dtype=np.uint64))


def below(numbers: np.ndarray, limit: int | np.ndarray) -> np.ndarray:
    """Random numbers as int64 in [0, limit); the bias of the remainder is below limit / 2^64."""
    return (numbers % np.asarray(limit, dtype=np.uint64)).astype(np.int64)


def at_least(task: str, least: int, options: dict[str, int | tuple[int, ...]]) -> None:
    """Refuse an option, or a number of an option's list, that is below the least that makes sense."""
    for name, value in options.items():
        numbers = value if isinstance(value, tuple) else (value,)
        if not numbers or min(numbers) < least:
            got = "+".join(map(str, numbers)) or "nothing"
            raise UsageError(f"{task}: {name} is {got}: give {least} or more")
        if len(set(numbers)) < len(numbers):
            raise UsageError(f"{task}: {name} names a number twice ({'+'.join(map(str, numbers))}): give each once")
