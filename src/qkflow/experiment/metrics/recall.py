"""Accuracy on a task, arm by arm: over all questions, along the task's first axis, and in every cell of its test grid.

A run's accuracy in a cell is right answers over questions; elsewhere it is the mean over cells, each of which counts
alike. Over the n seeds of an arm, with s the standard deviation,

    mean +- t_{n-1}((1 + level) / 2) s / sqrt(n)

clipped to what an accuracy can be, and likewise for the differences to the baseline's run of the same seed. All runs
answer the same questions: the interval is about other seeds, not about other questions, and no correction over arms or
cells is made.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qkflow.errors import UsageError
from qkflow.experiment.stats.t_dist import half_width

LEVEL = 0.95
"""Confidence of every interval."""


@dataclass(frozen=True, kw_only=True)
class GridCell:
    """A place of the test grid; None where the task has no such thing."""

    pairs: int | None = None
    """Keys with values that an instance holds."""
    length: int | None = None
    """Tokens of an instance."""
    depth: int | None = None
    """Where its needle lies, in per cent of its haystack."""

    def at(self, axis: str) -> int:
        """Its place along one axis.

        >>> GridCell(length=512, depth=25).at("depth")
        25
        """
        if (place := getattr(self, axis)) is None:
            raise ValueError(f"this cell has no {axis}")
        return place


@dataclass(frozen=True, kw_only=True)
class Tally:
    """What one run answered in one cell."""

    instances: int
    questions: int
    right: int


@dataclass(frozen=True, kw_only=True)
class RunAnswers:
    """What one run answered."""

    seed: int
    tallies: tuple[Tally, ...]
    """One for each cell."""


@dataclass(frozen=True, kw_only=True)
class SeedMean:
    """A number of each seed, and what they say together.

    >>> found = seed_mean({0: 0.9, 1: 0.8, 2: 1.0}, least=0.0)
    >>> round(found.mean, 3), round(found.half, 3), round(found.low, 3), found.high
    (0.9, 0.248, 0.652, 1.0)
    """

    seeds: tuple[int, ...]
    values: tuple[float, ...]
    """In the order of the seeds."""
    mean: float
    half: float | None
    """Half the width of the interval before it is clipped; None with one seed."""
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class AccuracySummary:
    """How an arm did somewhere on the grid; None where it has no run, or no pair with the baseline's."""

    accuracy: SeedMean | None
    difference: SeedMean | None
    """Minus the baseline's, seed by seed; None for the baseline itself."""


@dataclass(frozen=True, kw_only=True)
class ArmRecall:
    """One arm's answers."""

    arm: str
    runs: tuple[RunAnswers, ...]
    """Of each seed whose run is finished."""
    overall: AccuracySummary
    """Mean over all cells."""
    along: tuple[AccuracySummary, ...]
    """At each place of the first axis: mean over the cells there."""
    cells: tuple[AccuracySummary, ...]
    """In each cell."""


@dataclass(frozen=True, kw_only=True)
class RecallGrid:
    """A task's test grid, as a run has it on record."""

    task: str
    """Its spec."""
    chance: float
    """Accuracy of guessing."""
    axes: tuple[str, ...]
    """What the grid goes along: pairs, or length and depth."""
    context: int | None
    """Tokens of a training instance."""
    cells: tuple[GridCell, ...]
    """Its places."""

    @property
    def places(self) -> tuple[int, ...]:
        """Places of the first axis, ascending."""
        return places(self.cells, self.axes[0])


@dataclass(frozen=True, kw_only=True)
class RecallSummary(RecallGrid):
    """Accuracy on the test instances of a task."""

    level: float
    """Confidence of the intervals."""
    arms: tuple[ArmRecall, ...]
    """The baseline first."""


def recall(grid: RecallGrid, runs: Mapping[str, Sequence[RunAnswers]]) -> RecallSummary:
    """The accuracy of every arm; `runs` are its finished runs by its name, the baseline's first."""
    by_arm = {name: {run.seed: _accuracies(run, grid) for run in found} for name, found in runs.items()}
    baseline = next(iter(by_arm.values()), {})
    every = range(len(grid.cells))
    first = [cell.at(grid.axes[0]) for cell in grid.cells]
    groups = [[n for n in every if first[n] == place] for place in grid.places]

    def reading(name: str, cells: Sequence[int]) -> AccuracySummary:
        own, other = (
            {seed: statistics.fmean(values[n] for n in cells) for seed, values in found.items()}
            for found in (by_arm[name], baseline)
        )
        pairs = {} if by_arm[name] is baseline else {seed: own[seed] - other[seed] for seed in own if seed in other}
        return AccuracySummary(
            accuracy=seed_mean(own, least=0.0) if own else None,
            difference=seed_mean(pairs, least=-1.0) if pairs else None,
        )

    arms = [
        ArmRecall(
            arm=name,
            runs=tuple(found),
            overall=reading(name, every),
            along=tuple(reading(name, group) for group in groups),
            cells=tuple(reading(name, [n]) for n in every),
        )
        for name, found in runs.items()
    ]
    return RecallSummary(**vars(grid), level=LEVEL, arms=tuple(arms))


def seed_mean(values: Mapping[int, float], *, least: float) -> SeedMean:
    """The mean over seeds with its interval, which ends at `least` and at 1.

    >>> seed_mean({3: 0.5}, least=0.0).half is None
    True
    """
    numbers = list(values.values())
    mean, half = statistics.fmean(numbers), None
    if len(numbers) > 1:
        error = statistics.stdev(numbers) / math.sqrt(len(numbers))
        half = float(half_width(LEVEL, (error, len(numbers) - 1)))
    return SeedMean(
        seeds=tuple(values),
        values=tuple(numbers),
        mean=mean,
        half=half,
        low=None if half is None else max(least, mean - half),
        high=None if half is None else min(1.0, mean + half),
    )


def places(cells: Sequence[GridCell], axis: str) -> tuple[int, ...]:
    """The places that a grid has along an axis, ascending.

    >>> places([GridCell(pairs=8), GridCell(pairs=4), GridCell(pairs=8)], "pairs")
    (4, 8)
    """
    return tuple(sorted({cell.at(axis) for cell in cells}))


def _accuracies(run: RunAnswers, grid: RecallGrid) -> list[float]:
    if len(run.tallies) != len(grid.cells) or any(tally.questions < 1 for tally in run.tallies):
        raise UsageError(
            f"a run of seed {run.seed} answered {len(run.tallies)} cells of a grid of {len(grid.cells)}, or none of "
            "the questions of one: its recall.json was altered, restore it from a copy"
        )
    return [tally.right / tally.questions for tally in run.tallies]
