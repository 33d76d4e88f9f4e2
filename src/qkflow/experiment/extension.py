"""More seeds for a finished study: a new design that keeps the error rate, and the old runs beside the new ones."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from qkflow.errors import UsageError
from qkflow.experiment.design import Design, ParentStudy, holds_study, jobs, read_design
from qkflow.experiment.run_status import read_status
from qkflow.experiment.spec import ExperimentSpec
from qkflow.experiment.stats.verdict import look_rate
from qkflow.experiment.tuning import rates
from qkflow.io import checksum, write_folder
from qkflow.training.run_dir import finished


def extend(study: Path | str, *, seeds: int) -> ExperimentSpec:
    """What to ask for so that a study goes on to `seeds` seeds in a folder of its own."""
    study = Path(study)
    return replace(read_design(study).request, seeds=seeds, extends=str(study.absolute()))


def extended(request: ExperimentSpec, *, command: Sequence[str]) -> Design:
    """The design of a study that extends another: the same in everything but its seeds and its error rate."""
    study = Path(request.extends or "")
    old = read_design(study)
    if request.seeds is None or request.seeds <= old.seeds:
        raise UsageError(f"{study} has {old.seeds} seeds already: extend it to more, got {request.seeds}")
    if replace(request, seeds=None, extends=None) != replace(old.request, seeds=None, extends=None):
        raise UsageError(f"an extension of {study} asks for what that study asked for: give nothing but more seeds")
    for job in jobs(old, rates(study, old)):
        if finished(study / job.folder) is None and not read_status(study / job.folder).failed_for_good:
            raise UsageError(
                f"{study} is not finished ({job.name} is missing): go on with "
                f"`qkflow compare --resume {shlex.quote(str(study))}` first"
            )
    look = old.look + 1
    return replace(
        old,
        request=request,
        command=tuple(command),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        seeds=request.seeds,
        look=look,
        error_rate=look_rate(request.error_rate, look),
        extends=ParentStudy(folder=str(study), digest=checksum(study / "design.json")),
        expected_seconds=None
        if old.expected_seconds is None
        else old.expected_seconds * (request.seeds / old.seeds - 1),
    )


def bring_over(study: Path, design: Design, notice: Callable[[str], None]) -> None:
    """Copy the runs of the study that is extended, each whole or not at all; what is there already stays."""
    if design.extends is None:
        return
    old = Path(design.extends.folder)
    missing = [job.folder for job in jobs(design) if not any((study / job.folder).glob("*.json"))]
    if not holds_study(old) or checksum(old / "design.json") != design.extends.digest:
        if missing:
            notice(f"{old} is no longer the study that this one extends: runs that are not here yet are made again")
        return
    for folder in missing:
        if (old / folder).is_dir():
            shutil.rmtree(study / folder, ignore_errors=True)
            write_folder(study / folder, lambda place, folder=folder: _copy(old / folder, place))


def _copy(source: Path, place: Path) -> None:
    shutil.copytree(source, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("checkpoints", "lock", ".*.tmp"))
