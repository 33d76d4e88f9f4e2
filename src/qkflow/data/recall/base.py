"""Instances of a recall task, and checks of its options."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from qkflow.errors import UsageError


class RecallCell(NamedTuple):
    """A cell of a test grid; None where an axis does not apply."""

    pairs: int | None
    """Key-value pairs to remember."""
    length: int
    """Tokens per instance."""
    depth: int | None
    """Position of the needle, in percent of the haystack."""


class Instances(NamedTuple):
    """Generated instances of equal length."""

    tokens: np.ndarray
    """int64 `[n, length]`: text, questions and answers."""
    answers: np.ndarray
    """int64 `[m, 3]`: instance, begin and end of each answer, in order."""
    cells: np.ndarray
    """`[n]` of dtype `CELL_DTYPE`."""

    def select(self, mask: np.ndarray) -> Instances:
        """Return the instances where the bool mask `[n]` is true."""
        new_index = np.cumsum(mask) - 1
        answers = self.answers[mask[self.answers[:, 0]]]
        answers = np.column_stack([new_index[answers[:, 0]], answers[:, 1:]])
        return Instances(self.tokens[mask], answers, self.cells[mask])


def check_minimum(task: str, minimum: int, options: dict[str, int | tuple[int, ...]]) -> None:
    """Raise a `UsageError` if an option, or a number of a list option, is below `minimum` or given twice."""
    for name, value in options.items():
        numbers = value if isinstance(value, tuple) else (value,)
        text = "+".join(map(str, numbers)) or "nothing"
        if not numbers or min(numbers) < minimum:
            raise UsageError(f"{task}: {name} must be at least {minimum}, got {text}")
        if len(set(numbers)) < len(numbers):
            raise UsageError(f"{task}: {name} contains a number twice ({text}): list each number once")
