"""The design of an experiment: written before the first run and never edited. All runs follow from it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from qkflow.data.tasks import TaskConfig
from qkflow.errors import UsageError
from qkflow.experiment.decisions import Round
from qkflow.experiment.spec import MOST_SEEDS, ExperimentSpec
from qkflow.experiment.stats.rounds import Rule
from qkflow.training import TrainConfig
from qkflow.training.config import ModelConfig

FORMAT = 3
TUNING_SEED = 10**6
"""The seed of every tuning run; no other run has it."""
_MOST_JOBS = 4096
_FOLDER = re.compile(r"[A-Za-z0-9=+,_-][A-Za-z0-9=+,._-]{0,99}")


@dataclass(frozen=True, kw_only=True)
class ArmDesign:
    """One arm, matched to the baseline."""

    name: str
    """As requested, e.g. `differential:window=64` or `standard:r=20`."""
    folder: str
    """The name as a folder name."""
    model: ModelConfig
    """The model, with the feed-forward width that matching chose."""
    parameters: int
    flops_per_token: int
    """Declared FLOPs of one forward pass at the context length (training costs three times as much); 0: not known."""
    state_bytes: int
    """Size of the state after one context length, per sequence."""
    rates: tuple[float, ...]
    """Learning rates. If there is more than one, tuning chooses."""
    steps: int
    """Steps per run."""
    tuning_steps: int
    """Steps per tuning run; 0 if there is one learning rate."""
    seconds_per_step: float | None
    """Measured before the experiment with all concurrent runs; None if nothing depended on it."""

    def __post_init__(self) -> None:
        if not _FOLDER.fullmatch(self.folder):
            raise UsageError(f"the arm {self.name!r} has the folder {self.folder!r}: expected a plain folder name")
        for name, least in (
            ("steps", 1),
            ("parameters", 1),
            ("tuning_steps", 0),
            ("flops_per_token", 0),
            ("state_bytes", 0),
        ):
            if (value := getattr(self, name)) < least:
                raise UsageError(f"the arm {self.name!r} has {name} = {value}: expected at least {least}")
        if not self.rates or not all(0 < rate < math.inf for rate in self.rates):
            raise UsageError(f"the arm {self.name!r} needs learning rates above 0, got {self.rates}")
        if self.seconds_per_step is not None and not 0 < self.seconds_per_step < math.inf:
            raise UsageError(f"the arm {self.name!r} has {self.seconds_per_step} seconds per step: expected above 0")

    @property
    def step_cost(self) -> float:
        """The relative cost of a step: seconds, or FLOPs, or 1."""
        return self.seconds_per_step or float(self.flops_per_token) or 1.0


@dataclass(frozen=True, kw_only=True)
class Design:
    """An experiment before it is run."""

    spec: ExperimentSpec
    """What was asked for."""
    command: tuple[str, ...]
    """The command that asked for it."""
    date: str
    """When, in UTC."""
    corpus: str
    """The name of the data."""
    digest: str
    """The hash of the data."""
    size: str
    """The named size, `own` for a given model, or `preset`."""
    arms: tuple[ArmDesign, ...]
    """The baseline first."""
    rule: Rule
    """How many seeds each round has, and how verdicts are decided. All arms share the seeds `first_seed`, `first_seed +
    1`, ... for initialization and for the data."""
    first_seed: int
    base: TrainConfig
    """What all runs share. `planned_runs` sets model, steps, evaluations, seeds and learning rate."""
    jobs: int
    """Concurrent runs."""
    budget: float | None
    """Seconds after which no further round starts; None: there is no limit."""
    expected_seconds: float | None
    """Expected time of all runs, if no arm is decided early; None if nothing was measured."""
    unit: str = "byte"
    """What losses are per: a byte of text, or an answer token of a recall task, or an answer of a task."""
    format: int = FORMAT
    """Version of this file."""

    def __post_init__(self) -> None:
        if tuple(arm.name for arm in self.arms) != self.spec.arms:
            raise UsageError("the arms of the design are not those of its spec")
        if len({arm.folder.casefold() for arm in self.arms}) < len(self.arms):
            raise UsageError("two arms of the design share a folder")
        if not 0 <= self.first_seed < TUNING_SEED - MOST_SEEDS:
            raise UsageError(f"first_seed must be from 0 to {TUNING_SEED - MOST_SEEDS - 1}, got {self.first_seed}")
        if self.seeds > MOST_SEEDS:
            raise UsageError(f"a design has at most {MOST_SEEDS} seeds, got {self.seeds}")
        if (self.rule.error_rate, self.rule.margin) != (self.spec.error_rate, self.spec.margin):
            raise UsageError("the error rate and the margin of the rule are not those of the spec")
        if not 1 <= self.jobs <= _MOST_JOBS:
            raise UsageError(f"jobs must be from 1 to {_MOST_JOBS}, got {self.jobs}")
        for name in ("budget", "expected_seconds"):
            if (value := getattr(self, name)) is not None and not 0 <= value < math.inf:
                raise UsageError(f"{name} must be a finite number of seconds, got {value}")

    @property
    def seeds(self) -> int:
        """The most runs per arm."""
        return self.rule.seeds_by_round[-1]

    def arm(self, name: str) -> ArmDesign:
        """The arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)

    def round(self, number: int, arms: Sequence[str], seeds_used: int) -> Round:
        """A round, counted from 1, of these arms; its seeds are those after `seeds_used` up to the last by the rule."""
        seeds = range(self.first_seed + seeds_used, self.first_seed + self.rule.seeds_by_round[number - 1])
        return Round(number=number, arms=tuple(arms), seeds=tuple(seeds))

    @property
    def tuned(self) -> bool:
        """Whether arms choose among several learning rates."""
        return any(len(arm.rates) > 1 for arm in self.arms)

    @property
    def step_items(self) -> tuple[int, str]:
        """What a step trains on: a number of tokens, or of instances of a task."""
        if isinstance(self.base.data, TaskConfig):
            return self.base.batch, "instances"
        return self.base.batch * self.base.context, "tokens"
