"""When studies on tasks confirm or contradict a published claim: accuracy, attention on rationales, stable training.

Differences are arm minus baseline, paired by seed, and the tables of `qkflow.recipes.criteria` hold with "better"
meaning higher. If a claim has k readings, each interval has the level 1 - 0.05 / k, so that the claim as a whole errs
in at most 5 % of cases.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from qkflow.experiment.metrics.rationale import MetricName, RationaleArm, RationaleSummary, equal_loss, mass_at
from qkflow.experiment.result import ArmSummary, ExperimentResult
from qkflow.experiment.stats.t_dist import half_width
from qkflow.recipes.criteria import MAIN, ClaimVerdict, Criterion, Outcome, Reading, Results, combine

LEVEL = 0.95
DIVERGED = 1.1
"""A run diverges if it fails, or ends at this multiple of the median loss of its arm, at the lowest rate, or above."""

_Rule = Callable[[float, float], Outcome]
"""The outcome from the ends of an interval."""


def higher(margin: float) -> _Rule:
    """Confirmed above zero; contradicted below zero, or within the margin.

    >>> higher(0.01)(0.02, 0.3), higher(0.01)(-0.005, 0.005), higher(0.01)(-0.1, 0.1)
    ('confirmed', 'contradicted', 'undecided')
    """

    def rule(low: float, high: float) -> Outcome:
        if low > 0:
            return "confirmed"
        return "contradicted" if high < 0 or (-margin < low and high < margin) else "undecided"

    return rule


def not_lower(margin: float) -> _Rule:
    """Confirmed above minus the margin, contradicted below it."""

    def rule(low: float, high: float) -> Outcome:
        return "confirmed" if low > -margin else "contradicted" if high < -margin else "undecided"

    return rule


def equal(margin: float) -> _Rule:
    """Confirmed within the margin, contradicted beyond it."""

    def rule(low: float, high: float) -> Outcome:
        if low > margin or high < -margin:
            return "contradicted"
        return "confirmed" if -margin < low and high < margin else "undecided"

    return rule


def metric(name: MetricName, arm: str, rule: _Rule, *, study: str = MAIN) -> Criterion:
    """A metric of an arm minus that of the baseline, over seeds and test instances."""
    return partial(_judge_metric, name=name, arm=arm, rule=rule, study=study)


def mass_trend(rule: _Rule, *, study: str = MAIN) -> Criterion:
    """The slope of the attention mass at equal loss over log2 r: points per doubling of r."""
    return partial(_judge_trend, rule=rule, study=study)


def mass_between(first: tuple[str, str], second: tuple[str, str], rule: _Rule) -> Criterion:
    """The attention mass at equal loss of the arm of one study minus that of another; both as (study, arm)."""
    return partial(_judge_masses, first=first, second=second, rule=rule)


def accuracy(arm: str, rule: _Rule, *, study: str = MAIN) -> Criterion:
    """The accuracy of an arm on a recall task, over its whole grid, minus that of the baseline."""
    return partial(_judge_accuracy, arm=arm, rule=rule, study=study)


def stability(arm: str, *, studies: Sequence[str]) -> Criterion:
    """No run of the arm diverges at any of the learning rates, each with a study of its own; the lowest rate first."""
    return partial(_judge_stability, arm=arm, studies=tuple(studies))


# ---- rationales


def _judge_metric(results: Results, *, name: MetricName, arm: str, rule: _Rule, study: str) -> ClaimVerdict:
    if (summary := _rationale(results, study)) is None:
        return combine([])
    title = f"{name}, {summary.task}: {arm} - {summary.arms[0].name}"
    change = summary.change(arm, name)
    if change is None or change.low is None or change.high is None:
        return combine([_reading(title, None)])
    seeds = len(next(entry for entry in summary.arms if entry.name == arm).seeds)
    return combine([_reading(title, (change.mean, change.low, change.high), rule, seeds)])


def _judge_trend(results: Results, *, rule: _Rule, study: str) -> ClaimVerdict:
    if (summary := _rationale(results, study)) is None:
        return combine([])
    name = f"mass at equal loss per doubling of r, {summary.task}"
    masses = _masses_at_equal_loss(summary.arms)
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in masses.values()))) if masses else []
    if len(seeds) < 2:
        return combine([_reading(name, None)])
    doublings = np.log2([float(label.removeprefix("r = ")) for label in masses])
    slopes = [float(np.polyfit(doublings, [by_seed[seed] for by_seed in masses.values()], 1)[0]) for seed in seeds]
    return combine([_reading(name, _interval(slopes), rule, len(seeds))])


def _judge_masses(results: Results, *, first: tuple[str, str], second: tuple[str, str], rule: _Rule) -> ClaimVerdict:
    arms: list[RationaleArm] = []
    for study, label in (first, second):
        if (summary := _rationale(results, study)) is None:
            return combine([])
        arms.append(next(arm for arm in summary.arms if arm.name == label))
    name = f"mass at equal loss: {' - '.join(' '.join(pair) for pair in (first, second))}"
    paths = [path for arm in arms for path in arm.paths]
    if (level := equal_loss(paths)) is None:
        return combine([_reading(name, None)])
    ours, theirs = (
        {seed: mass_at(path, level) for seed, path in zip(arm.seeds, arm.paths, strict=True)} for arm in arms
    )
    seeds = sorted(ours.keys() & theirs.keys())
    if len(seeds) < 2:
        return combine([_reading(name, None)])
    return combine([_reading(name, _interval([ours[seed] - theirs[seed] for seed in seeds]), rule, len(seeds))])


def _masses_at_equal_loss(arms: Sequence[RationaleArm]) -> Mapping[str, Mapping[int, float]]:
    """By arm and seed; empty if there is no loss that all runs have reached."""
    level = equal_loss([path for arm in arms for path in arm.paths])
    if level is None:
        return {}
    return {arm.name: _masses_at(level, arm) for arm in arms}


def _masses_at(level: float, arm: RationaleArm) -> dict[int, float]:
    """The mass of each seed's run where it first reaches a loss."""
    return {seed: mass_at(path, level) for seed, path in zip(arm.seeds, arm.paths, strict=True)}


def _rationale(results: Results, study: str) -> RationaleSummary | None:
    return results[study].rationale if study in results else None


# ---- recall


def _judge_accuracy(results: Results, *, arm: str, rule: _Rule, study: str) -> ClaimVerdict:
    result = results.get(study)
    if result is None or result.recall is None:
        return combine([])
    name = f"accuracy, {result.data}: {arm} - {result.baseline}"
    difference = next(entry.overall.difference for entry in result.recall.arms if entry.arm == arm)
    if difference is None or difference.low is None or difference.high is None:
        return combine([_reading(name, None)])
    interval = difference.mean, difference.low, difference.high
    return combine([_reading(name, interval, rule, len(difference.seeds))])


# ---- stability


def _judge_stability(results: Results, *, arm: str, studies: Sequence[str]) -> ClaimVerdict:
    if any(name not in results for name in studies):
        return combine([])
    at_best_rate = _arm(results[studies[0]], arm).losses
    limit = DIVERGED * statistics.median(at_best_rate) if at_best_rate else math.inf
    readings: list[Reading] = []
    for name in studies:
        summary = _arm(results[name], arm)
        diverged = len(summary.failures) + sum(not loss < limit for loss in summary.losses)
        runs = len(summary.losses) + len(summary.failures)
        outcome: Outcome = "contradicted" if diverged else "confirmed" if runs else "undecided"
        readings.append(
            Reading(
                name=f"{arm}, {name}: diverged runs of {runs}",
                outcome=outcome,
                value=float(diverged),
                low=None,
                high=None,
                unit="runs",
                seeds=runs,
            )
        )
    return combine(readings)


def _arm(result: ExperimentResult, name: str) -> ArmSummary:
    return next(arm for arm in result.arms if arm.name == name)


# ---- intervals


def _interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean and the ends of its t interval."""
    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    half = float(half_width(LEVEL, (error, len(values) - 1))) if error else 0.0
    return mean, mean - half, mean + half


def _reading(
    name: str, interval: tuple[float, float, float] | None, rule: _Rule | None = None, seeds: int = 0
) -> Reading:
    """A reading in percentage points, from an interval of a fraction; undecided if there is none."""
    if interval is None or rule is None:
        return Reading(name=name, outcome="undecided", value=None, low=None, high=None, unit="points", seeds=seeds)
    value, low, high = (100 * number for number in interval)
    outcome = rule(interval[1], interval[2])
    return Reading(name=name, outcome=outcome, value=value, low=low, high=high, unit="points", seeds=seeds)
