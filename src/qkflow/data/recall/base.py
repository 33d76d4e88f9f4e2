"""Instances of a recall task, and checks of its options."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from qkflow.errors import UsageError


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
    """`[n]` of dtype `CELL_DTYPE`."""

    def where(self, kept: np.ndarray) -> Instances:
        """The instances that a bool mask `[n]` keeps, in their order."""
        number = np.cumsum(kept) - 1
        answers = self.answers[kept[self.answers[:, 0]]]
        answers = np.column_stack([number[answers[:, 0]], answers[:, 1:]])
        return Instances(self.tokens[kept], answers, self.cells[kept])


def at_least(task: str, least: int, options: dict[str, int | tuple[int, ...]]) -> None:
    """Refuse an option, or a number of an option's list, that is below the least that makes sense."""
    for name, value in options.items():
        numbers = value if isinstance(value, tuple) else (value,)
        if not numbers or min(numbers) < least:
            got = "+".join(map(str, numbers)) or "nothing"
            raise UsageError(f"{task}: {name} is {got}: give {least} or more")
        if len(set(numbers)) < len(numbers):
            raise UsageError(f"{task}: {name} names a number twice ({'+'.join(map(str, numbers))}): give each once")
