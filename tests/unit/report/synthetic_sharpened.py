"""Studies of sharper attention that were never run: any arms, seeds, texts and names."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

from qkflow.experiment.metrics.rationale import (
    AttentionExample,
    MetricChange,
    MetricName,
    MetricSummary,
    RationaleArm,
    RationaleMetric,
    RationaleSummary,
    TrainingPoint,
)

ARMS = ("r = 1", "r = 5", "r = 20", "r = 1 to 40")
METRICS = (
    RationaleMetric(
        name="performance", title="accuracy", unit="percent", better="higher", told="The part answered rightly."
    ),
    RationaleMetric(name="mass", title="mass", unit="percent", better="higher", told="Attention on the rationale."),
    RationaleMetric(
        name="confident", title="AC(0.5)", unit="percent", better="higher", told="Instances with a mass of 0.5."
    ),
    RationaleMetric(
        name="comprehensiveness", title="comprehensiveness", unit="", better="higher", told="Lost without them."
    ),
    RationaleMetric(name="sufficiency", title="sufficiency", unit="", better="lower", told="Lost with them alone."),
    RationaleMetric(name="random", title="random words", unit="", better="neither", told="The floor."),
    RationaleMetric(name="gradient", title="gradient's words", unit="", better="neither", told="A yardstick."),
    RationaleMetric(name="effective", title="effective tokens", unit="tokens", better="neither", told="exp(entropy)."),
)
START: dict[MetricName, float] = {
    "performance": 0.924,
    "mass": 0.38,
    "confident": 0.41,
    "comprehensiveness": 0.24,
    "sufficiency": 0.12,
    "random": 0.04,
    "gradient": 0.3,
    "effective": 5.4,
}
GAIN: dict[MetricName, float] = {
    "performance": 0.001,
    "mass": 0.16,
    "confident": 0.2,
    "comprehensiveness": 0.03,
    "sufficiency": -0.02,
    "random": 0.001,
    "gradient": 0.001,
    "effective": -1.1,
}
TEXT = ("the", "author", "that", "the", "guards", "next", "to", "the", "old", "house", "like")


def study(
    arms: Sequence[str] = ARMS, *, seeds: int = 5, examples: int = 2, words: Sequence[str] = TEXT
) -> RationaleSummary:
    """A study's findings; without seeds, nothing has finished yet."""
    made = tuple(_arm(index, name, seeds) for index, name in enumerate(arms))
    changes = tuple(
        _change(arm, made[0], metric) for metric in METRICS for arm in made[1:] if arm.readings[metric.name].by_seed
    )
    return RationaleSummary(
        task="agreement (built-in grammar)",
        digest="9f2c4e1ab7d05563" * 4,
        kind="classification",
        instances=2000,
        with_rationale=1950,
        skipped={"rationale outside the text": 3},
        notes=("Split by template and noun: nothing leaks.",),
        remarks=("One seed says little.",) if seeds == 1 else (),
        arms=made,
        metrics=METRICS,
        changes=changes,
        tau=0.5,
        level=0.95,
        pooling="average",
        part=0.05,
        equal_loss=0.05 if seeds else None,
        examples=tuple(_example(n, arms, words) for n in range(examples)),
        published=(("slow QK", 92.43, 41.67, 0.24), ("fast QK", 93.41, 76.85, 0.3)),
        runs=max(1, seeds) * len(arms),
        finished=seeds * len(arms),
        answer=f"On agreement, against {arms[0]}: {arms[-1]} is sharper (+48.0 points, -1.0 to +50.0)."
        if seeds
        else "",
        command=("qkflow", "sharpen", "--task", "agreement"),
        design={"rates": [0.001, 0.01], "arms": list(arms)},
        environment={"torch": "2.13.0"},
    )


def _arm(index: int, name: str, seeds: int) -> RationaleArm:
    generator = np.random.default_rng(index)
    readings: dict[MetricName, MetricSummary] = {}
    for metric in METRICS:
        middle = START[metric.name] + index * GAIN[metric.name]
        top = 1.0 if metric.unit == "percent" else math.inf
        each = [min(top, float(middle + 0.01 * generator.normal())) for _ in range(seeds)]
        readings[metric.name] = MetricSummary(mean=statistics.fmean(each) if each else None, by_seed=tuple(each))
    taus = np.linspace(0, 1, 21)
    curve = [(float(tau), float(1 / (1 + math.exp(12 * (tau - 0.42 - 0.12 * index))))) for tau in taus] if seeds else []
    return RationaleArm(
        name=name,
        told="only the queries and keys learn at this speed" if index else "everything learns at one speed",
        lr=0.01 if seeds else None,
        tried={0.001: 0.21, 0.01: 0.05, 0.1: None},
        seeds=tuple(range(seeds)),
        readings=readings,
        curve=tuple(curve),
        paths=tuple(_path(index, seed) for seed in range(seeds)),
        at_equal_loss=MetricSummary(mean=0.3 + 0.15 * index, by_seed=(0.3 + 0.15 * index,) * seeds) if seeds else None,
        by_kind={"simple": {"performance": 0.99, "mass": 0.6}, "across a clause": {"performance": 0.8, "mass": 0.2}},
        failures=() if seeds else ("seed 0: the loss was not finite at step 12",),
    )


def _path(index: int, seed: int) -> tuple[TrainingPoint, ...]:
    generator = np.random.default_rng([index, seed])
    losses = [0.69 * math.exp(-0.25 * n) + 0.002 for n in range(17)]
    return tuple(
        TrainingPoint(
            step=40 * n,
            loss=float(loss * math.exp(0.05 * generator.normal())),
            mass=float((0.38 + 0.15 * index) * (1 - math.exp(-0.3 * n)) + 0.1 + 0.01 * generator.normal()),
            performance=1 - loss / 2,
        )
        for n, loss in enumerate(losses)
    )


def _change(arm: RationaleArm, baseline: RationaleArm, metric: RationaleMetric) -> MetricChange:
    ours, theirs = arm.readings[metric.name].by_seed, baseline.readings[metric.name].by_seed
    apart = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean = statistics.fmean(apart)
    if len(apart) == 1:
        return MetricChange(arm=arm.name, metric=metric.name, mean=mean, low=None, high=None, p=None, p_holm=None)
    half = 2.8 * statistics.stdev(apart) / math.sqrt(len(apart))
    p = min(1.0, math.exp(-3 * abs(mean) / half))
    return MetricChange(
        arm=arm.name, metric=metric.name, mean=mean, low=mean - half, high=mean + half, p=p, p_holm=min(1.0, 3 * p)
    )


def _example(number: int, arms: Sequence[str], words: Sequence[str]) -> AttentionExample:
    generator = np.random.default_rng(number)
    rationale = min(1 + number, len(words) - 1)
    attention = {}
    for index, name in enumerate(("before training", *arms)):
        scores = 0.3 * generator.normal(size=len(words))
        scores[rationale] += 1.4 * index
        shares = np.exp(scores) / np.exp(scores).sum()
        attention[name] = tuple(map(float, shares))
    predicted = {name: f"singular (0.{70 + 5 * index})" for index, name in enumerate(arms)}
    return AttentionExample(
        words=tuple(words), rationale=(rationale,), answer="singular", attention=attention, predicted=predicted
    )
