"""Extend a finished study with more seeds: a new design that keeps the error rate, next to copies of the old runs."""

from __future__ import annotations

import functools
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from qkflow.errors import UsageError
from qkflow.experiment.design import Design, chosen_rates, extended_design, holds_study, planned_runs, read_design
from qkflow.experiment.run_status import read_status
from qkflow.experiment.spec import ExperimentSpec
from qkflow.io import checksum, write_folder
from qkflow.training.run_dir import finished


def extend(study: Path | str, *, seeds: int) -> ExperimentSpec:
    """The spec of a new study that extends `study` to `seeds` seeds."""
    study = Path(study)
    return replace(read_design(study).spec, seeds=seeds, extends=str(study.absolute()))


def design_extension(spec: ExperimentSpec, *, command: Sequence[str]) -> Design:
    """The design of an extension; `UsageError` if its parent is unfinished or was asked for something else."""
    study = Path(spec.extends or "")
    parent = read_design(study)
    if parent.spec.rationale is not None:
        raise UsageError(
            f"{study} measures rationales, whose intervals are not corrected for extensions: start a new study with "
            f"--seeds {spec.seeds}"
        )
    if spec.seeds is None or spec.seeds <= parent.seeds:
        raise UsageError(f"{study} already has {parent.seeds} seeds, got {spec.seeds}: give a larger number")
    if replace(spec, seeds=None, extends=None) != replace(parent.spec, seeds=None, extends=None):
        raise UsageError(f"an extension changes only the number of seeds of {study}: leave out everything else")
    for run in planned_runs(parent, chosen_rates(study, parent)):
        if finished(study / run.folder) is None and not read_status(study / run.folder).failed_for_good:
            raise UsageError(
                f"{study} is not finished ({run.name} is missing): run "
                f"`qkflow compare --resume {shlex.quote(str(study))}` first"
            )
    return extended_design(spec, parent, checksum(study / "design.json"), command=command)


def copy_parent_runs(study: Path, design: Design, notice: Callable[[str], None]) -> None:
    """Copy the runs of the parent study that this study does not have yet, each atomically."""
    if design.extends is None:
        return
    parent = Path(design.extends.folder)
    missing = [run.folder for run in planned_runs(design) if not any((study / run.folder).glob("*.json"))]
    if not holds_study(parent) or checksum(parent / "design.json") != design.extends.digest:
        if missing:
            notice(f"{parent} is no longer the study that this one extends: its missing runs are trained again")
        return
    for folder in missing:
        if (parent / folder).is_dir():
            shutil.rmtree(study / folder, ignore_errors=True)
            write_folder(study / folder, functools.partial(_copy_run, parent / folder))


def _copy_run(source: Path, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("checkpoints", "lock", ".*.tmp"))
