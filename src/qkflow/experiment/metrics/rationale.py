"""What a study of sharper attention has found, as data: everything that a page or a terminal shows of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

MetricName = Literal[
    "performance", "mass", "confident", "comprehensiveness", "sufficiency", "effective", "random", "gradient"
]


@dataclass(frozen=True, kw_only=True)
class RationaleMetric:
    """A number of each test instance, and how to read it."""

    name: MetricName
    title: str
    """As the head of a column: `AC(0.5)`."""
    unit: Literal["percent", "", "tokens"]
    """Percent: the number is a part of one, shown times a hundred."""
    better: Literal["higher", "lower", "neither"]
    told: str
    """What it is, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class MetricSummary:
    """A metric of an arm: the mean over test instances and seeds."""

    mean: float | None
    """None: no run is finished, or no instance has the number."""
    by_seed: tuple[float, ...]
    """The mean over the instances under each seed."""


@dataclass(frozen=True, kw_only=True)
class MetricChange:
    """A metric of an arm minus the baseline's, paired by seed and by instance."""

    arm: str
    metric: MetricName
    mean: float
    low: float | None
    """The interval's lower end at the study's level; None with one seed."""
    high: float | None
    p: float | None
    """Two-sided; None with one seed."""
    p_holm: float | None
    """After Holm's correction over the arms, for this metric."""


@dataclass(frozen=True, kw_only=True)
class TrainingPoint:
    """A run at one moment of its training, on validation instances."""

    step: int
    loss: float
    """Nats."""
    mass: float
    """Mean attention mass on the rationale."""
    performance: float


@dataclass(frozen=True, kw_only=True)
class RationaleArm:
    """One way to train, over its seeds."""

    name: str
    """`r = 20`."""
    told: str
    """What learns how fast, in a phrase."""
    lr: float | None
    """The learning rate that its tuning chose."""
    tried: Mapping[float, float | None]
    """Validation loss of each learning rate tried; None: that run failed."""
    seeds: tuple[int, ...]
    """Seeds of finished runs."""
    readings: Mapping[MetricName, MetricSummary]
    curve: tuple[tuple[float, float], ...]
    """(tau, AC(tau)): the part of instances with at least that much attention on the rationale."""
    paths: tuple[tuple[TrainingPoint, ...], ...]
    """The training of each seed."""
    at_equal_loss: MetricSummary | None
    """Mass at the loss that every run of the study has passed (`RationaleSummary.equal_loss`)."""
    by_kind: Mapping[str, Mapping[MetricName, float]]
    """Means over each kind of instance, where the task has kinds."""
    failures: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AttentionExample:
    """A test instance as the arms' models of one seed read it."""

    words: tuple[str, ...]
    rationale: tuple[int, ...]
    answer: str
    """The right answer."""
    attention: Mapping[str, tuple[float, ...]]
    """For each arm: the attention of the last token, pooled, over the words. The key `before training` is the start."""
    predicted: Mapping[str, str]
    """For each arm: its answer, with its probability: `plural (0.93)`."""


@dataclass(frozen=True, kw_only=True)
class RationaleSummary:
    """The whole study; the first arm is the baseline."""

    task: str
    digest: str
    kind: Literal["classification", "generation"]
    instances: int
    """Test instances."""
    with_rationale: int
    """Those whose rationale is known."""
    skipped: Mapping[str, int]
    notes: tuple[str, ...]
    """What the task says about itself."""
    remarks: tuple[str, ...]
    """What a reader of this study must know: failed runs, an arm that found no learning rate, ..."""
    arms: tuple[RationaleArm, ...]
    metrics: tuple[RationaleMetric, ...]
    changes: tuple[MetricChange, ...]
    """For each arm but the first and each metric; none for an arm without a finished pair."""
    tau: float
    level: float
    pooling: str
    part: float
    """The part of tokens deleted for comprehensiveness: 0.05."""
    equal_loss: float | None
    """A validation loss, in nats, that every finished run has passed; None: there is none."""
    examples: tuple[AttentionExample, ...]
    """Empty where texts may not be shown."""
    published: tuple[tuple[str, float, float, float], ...]
    """The paper's rows for this task: (arm, performance, AC, comprehensiveness), in percent, percent and parts of 1."""
    runs: int
    finished: int
    answer: str
    """What the study says, in a sentence or two."""
    command: tuple[str, ...]
    design: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)

    def change(self, arm: str, metric: MetricName) -> MetricChange | None:
        """The paired difference of an arm in a metric."""
        return next((one for one in self.changes if one.arm == arm and one.metric == metric), None)
