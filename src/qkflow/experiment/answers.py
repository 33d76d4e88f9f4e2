"""What the finished runs of a study answered: their recall.json, put together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from qkflow.errors import UsageError
from qkflow.experiment.metrics.recall import GridCell, RecallGrid, RecallSummary, RunAnswers, Tally, recall
from qkflow.training import RecallResult, read_recall


def read_answers(folders: Mapping[str, Mapping[int, Path]]) -> RecallSummary | None:
    """The accuracy of every arm from its run folders by seed, the baseline first; None where none has answered.

    A run without a recall.json, or with a damaged one, is left out: one of a text has none.
    """
    grids: dict[Path, RecallGrid] = {}
    runs: dict[str, list[RunAnswers]] = {name: [] for name in folders}
    for name, by_seed in folders.items():
        for seed, folder in by_seed.items():
            if (found := read_recall(folder)) is not None:
                grids[folder] = _grid(folder, found)
                runs[name].append(RunAnswers(seed=seed, tallies=_tallies(found)))
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


def _grid(folder: Path, found: RecallResult) -> RecallGrid:
    grid = RecallGrid(
        task=found.task["spec"],
        chance=float(found.task["chance"]),
        axes=tuple(map(str, found.task["axes"])),
        context=found.task.get("context"),
        cells=tuple(GridCell(pairs=cell.pairs, length=cell.length, depth=cell.depth) for cell in found.cells),
    )
    try:
        for axis in grid.axes:
            for cell in grid.cells:
                cell.at(axis)  # complains where there is no such place
    except (ValueError, AttributeError) as error:
        raise UsageError(
            f"{folder} has a recall.json whose grid is not one ({error}): restore it from a copy"
        ) from error
    return grid


def _tallies(found: RecallResult) -> tuple[Tally, ...]:
    return tuple(Tally(instances=cell.instances, questions=cell.questions, right=cell.right) for cell in found.cells)
