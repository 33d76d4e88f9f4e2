"""Accuracy on a task, cell by cell of its grid, and recall.json, which keeps it.

RUN/recall.json: {"task": the corpus's record of it, "split", "step", "cells": [{"pairs", "length", "depth",
"instances", "questions", "right", "squares"}, ...]}. A place that a task does not have is null.

The 95 % interval of an accuracy p is Wilson's. Where each of k instances asks one question, it is one of k questions.
Where they ask several, those of one instance may succeed or fail together, so it is one of as many questions as the
spread over instances allows, fewer where that is known from few instances (Korn and Graubard 1998):

    n = p (1 - p) / variance of the mean * (z / t_{k-1})^2,    variance = (squares / k - p^2) / (k - 1)

with z and t the quantiles of the normal and of Student's distribution, and never more than were asked. Where all are
right, or all wrong, the spread says nothing, and an instance counts once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from qkflow.data.text.corpus import CELL_DTYPE
from qkflow.io import write_json
from qkflow.training.evaluation import Evaluation

FILE = "recall.json"
_PLACES = CELL_DTYPE.names or ()
_LEVEL = 0.975
_QUANTILE = NormalDist().inv_cdf(_LEVEL)


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """How one cell of a task's grid was answered.

    >>> cell = CellResult(pairs=None, length=256, depth=50, instances=100, questions=100, right=90, squares=90.0)
    >>> cell.accuracy, round(cell.low, 3), round(cell.high, 3)
    (0.9, 0.826, 0.945)
    """

    pairs: int | None
    """Pairs of an instance; None where the task has none."""
    length: int | None
    """Tokens of an instance; None where cells of several lengths are taken together."""
    depth: int | None
    """Where the needle lies, in percent of the haystack; None where the task has none."""
    instances: int
    """Instances in this cell."""
    questions: int
    """Their questions."""
    right: int
    """How many of those were answered right."""
    squares: float
    """Sum over the instances of the squared part of their questions that was answered right."""

    @property
    def accuracy(self) -> float:
        """The part that was answered right."""
        return self.right / self.questions

    @property
    def low(self) -> float:
        """The lower end of the accuracy's 95 % interval."""
        return self.interval[0]

    @property
    def high(self) -> float:
        """The upper end of the accuracy's 95 % interval."""
        return self.interval[1]

    @cached_property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval with the number of independent questions."""
        p, n, z2 = self.accuracy, self._independent, _QUANTILE**2
        middle, half = p + z2 / (2 * n), math.sqrt(z2 * (p * (1 - p) / n + z2 / (4 * n * n)))
        return max(0.0, (middle - half) / (1 + z2 / n)), min(1.0, (middle + half) / (1 + z2 / n))

    @property
    def _independent(self) -> float:
        from scipy.special import stdtrit  # here: it takes longer to import than all of qkflow

        p, k = self.accuracy, self.instances
        if k in (1, self.questions) or p in (0, 1):
            return float(k)
        spread = self.squares / k - p * p
        if spread < 1e-12:  # all instances alike, but for rounding
            return float(self.questions)
        t = float(stdtrit(k - 1, _LEVEL))
        return min(float(self.questions), p * (1 - p) * (k - 1) / spread * (_QUANTILE / t) ** 2)


@dataclass(frozen=True, kw_only=True)
class RecallResult:
    """What recall.json holds."""

    task: dict[str, Any]
    """The corpus's record of the task: spec, context, chance, axes."""
    split: str
    """The part that was asked: test."""
    step: int
    """Steps the weights had seen."""
    cells: tuple[CellResult, ...]
    """Every cell of the grid, in order of pairs, length and depth."""


def by_cell(evaluation: Evaluation) -> tuple[CellResult, ...]:
    """The instances of an evaluation, cell by cell; none where it is one of text."""
    if evaluation.cells is None:
        return ()
    rows = evaluation.cells
    places, which = np.unique(rows[[*_PLACES]].astype(CELL_DTYPE), return_inverse=True)
    parts = rows["right"] / rows["questions"]
    return tuple(
        CellResult(
            **{name: None if place[name] < 0 else int(place[name]) for name in _PLACES},
            instances=int((here := which == number).sum()),
            questions=int(rows["questions"][here].sum()),
            right=int(rows["right"][here].sum()),
            squares=float((parts[here] ** 2).sum()),
        )
        for number, place in enumerate(places)
    )


def together(cells: Sequence[CellResult]) -> CellResult:
    """Several cells as one, for which only the places that they share are left.

    >>> one = CellResult(pairs=None, length=64, depth=0, instances=9, questions=9, right=9, squares=9.0)
    >>> other = CellResult(pairs=None, length=64, depth=100, instances=9, questions=9, right=0, squares=0.0)
    >>> together([one, other]).length, together([one, other]).depth, together([one, other]).accuracy
    (64, None, 0.5)
    """
    places = {name: {getattr(cell, name) for cell in cells} for name in _PLACES}
    return CellResult(
        **{name: shared.pop() if len(shared) == 1 else None for name, shared in places.items()},
        instances=sum(cell.instances for cell in cells),
        questions=sum(cell.questions for cell in cells),
        right=sum(cell.right for cell in cells),
        squares=math.fsum(cell.squares for cell in cells),
    )


def write_recall(folder: Path, result: RecallResult) -> None:
    """Write RUN/recall.json, whole or not at all."""
    write_json(folder / FILE, asdict(result))


def read_recall(folder: Path) -> RecallResult | None:
    """Read RUN/recall.json; None where it is missing, damaged, or of another shape.

    >>> read_recall(Path("no such folder"))
    """
    try:
        data = json.loads((folder / FILE).read_bytes())
        cells = tuple(_cell(cell) for cell in data["cells"])
        task, split, step = data["task"], data["split"], data["step"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    if not (_is_task(task) and isinstance(split, str) and isinstance(step, int) and cells):
        return None
    return RecallResult(task=task, split=split, step=step, cells=cells)


def _is_task(record: Any) -> bool:
    """Whether this is a corpus's record of a task, as far as it is read."""
    if not isinstance(record, dict) or not isinstance(record.get("axes"), list):
        return False
    return isinstance(record.get("spec"), str) and isinstance(record.get("chance"), int | float)


def _cell(data: dict[str, Any]) -> CellResult:
    """A cell from JSON; anything else is a `ValueError`."""
    cell = CellResult(**data)
    places, counts = [getattr(cell, name) for name in _PLACES], [cell.instances, cell.questions, cell.right]
    if not all(isinstance(count, int) for count in counts) or not all(x is None or isinstance(x, int) for x in places):
        raise ValueError(f"not the counts of a cell: {data}")
    if not (
        1 <= cell.instances <= cell.questions
        and 0 <= cell.right <= cell.questions
        and 0 <= cell.squares <= cell.instances
    ):
        raise ValueError(f"not the counts of a cell: {data}")
    return cell
