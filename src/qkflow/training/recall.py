"""Accuracy on a recall task, per cell of its grid, and recall.json, which stores it.

RUN/recall.json: {"task": the corpus's record of it, "split", "step", "cells": [{"pairs", "length", "depth",
"instances", "questions", "right", "squares"}, ...]}. A coordinate that a task does not have is null.

The 95 % confidence interval of an accuracy p is Wilson's, for n independent questions. If each of k instances asks one
question, n = k. If they ask several, the answers within an instance are correlated, and n follows from the variance
between instances, with a correction for few instances (Korn and Graubard 1998):

    n = p (1 - p) / variance of the mean * (z / t_{k-1})^2,    variance = (squares / k - p^2) / (k - 1)

with z and t the quantiles of the normal and of Student's t distribution, and n at most the number of questions. If all
answers are correct, or all are wrong, the variance is zero, and n = k.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from qkflow.config import from_dict
from qkflow.data import Split, Window
from qkflow.data.text.corpus import CELL_DTYPE
from qkflow.io import write_json

if TYPE_CHECKING:
    from qkflow.training.evaluate import Evaluation

FILE = "recall.json"
GRADED = np.dtype([*CELL_DTYPE.descr, ("questions", "<i8"), ("right", "<i8")])
"""One instance: its cell of the grid, the number of its questions, and how many were answered correctly."""
_COORDINATES = CELL_DTYPE.names or ()
_LEVEL = 0.975
_QUANTILE = NormalDist().inv_cdf(_LEVEL)


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """The accuracy in one cell of a task's grid.

    >>> cell = CellResult(pairs=None, length=256, depth=50, instances=100, questions=100, right=90, squares=90.0)
    >>> cell.accuracy, round(cell.low, 3), round(cell.high, 3)
    (0.9, 0.826, 0.945)
    """

    pairs: int | None
    """Pairs per instance; None if the task has none."""
    length: int | None
    """Tokens per instance; None if cells of several lengths are pooled."""
    depth: int | None
    """Position of the needle, in percent of the haystack; None if the task has none."""
    instances: int
    questions: int
    right: int
    """Questions that were answered correctly."""
    squares: float
    """Sum over instances of the squared fraction of correct answers."""

    def __post_init__(self) -> None:
        is_valid = 1 <= self.instances <= self.questions and 0 <= self.right <= self.questions
        if not is_valid or not 0 <= self.squares <= self.instances:
            raise ValueError(f"not the counts of a cell: {self}")

    @property
    def accuracy(self) -> float:
        """The fraction of correct answers."""
        return self.right / self.questions

    @property
    def low(self) -> float:
        """The lower end of the 95 % confidence interval."""
        return self.interval[0]

    @property
    def high(self) -> float:
        """The upper end of the 95 % confidence interval."""
        return self.interval[1]

    @cached_property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % confidence interval."""
        p, n, z2 = self.accuracy, self._n_independent, _QUANTILE**2
        middle, half = p + z2 / (2 * n), math.sqrt(z2 * (p * (1 - p) / n + z2 / (4 * n * n)))
        return max(0.0, (middle - half) / (1 + z2 / n)), min(1.0, (middle + half) / (1 + z2 / n))

    @property
    def _n_independent(self) -> float:
        from scipy.special import stdtrit  # imported here: it takes longer than all of qkflow

        p, k = self.accuracy, self.instances
        if k in (1, self.questions) or p in (0, 1):
            return float(k)
        variance = self.squares / k - p * p
        if variance < 1e-12:  # zero, up to rounding
            return float(self.questions)
        t = float(stdtrit(k - 1, _LEVEL))
        return min(float(self.questions), p * (1 - p) * (k - 1) / variance * (_QUANTILE / t) ** 2)


@dataclass(frozen=True, kw_only=True)
class RecallResult:
    """The content of recall.json."""

    task: dict[str, Any]
    """The corpus's record of the task: spec, context, chance, axes."""
    split: str
    """The split that was evaluated: test."""
    step: int
    """Training steps of the model."""
    cells: tuple[CellResult, ...]
    """Every cell of the grid, ordered by pairs, length and depth."""


class RecallGrader:
    """Grades the instances of a recall task. A question is correct only if every token of its answer is."""

    def __init__(self, split: Split) -> None:
        self.answers, cells = np.asarray(split.answers), np.asarray(split.cells)
        self.answer_range = np.searchsorted(np.ascontiguousarray(self.answers[:, 0]), split.documents)
        self.cells = np.zeros(len(cells), GRADED)
        """One row per instance."""
        for name in _COORDINATES:
            self.cells[name] = cells[name]
        self.cells["questions"] = np.diff(self.answer_range).ravel()

    def grade(self, window: Window, hits: np.ndarray) -> None:
        """Count the correct answers of an instance; `hits[j]`: target j of its window was the most likely token."""
        first, last = self.answer_range[window.document]
        spans = self.answers[first:last] - (window.begin + 1)
        misses = np.concatenate([[0], np.cumsum(~hits)])
        self.cells["right"][window.document] = int((misses[spans[:, 0]] == misses[spans[:, 1]]).sum())


def by_cell(evaluation: Evaluation) -> tuple[CellResult, ...]:
    """The results of an evaluation per cell; empty for text."""
    instances = evaluation.cells
    if instances is None:
        return ()
    cells, cell_index = np.unique(instances[[*_COORDINATES]].astype(CELL_DTYPE), return_inverse=True)
    fractions = instances["right"] / instances["questions"]
    return tuple(
        CellResult(
            **{name: None if cell[name] < 0 else int(cell[name]) for name in _COORDINATES},
            instances=int((inside := cell_index == number).sum()),
            questions=int(instances["questions"][inside].sum()),
            right=int(instances["right"][inside].sum()),
            squares=float((fractions[inside] ** 2).sum()),
        )
        for number, cell in enumerate(cells)
    )


def together(cells: Sequence[CellResult]) -> CellResult:
    """Several cells pooled into one, with the coordinates that all of them share.

    >>> first = CellResult(pairs=None, length=64, depth=0, instances=9, questions=9, right=9, squares=9.0)
    >>> second = CellResult(pairs=None, length=64, depth=100, instances=9, questions=9, right=0, squares=0.0)
    >>> pooled = together([first, second])
    >>> pooled.length, pooled.depth, pooled.accuracy
    (64, None, 0.5)
    """
    coordinates = {name: {getattr(cell, name) for cell in cells} for name in _COORDINATES}
    return CellResult(
        **{name: values.pop() if len(values) == 1 else None for name, values in coordinates.items()},
        instances=sum(cell.instances for cell in cells),
        questions=sum(cell.questions for cell in cells),
        right=sum(cell.right for cell in cells),
        squares=math.fsum(cell.squares for cell in cells),
    )


def write_recall(folder: Path, result: RecallResult) -> None:
    """Write RUN/recall.json atomically."""
    write_json(folder / FILE, asdict(result))


def read_recall(folder: Path) -> RecallResult | None:
    """Read RUN/recall.json; None if it is missing, damaged or has another structure.

    >>> read_recall(Path("no such folder"))
    """
    try:
        data = json.loads((folder / FILE).read_bytes())
        cells = tuple(from_dict(CellResult, cell) for cell in data["cells"])
        task, split, step = data["task"], data["split"], data["step"]
        types = (task["axes"], list), (task["spec"], str), (task["chance"], int | float), (split, str), (step, int)
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    if not cells or not all(isinstance(value, expected) for value, expected in types):
        return None
    return RecallResult(task=task, split=split, step=step, cells=cells)
