"""What the user asked a study for. Everything else in its design follows from this, the corpus and the machine."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from qkflow.data import CorpusConfig
from qkflow.errors import UsageError, unknown
from qkflow.models import SIZES, DecoderConfig

Match = Literal["tokens", "flops", "seconds"]
Device = Literal["auto", "cpu", "cuda", "mps"]


@dataclass(frozen=True, kw_only=True)
class ExperimentSpec:
    """A question: do these arms differ from the first of them on this text?

    >>> request = ExperimentSpec(corpus=CorpusConfig(), arms=("standard", "differential"), budget=180.0)
    >>> request.baseline
    'standard'
    """

    corpus: CorpusConfig
    """The text, and how it becomes tokens."""
    arms: tuple[str, ...]
    """Mechanisms, as in `differential:window=64` or `standard:r=20`; the first is the baseline."""
    match: Match = "tokens"
    """What the arms share besides parameters: training tokens, FLOPs, or measured seconds of training."""
    budget: float | None = None
    """Seconds that the whole study may take; None: ten minutes, or as long as `tokens` take where they are given."""
    size: str | None = None
    """A named size; None: what the budget affords."""
    model: DecoderConfig | None = None
    """A shape of one's own in place of a size; its mechanism is that of each arm."""
    tokens: int | None = None
    """Training tokens of a run of the baseline; None: what the budget affords."""
    seeds: int | None = None
    """Runs of each arm; None: what the budget affords."""
    learning_rates: tuple[float, ...] = (3e-3,)
    """More than one: each arm tries all of them in short runs first, and takes its best."""
    context: int | None = None
    """Tokens a window; None: what suits the size."""
    batch: int | None = None
    """Windows a step; None: what suits the size."""
    margin: float = 0.005
    """Differences within this part of the baseline's loss are as good as none."""
    error_rate: float = 0.05
    """How often a chain of studies may call equal arms different."""
    passes: float = 4.0
    """How many times a run may read the corpus, at most."""
    jobs: int | None = None
    """Runs at a time; None: as many as the cores take."""
    threads: int | None = None
    """CPU threads a run; None: one where there are at least as many runs as cores."""
    device: Device = "auto"
    """Where to train."""
    extends: str | None = None
    """The folder of the study that this one goes on from, with more seeds."""

    def __post_init__(self) -> None:
        if len(self.arms) < 2:
            raise UsageError(f"a study compares at least two arms, got {self.arms}: give --arms standard,differential")
        for number, arm in enumerate(self.arms):
            if arm in self.arms[:number]:
                raise UsageError(f"the arm {arm!r} is there twice: give each once")
        if self.size is not None and self.model is not None:
            raise UsageError("give a size or a model, not both")
        if self.size is not None and self.size not in SIZES:
            raise unknown("size", self.size, SIZES)
        for name in ("tokens", "seeds", "context", "batch", "jobs", "threads"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        for name in ("budget", "passes"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise UsageError(f"{name} must be a finite number above 0, got {value:g}")
        for name in ("margin", "error_rate"):
            if not 0 < getattr(self, name) < 1:
                raise UsageError(f"{name} must lie between 0 and 1, got {getattr(self, name):g}")
        if not self.learning_rates or len(set(self.learning_rates)) < len(self.learning_rates):
            raise UsageError(f"learning rates must be given, each once, got {self.learning_rates}")
        for rate in self.learning_rates:
            if not 0 < rate < math.inf:
                raise UsageError(f"a learning rate must be a finite number above 0, got {rate:g}")

    @property
    def baseline(self) -> str:
        """The arm that the others are held against."""
        return self.arms[0]


def differences(there: ExperimentSpec, here: ExperimentSpec) -> tuple[str, ...]:
    """A line for each field in which two requests differ.

    >>> one = ExperimentSpec(corpus=CorpusConfig(), arms=("standard", "differential"), seeds=5)
    >>> differences(one, ExperimentSpec(corpus=CorpusConfig(), arms=("standard", "differential"), seeds=3))
    ('seeds: 5 there, 3 here',)
    """
    pairs = [(field.name, getattr(there, field.name), getattr(here, field.name)) for field in fields(ExperimentSpec)]
    return tuple(f"{name}: {_shown(old)} there, {_shown(new)} here" for name, old, new in pairs if old != new)


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_shown, value))
    if isinstance(value, CorpusConfig):
        default = CorpusConfig()
        changed = [
            f for f in fields(value) if f.name != "source" and getattr(value, f.name) != getattr(default, f.name)
        ]
        return " ".join([value.source, *(f"{field.name}={getattr(value, field.name)}" for field in changed)])
    return f"{value:g}" if isinstance(value, float) else str(value)
