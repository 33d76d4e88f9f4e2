"""Accuracy on a recall task: over all questions, along the first axis of the test grid, and in every cell.

A run's accuracy in a cell is the number of right answers over the number of questions. Elsewhere it is the mean over
cells. Over the n seeds of an arm, with standard deviation s,

    mean +- t_{n-1}((1 + level) / 2) s / sqrt(n)

clipped to the range of an accuracy, and likewise for the differences to the baseline's run of the same seed. All runs
answer the same questions: the interval is about other seeds, not other questions. There is no correction over arms or
cells.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qkflow.errors import UsageError
from qkflow.experiment.stats.t_dist import half_width
from qkflow.training import RecallResult, read_recall

LEVEL = 0.95
"""Confidence level of all intervals."""


@dataclass(frozen=True, kw_only=True)
class GridCell:
    """A cell of the test grid; None for axes that the task does not have."""

    pairs: int | None = None
    """Key-value pairs per instance."""
    length: int | None = None
    """Tokens per instance."""
    depth: int | None = None
    """Position of the needle, in percent of the haystack."""

    def at(self, axis: str) -> int:
        """The coordinate along an axis.

        >>> GridCell(length=512, depth=25).at("depth")
        25
        """
        if (coordinate := getattr(self, axis)) is None:
            raise ValueError(f"this cell has no {axis}")
        return coordinate


@dataclass(frozen=True, kw_only=True)
class Tally:
    """The answers of one run in one cell."""

    instances: int
    questions: int
    right: int


@dataclass(frozen=True, kw_only=True)
class RunAnswers:
    """The answers of one run."""

    seed: int
    tallies: tuple[Tally, ...]
    """One per cell."""


@dataclass(frozen=True, kw_only=True)
class SeedMean:
    """The mean over seeds, with its interval.

    >>> mean = seed_mean({0: 0.9, 1: 0.8, 2: 1.0}, least=0.0)
    >>> round(mean.mean, 3), round(mean.half, 3), round(mean.low, 3), mean.high
    (0.9, 0.248, 0.652, 1.0)
    """

    seeds: tuple[int, ...]
    values: tuple[float, ...]
    """In the order of the seeds."""
    mean: float
    half: float | None
    """Half the width of the interval before clipping; None with one seed."""
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class AccuracySummary:
    """Accuracy of an arm on some cells; None if it has no run, or no pair with the baseline."""

    accuracy: SeedMean | None
    difference: SeedMean | None
    """Minus the baseline's, seed by seed; None for the baseline itself."""


@dataclass(frozen=True, kw_only=True)
class ArmRecall:
    """The answers of one arm."""

    arm: str
    runs: tuple[RunAnswers, ...]
    """Of each finished run."""
    overall: AccuracySummary
    """Mean over all cells."""
    along: tuple[AccuracySummary, ...]
    """Mean over the cells at each coordinate of the first axis."""
    cells: tuple[AccuracySummary, ...]


@dataclass(frozen=True, kw_only=True)
class RecallGrid:
    """The test grid of a recall task."""

    task: str
    """The task's spec."""
    chance: float
    """Accuracy of guessing."""
    axes: tuple[str, ...]
    """`pairs`, or `length` and `depth`."""
    context: int | None
    """Tokens per training instance."""
    cells: tuple[GridCell, ...]

    @property
    def places(self) -> tuple[int, ...]:
        """Coordinates along the first axis, ascending."""
        return places(self.cells, self.axes[0])


@dataclass(frozen=True, kw_only=True)
class RecallSummary(RecallGrid):
    """Accuracy on the test instances of a recall task."""

    level: float
    """Confidence level of the intervals."""
    arms: tuple[ArmRecall, ...]
    """The baseline first."""


def read_recall_summary(folders: Mapping[str, Mapping[int, Path]]) -> RecallSummary | None:
    """The accuracy of every arm, from its run folders by seed, the baseline first; None if no run has recall.json."""
    grids: dict[Path, RecallGrid] = {}
    runs: dict[str, list[RunAnswers]] = {name: [] for name in folders}
    for name, by_seed in folders.items():
        for seed, folder in by_seed.items():
            if (result := read_recall(folder)) is not None:
                grids[folder] = _read_grid(folder, result)
                runs[name].append(RunAnswers(seed=seed, tallies=_tallies(result)))
    if not grids:
        return None
    first, grid = next(iter(grids.items()))
    for folder, other in grids.items():
        if other != grid:
            raise UsageError(
                f"{folder} answered other questions ({other.task}) than {first} ({grid.task}): the study's folder was "
                "altered, restore it from a copy"
            )
    return recall(grid, runs)


def recall(grid: RecallGrid, runs: Mapping[str, Sequence[RunAnswers]]) -> RecallSummary:
    """The accuracy of every arm, given its finished runs by name, the baseline's first."""
    accuracies = {name: {run.seed: _accuracies(run, grid) for run in arm_runs} for name, arm_runs in runs.items()}
    baseline = next(iter(accuracies.values()), {})
    all_cells = range(len(grid.cells))
    coordinates = [cell.at(grid.axes[0]) for cell in grid.cells]
    groups = [[n for n in all_cells if coordinates[n] == place] for place in grid.places]

    def summarise(name: str, cells: Sequence[int]) -> AccuracySummary:
        own, other = (
            {seed: statistics.fmean(values[n] for n in cells) for seed, values in by_seed.items()}
            for by_seed in (accuracies[name], baseline)
        )
        pairs = {}
        if accuracies[name] is not baseline:
            pairs = {seed: own[seed] - other[seed] for seed in own if seed in other}
        return AccuracySummary(
            accuracy=seed_mean(own, least=0.0) if own else None,
            difference=seed_mean(pairs, least=-1.0) if pairs else None,
        )

    arms = tuple(
        ArmRecall(
            arm=name,
            runs=tuple(arm_runs),
            overall=summarise(name, all_cells),
            along=tuple(summarise(name, group) for group in groups),
            cells=tuple(summarise(name, [n]) for n in all_cells),
        )
        for name, arm_runs in runs.items()
    )
    return RecallSummary(**vars(grid), level=LEVEL, arms=arms)


def seed_mean(values: Mapping[int, float], *, least: float) -> SeedMean:
    """The mean over seeds with its interval, clipped to [`least`, 1].

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
    """The coordinates of a grid along an axis, ascending.

    >>> places([GridCell(pairs=8), GridCell(pairs=4), GridCell(pairs=8)], "pairs")
    (4, 8)
    """
    return tuple(sorted({cell.at(axis) for cell in cells}))


def _accuracies(run: RunAnswers, grid: RecallGrid) -> list[float]:
    if len(run.tallies) != len(grid.cells) or any(tally.questions < 1 for tally in run.tallies):
        raise UsageError(
            f"the run of seed {run.seed} has answers in {len(run.tallies)} cells, expected {len(grid.cells)} with "
            "questions: its recall.json was altered, restore it from a copy"
        )
    return [tally.right / tally.questions for tally in run.tallies]


def _read_grid(folder: Path, result: RecallResult) -> RecallGrid:
    grid = RecallGrid(
        task=result.task["spec"],
        chance=float(result.task["chance"]),
        axes=tuple(map(str, result.task["axes"])),
        context=result.task.get("context"),
        cells=tuple(GridCell(pairs=cell.pairs, length=cell.length, depth=cell.depth) for cell in result.cells),
    )
    try:
        for axis in grid.axes:
            for cell in grid.cells:
                cell.at(axis)
    except (ValueError, AttributeError) as error:
        raise UsageError(f"{folder}/recall.json has an invalid grid ({error}): restore it from a copy") from error
    return grid


def _tallies(result: RecallResult) -> tuple[Tally, ...]:
    return tuple(Tally(instances=cell.instances, questions=cell.questions, right=cell.right) for cell in result.cells)
