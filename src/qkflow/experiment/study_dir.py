"""The folder of a study: its lock, its design, and its decisions, which are checked when they are read.

STUDY/
  design.json              the design, written before the first run (`design`)
  decisions.jsonl          the decisions of each round, and checksums (`decisions`)
  corpus.json              statistics and excerpts of the data
  tuning/ARM/lr-0.003/     one run folder per learning rate, if there is more than one
  tuning.json              the learning rates that each arm tried; qkflow does not read it
  runs/ARM/seed-0/         one run folder per arm and seed
  lock                     held by the process that runs the experiment
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from qkflow.config import from_dict, to_dict
from qkflow.data import open_corpus
from qkflow.data.tasks import TaskConfig, open_task
from qkflow.errors import UsageError
from qkflow.experiment.decisions import Decisions
from qkflow.experiment.design import FORMAT, Design
from qkflow.experiment.spec import ExperimentSpec, spec_differences
from qkflow.io import checksum, discard, locked, refuse_special_files, write_json
from qkflow.training.run_dir import read_json


def write_design(study: Path, design: Design) -> None:
    """Write the design into the study's folder."""
    write_json(study / "design.json", to_dict(design))


def holds_study(study: Path) -> bool:
    """Whether the folder holds a study."""
    return (study / "design.json").is_file()


def read_design(study: Path | str) -> Design:
    """The design in a study's folder; `UsageError` if there is none."""
    study = Path(study)
    if not holds_study(study):
        raise UsageError(f"{study} is not a study (no design.json): give a folder written by `qkflow compare`")
    path = study / "design.json"
    data = read_json(path)
    if data.get("format") != FORMAT:
        raise UsageError(f"{path} has format {data.get('format')!r}, expected {FORMAT}")
    try:
        return from_dict(Design, data)
    except (UsageError, ValueError, OverflowError) as error:  # an integer may be too large for a float
        raise UsageError(f"{path}: {error}") from error


def read_decisions(study: Path, design: Design) -> Decisions:
    """The decisions of a study; `UsageError` if they are not those of its design, or the design was changed."""
    decisions, path = Decisions(study), study / "design.json"
    if not decisions.records:  # killed after writing the design
        if any((study / name).exists() for name in ("runs", "tuning")):
            raise UsageError(f"{decisions.path} is missing: restore it from a copy, or start a new study")
        return decisions
    if decisions.records[0].get("sha256_design") != checksum(path):
        raise UsageError(
            f"{path} was changed after the study was started: restore it from a copy, or start a new study"
        )
    names, seeds_used = design.spec.arms, 0
    for number, round_ in enumerate(decisions.rounds(), 1):
        arms = tuple(name for name in names if name in round_.arms)
        if number > len(design.rule.seeds_by_round) or names[0] not in arms:
            raise UsageError(f"{decisions.path}: round {number} does not follow the design")
        planned = design.round(number, arms, seeds_used)
        if round_ != replace(planned, seeds=planned.seeds[: len(round_.seeds)]):  # a round may be cut short by time
            raise UsageError(f"{decisions.path}: round {number} does not follow the design")
        seeds_used += len(round_.seeds)
    for arm, rate in decisions.rates().items():
        if arm not in names or rate not in design.arm(arm).rates:
            raise UsageError(f"{decisions.path}: the learning rate {rate} of {arm!r} is not in the design")
    judged = decisions.of_kind("verdicts")
    if [record["round"] for record in judged] != list(range(1, len(judged) + 1)) or len(judged) > len(
        decisions.rounds()
    ):
        raise UsageError(f"{decisions.path}: the verdicts are not those of its rounds")
    for verdict in decisions.verdicts().values():
        if verdict.arm not in names[1:]:
            raise UsageError(f"{decisions.path}: there is no arm {verdict.arm!r} in the design")
    return decisions


def refuse_links(study: Path) -> None:
    """Raise `UsageError` if a link in a study's folder leads out of it, or a file in it is a pipe or a device."""
    refuse_special_files(study)
    for folder, folders, files in os.walk(study):
        for path in (Path(folder, name) for name in (*folders, *files)):
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(study)):
                raise UsageError(f"{path} leads out of {study}: remove the link")


def refuse_other_folder(spec: ExperimentSpec | None, study: Path) -> None:
    """Raise `UsageError` if the folder holds neither a study nor nothing, or a link leads out of it."""
    if study.exists() and not study.is_dir():
        raise UsageError(f"{study} is a file: choose a folder for the study")
    if not holds_study(study):
        if spec is None:
            raise no_study(study)
        names = [path.name for path in study.iterdir()] if study.exists() else []
        if others := sorted(name for name in names if name != "lock" and not name.endswith(".tmp")):
            raise UsageError(f"{study} is not empty ({others[0]}) and holds no study: choose another folder")
    refuse_links(study)


def resume_study_command(study: Path) -> str:
    """The command that resumes a study.

    >>> resume_study_command(Path("my studies/a"))
    "qkflow compare --resume 'my studies/a'"
    """
    return f"qkflow compare --resume {shlex.quote(str(study))}"


@contextlib.contextmanager
def locked_study(study: Path) -> Iterator[None]:
    """Hold the lock of the study's folder, and remove temporary files of earlier processes."""
    with locked(study / "lock"):
        for pattern in (".*.tmp", "runs/*/.*.tmp", "tuning/*/.*.tmp"):
            for path in study.glob(pattern):
                discard(path)
        yield


def resumed_design(spec: ExperimentSpec | None, study: Path) -> Design:
    """The design in the folder, if it has the same spec and its data has not changed."""
    design = read_design(study)
    decisions = read_decisions(study, design)
    if not decisions.records:  # killed after writing the design
        decisions.append_design(0.0)
    if spec is not None and spec != design.spec:
        lines = "".join(f"\n  {line}" for line in spec_differences(design.spec, spec))
        raise UsageError(f"{study} holds a different study: choose another folder.{lines}")
    data = design.spec.data
    opened = open_task(data) if isinstance(data, TaskConfig) else open_corpus(data)
    if opened.digest != design.digest:
        raise UsageError(
            f"the data {opened.name} has changed since {study} was started (hash {opened.digest[:12]}, expected "
            f"{design.digest[:12]}): restore it, or start a new study"
        )
    return design


def no_study(study: Path) -> UsageError:
    """The error for a folder without a study."""
    return UsageError(f"{study} holds no study to resume: give a folder written by `qkflow compare`")
