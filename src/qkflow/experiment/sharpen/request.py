"""What the user asks a study of sharper attention for, and the arms that follow from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import get_args

from qkflow.data.tasks import TaskConfig
from qkflow.errors import UsageError, unknown
from qkflow.experiment.spec import parse_arm
from qkflow.models.one_layer import Form
from qkflow.probes.attention import Pooling


@dataclass(frozen=True, kw_only=True)
class ArmDesign:
    """One way to train: how many times as fast as the rest the QK circuit learns."""

    name: str
    """`r = 20`."""
    told: str
    """What learns how fast, in a phrase."""
    ratio: float = 1.0
    """r."""
    growth: float | None = None
    """What r grows to over the steps."""
    embeddings: float = 1.0
    """How many times as fast embeddings learn; 1, but for the published arms."""


@dataclass(frozen=True, kw_only=True)
class RationaleRequest:
    """A question: does faster query-key learning sharpen attention on this task?

    >>> [arm.name for arm in arms(RationaleRequest(ratios=(1.0, 20.0), growths=(40.0,)), published=None)]
    ['r = 1', 'r = 20', 'r = 1 to 40']
    """

    task: TaskConfig = field(default_factory=TaskConfig)
    """The task, and how much of it."""
    ratios: tuple[float, ...] = (1.0, 5.0, 20.0)
    """Every r to try; the first is the baseline."""
    growths: tuple[float, ...] = ()
    """What r grows to in a straight line, from 1, in further arms."""
    published: bool = False
    """Whether the arm as it was published, whose embeddings are sped up too, stands beside them."""
    seeds: int = 5
    """Runs of each arm."""
    rates: tuple[float, ...] | None = None
    """Learning rates that each arm is tuned over; None: those of the task."""
    steps: int | None = None
    """Steps of a run; None: those of the task."""
    batch: int | None = None
    """Instances a step; None: those of the task."""
    mechanism: str = "standard"
    """What attends, as in `standard:window=8`."""
    form: Form = "FAFO"
    """Of the synthetic task's one-layer model: which circuits are factorised."""
    tau: float = 0.5
    """The mass from which on attention counts as confident."""
    pooling: Pooling = "average"
    """How layers become one."""
    part: float = 0.05
    """The part of the tokens that is deleted to see whether an answer rests on them."""
    jobs: int | None = None
    """Runs at a time; None: one a core."""

    def __post_init__(self) -> None:
        every = (*self.ratios, *self.growths)
        if any(not 0 < r < math.inf for r in every):
            raise UsageError(f"r must be a finite number above 0, got {', '.join(f'{r:g}' for r in every)}")
        for name, values in (("ratios", self.ratios), ("growths", self.growths), ("rates", self.rates or ())):
            if len({f"{value:g}" for value in values}) < len(values):  # arms and folders are named like that
                raise UsageError(f"{name} has a number twice: give each once")
        if 1.0 in self.growths:
            raise UsageError("an r that grows from 1 to 1 does not grow: leave it out of --growth")
        if len(every) + self.published < 2:
            raise UsageError("a study compares at least two arms: give --ratios 1,20")
        if not self.ratios:
            raise UsageError("the first ratio is the baseline: give --ratios 1,20")
        for name in ("seeds", "steps", "batch", "jobs"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        if self.rates is not None and (not self.rates or any(not 0 < rate < math.inf for rate in self.rates)):
            raise UsageError(f"learning rates must be finite numbers above 0, got {self.rates}")
        if not 0 < self.tau <= 1 or not 0 < self.part <= 1:
            raise UsageError(f"tau and part lie above 0 and are at most 1, got {self.tau:g} and {self.part:g}")
        if self.form not in get_args(Form):
            raise unknown("form", self.form, get_args(Form))
        if self.pooling not in get_args(Pooling):
            raise unknown("pooling", self.pooling, get_args(Pooling))
        self._refuse_what_would_do_nothing()

    def _refuse_what_would_do_nothing(self) -> None:
        of_theory = self.task.name == "synthetic"
        if of_theory and self.mechanism != "standard":
            raise UsageError(
                f"the task synthetic has the one-layer model of the theory, got mechanism {self.mechanism!r}: choose a"
                " form, or another task"
            )
        if not of_theory and self.form != "FAFO":
            raise UsageError(f"forms are for the task synthetic, got {self.form!r} for {self.task.name}: leave it out")
        if not parse_arm(self.mechanism)[1].is_identity:
            raise UsageError(f"the mechanism {self.mechanism!r} has a ratio: give it as --ratios 1,20 or --growth 40")


def arms(request: RationaleRequest, *, published: tuple[float, float] | None) -> tuple[ArmDesign, ...]:
    """The arms of a request; `published` has the factors of the QK circuit and of the embeddings in the task's code."""
    found = [
        ArmDesign(name=f"r = {r:g}", told="all at one rate" if r == 1 else f"W_Q and W_K {r:g} times as fast", ratio=r)
        for r in request.ratios
    ]
    found += [
        ArmDesign(name=f"r = 1 to {r:g}", told=f"W_Q and W_K up to {r:g} times as fast, growing", growth=r)
        for r in request.growths
    ]
    if request.published:
        if published is None:
            raise UsageError(
                f"there is no published arm of {request.task.name} as it is asked for: leave out --published,"
                " or give --data with Marvin & Linzen's pairs or HateXplain"
            )
        qk, embeddings = published
        told = f"W_Q and W_K {qk:g} times as fast, and embeddings {embeddings:g} times"
        found.append(ArmDesign(name="published", told=told, ratio=qk, embeddings=embeddings))
    return tuple(found)
