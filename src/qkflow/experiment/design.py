"""The design of a study: written before its first run, never edited. All runs follow from it.

STUDY/
  design.json              this
  corpus.json              notes on the corpus, and excerpts of its held-out text
  tuning/ARM/lr-0.003/     a run folder for each learning rate that is tried, where there is more than one
  tuning.json              what tuning chose; follows from the folders
  runs/ARM/seed-0/         a run folder for each arm and seed
  lock                     held by the process that runs the study
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from qkflow.config import from_dict, to_dict
from qkflow.errors import UsageError
from qkflow.experiment.arm import parse_arm
from qkflow.experiment.spec import ExperimentSpec
from qkflow.io import write_json
from qkflow.models import DecoderConfig
from qkflow.training import TrainConfig
from qkflow.training.run_dir import read_json

FORMAT = 1
EVALUATIONS = 20
"""Evaluations of a run; its steps are a multiple, so that one falls on the end of the learning rate's plateau."""
TUNING_EVALUATIONS = 4
"""Evaluations of a tuning run: only the last one matters."""
DECAY = 0.2
"""The last part of a run, in which the learning rate falls; before it, and after the warm-up, it stays."""
TUNING_SEED = 1000
"""The seed of every tuning run, and never one of a run that counts."""


@dataclass(frozen=True, kw_only=True)
class ArmDesign:
    """One arm, matched to the baseline."""

    name: str
    """As it was asked for, e.g. `differential:window=64` or `standard:r=20`."""
    folder: str
    """The name as a folder's."""
    model: DecoderConfig
    """Its shape, with the feed-forward width that matching chose."""
    parameters: int
    """How many it has."""
    flops_per_token: int
    """Of one forward pass at the context's length, declared; training costs three times as much."""
    state_bytes: int
    """What its layers carry after a context's length of tokens, a sequence."""
    steps: int
    """Steps of each of its runs."""
    tuning_steps: int
    """Steps of each of its tuning runs; 0 where one learning rate was given."""
    seconds_per_step: float | None
    """Measured before the study, with as many runs at a time as it has; None where nothing depended on it."""


@dataclass(frozen=True, kw_only=True)
class ParentStudy:
    """The study that another one extends."""

    folder: str
    """Where it was."""
    digest: str
    """SHA-256 of its design.json."""


@dataclass(frozen=True, kw_only=True)
class Design:
    """A study before it is run."""

    request: ExperimentSpec
    """What was asked for."""
    command: tuple[str, ...]
    """The command that asked."""
    date: str
    """When, in UTC."""
    corpus: str
    """The corpus's name."""
    digest: str
    """The hash of its text."""
    size: str
    """The named size, or `own`."""
    arms: tuple[ArmDesign, ...]
    """The baseline first."""
    seeds: int
    """Runs of each arm: run i has seed i for its start and, as every arm's run i, seed i for its data."""
    base: TrainConfig
    """What all runs share; model, steps, evaluations, seeds and learning rates are set for each (`jobs`)."""
    jobs: int
    """Runs at a time."""
    look: int
    """1; in a study that extends another, one more than that one's."""
    error_rate: float
    """The part of the request's error rate that this look may spend."""
    extends: ParentStudy | None
    """The study that this one goes on from."""
    expected_seconds: float | None
    """What the runs were expected to take; None where nothing was measured."""
    unit: str = "byte"
    """What losses are per: a byte of text, or an answer token of a task."""
    format: int = FORMAT
    """Version of this file."""

    def arm(self, name: str) -> ArmDesign:
        """The arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def tuned(self) -> bool:
        """Whether arms choose among several learning rates."""
        return len(self.request.learning_rates) > 1


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run of a study."""

    arm: str
    """The arm's name."""
    seed: int
    """Its seed."""
    kind: Literal["tuning", "main"]
    """Whether it serves to choose a learning rate, or counts."""
    folder: Path
    """The run folder, relative to the study's."""
    steps: int
    """Its steps."""
    config: TrainConfig | None
    """What is trained; None while tuning has not chosen the learning rate."""

    @property
    def name(self) -> str:
        """For people: `standard seed 3`, or `standard lr-0.003`."""
        return f"{self.arm} {self.folder.name.replace('seed-', 'seed ')}"


def jobs(design: Design, rates: Mapping[str, float] | None = None) -> tuple[PlannedRun, ...]:
    """Every run of the design: tuning first, then seed by seed all arms, the longest first.

    `rates` are the learning rates that tuning chose, by arm; an arm that is not among them has main runs without a
    config.
    """
    given = design.request.learning_rates
    chosen = dict.fromkeys((arm.name for arm in design.arms), given[0]) if not design.tuned else dict(rates or {})
    longest = sorted(design.arms, key=lambda arm: -arm.steps * (arm.seconds_per_step or arm.flops_per_token))
    tuning = [_tuning(design, arm, rate) for rate in given for arm in longest] if design.tuned else []
    main = [_main(design, arm, seed, chosen.get(arm.name)) for seed in range(design.seeds) for arm in longest]
    return (*tuning, *main)


def _tuning(design: Design, arm: ArmDesign, rate: float) -> PlannedRun:
    return PlannedRun(
        arm=arm.name,
        seed=TUNING_SEED,
        kind="tuning",
        folder=Path("tuning", arm.folder, f"lr-{rate!r}"),
        steps=arm.tuning_steps,
        config=configured(
            design.base, arm.name, arm.model, arm.tuning_steps, TUNING_SEED, rate, evaluations=TUNING_EVALUATIONS
        ),
    )


def _main(design: Design, arm: ArmDesign, seed: int, rate: float | None) -> PlannedRun:
    return PlannedRun(
        arm=arm.name,
        seed=seed,
        kind="main",
        folder=Path("runs", arm.folder, f"seed-{seed}"),
        steps=arm.steps,
        config=None if rate is None else configured(design.base, arm.name, arm.model, arm.steps, seed, rate),
    )


def configured(
    base: TrainConfig,
    arm: str,
    model: DecoderConfig,
    steps: int,
    seed: int,
    rate: float,
    *,
    evaluations: int = EVALUATIONS,
) -> TrainConfig:
    """The config of one run of an arm, whose name says how fast its queries and keys learn."""
    _, ratio = parse_arm(arm)
    return replace(
        base,
        model=model,
        steps=steps,
        evaluate_every=steps // evaluations,
        seed=seed,
        data_seed=seed,
        lr=rate,
        qk_ratio=ratio.start,
        qk_growth=ratio.end,
    )


def folder_names(names: Sequence[str]) -> tuple[str, ...]:
    """Names as those of folders: safe characters, not too long, no two alike even where upper and lower case are one.

    >>> folder_names(["differential:window=64", "differential window=64"])
    ('differential_window=64', 'differential_window=64-2')
    """
    found: list[str] = []
    for name in names:
        stem = re.sub(r"[^A-Za-z0-9=+,._-]+", "_", name).lstrip(".") or "arm"
        if len(stem) > 80:
            stem = f"{stem[:60]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        taken, number, candidate = {other.casefold() for other in found}, 1, stem
        while candidate.casefold() in taken:
            number += 1
            candidate = f"{stem}-{number}"
        found.append(candidate)
    return tuple(found)


def write_design(study: Path, design: Design) -> None:
    """Put the design into the study's folder."""
    write_json(study / "design.json", to_dict(design))


def holds_study(study: Path) -> bool:
    """Whether a study was begun in this folder."""
    return (study / "design.json").is_file()


def read_design(study: Path | str) -> Design:
    """The design of a study's folder; anything that is not one is a `UsageError`."""
    study = Path(study)
    if not holds_study(study):
        raise UsageError(f"{study} holds no study (no design.json): expected a folder that `qkflow compare` made")
    data = read_json(study / "design.json")
    if "preset" in data and "format" not in data:
        raise UsageError(
            f"{study} is a study of `qkflow sharpen`: its own command, with --out {study}, goes on with it and writes"
            " its page anew"
        )
    if data.get("format") != FORMAT:
        raise UsageError(f"{study / 'design.json'} is of format {data.get('format')!r}, expected {FORMAT}")
    return from_dict(Design, data)
