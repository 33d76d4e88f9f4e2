"""When the result of a study confirms or contradicts a published claim.

With d the difference of an arm to the baseline (negative is better), [low, high] its interval and m the margin:

| claim           | confirmed                              | contradicted                            |
|-----------------|----------------------------------------|-----------------------------------------|
| superiority     | better                                 | worse, or equivalent within the margin  |
| equality        | equivalent within the margin           | the interval lies beyond the margin     |
| non-inferiority | high < m                               | low > m                                 |
| variance ratio  | the interval lies above the threshold  | the interval lies below it              |
| interaction     | the interval of d - d' lies below 0    | it lies above 0, or within the margin   |

Everything else is undecided. A study that is judged in rounds spends its error rate over them: the intervals of
equality and non-inferiority have the level of the round after which the arm stopped. A claim about several arms is
confirmed if it holds for all of them, and contradicted if it fails for one; the error rate of 5 % is that of the claim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from qkflow.config import from_dict
from qkflow.experiment.result import ArmSummary, ExperimentResult
from qkflow.experiment.stats.paired import Difference, spread_ratio
from qkflow.experiment.stats.rounds import Rule
from qkflow.experiment.stats.t_dist import combined, half_width
from qkflow.experiment.stats.verdict import Verdict

Outcome = Literal["confirmed", "contradicted", "undecided"]
Results = Mapping[str, ExperimentResult]
"""The results of a claim's studies, by name."""
Criterion = Callable[[Results], "ClaimVerdict"]

MAIN = "main"
"""The study that decides a claim, unless its criterion names others."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One measured quantity of a claim."""

    name: str
    """What is measured, such as `coupled - standard`."""
    outcome: Outcome
    value: float | None
    """None if nothing was measured."""
    low: float | None
    high: float | None
    unit: str
    seeds: int


@dataclass(frozen=True, kw_only=True)
class ClaimVerdict:
    """What the studies of a claim say about it."""

    outcome: Outcome
    readings: tuple[Reading, ...]


def superiority(*arms: str, study: str = MAIN) -> Criterion:
    """Every one of these arms is better than the baseline."""
    return partial(_judge_arms, study=study, arms=arms, rule=_superiority)


def inferiority(*arms: str, study: str = MAIN) -> Criterion:
    """Every one of these arms is worse than the baseline: the baseline is what is claimed to be better."""
    return partial(_judge_arms, study=study, arms=arms, rule=_inferiority)


def equality(*arms: str, study: str = MAIN) -> Criterion:
    """Every one of these arms is equal to the baseline within the study's margin."""
    return partial(_judge_arms, study=study, arms=arms, rule=_equality)


def non_inferiority(arm: str, *, margin: float | None = None, study: str = MAIN) -> Criterion:
    """The arm is worse than the baseline by less than a margin, in bits; None: the margin of the study."""
    return partial(_judge_arms, study=study, arms=(arm,), rule=partial(_non_inferiority, bits=margin))


def variance_ratio(arm: str, against: str, *, above: float, study: str = MAIN) -> Criterion:
    """The variance over seeds of an arm is more than `above` times that of another."""
    return partial(_judge_variances, study=study, arm=arm, against=against, above=above)


def interaction(arm: str, *, helps: str, hurts: str) -> Criterion:
    """The arm's difference to the baseline, relative to its loss, is lower in one study than in another."""
    return partial(_judge_interaction, arm=arm, helps=helps, hurts=hurts)


def all_of(*criteria: Criterion) -> Criterion:
    """All of these hold."""
    return lambda results: combine([reading for criterion in criteria for reading in criterion(results).readings])


def combine(readings: Sequence[Reading]) -> ClaimVerdict:
    """A claim is confirmed by all its readings, and contradicted by one.

    >>> combine([]).outcome
    'undecided'
    """
    outcomes = {reading.outcome for reading in readings}
    outcome: Outcome = "undecided"
    if "contradicted" in outcomes:
        outcome = "contradicted"
    elif outcomes == {"confirmed"}:
        outcome = "confirmed"
    return ClaimVerdict(outcome=outcome, readings=tuple(readings))


# ---- arms against the baseline of one study

_Rule = Callable[[Verdict, Difference, float], Outcome]
"""The outcome for one arm, from its verdict, its difference with the interval of the last round, and the margin."""


def _judge_arms(results: Results, *, study: str, arms: Sequence[str], rule: _Rule) -> ClaimVerdict:
    if (result := results.get(study)) is None:
        return combine([])
    verdicts = {verdict.arm: verdict for verdict in result.verdicts}
    return combine([_read_arm(result, verdicts.get(arm), arm, rule) for arm in arms])


def _read_arm(result: ExperimentResult, verdict: Verdict | None, arm: str, rule: _Rule) -> Reading:
    name = f"{arm} - {result.baseline}"
    if verdict is None or (difference := verdict.difference) is None:
        return Reading(name=name, outcome="undecided", value=None, low=None, high=None, unit=result.bits, seeds=0)
    return Reading(
        name=name,
        outcome=rule(verdict, widened(difference, round_level(result, difference.seeds)), result.margin),
        value=difference.mean,
        low=difference.low,
        high=difference.high,
        unit=result.bits,
        seeds=difference.seeds,
    )


def round_level(result: ExperimentResult, seeds: int) -> float:
    """The confidence level of the round in which an arm had this many seeds."""
    rule = from_dict(Rule, result.design["rule"])
    round_ = next((number for number, most in enumerate(rule.seeds_by_round, 1) if seeds <= most), 1)
    return 1 - rule.alpha(round_)


def widened(difference: Difference, level: float) -> Difference:
    """The same difference with an interval of another level."""
    if difference.low is None or difference.high is None or not difference.error or not difference.freedom:
        return difference
    std_err = difference.error, difference.freedom
    factor = half_width(level, std_err) / half_width(difference.level, std_err)
    half = factor * (difference.high - difference.low) / 2
    return replace(difference, level=level, low=difference.mean - half, high=difference.mean + half)


def _superiority(verdict: Verdict, difference: Difference, margin: float) -> Outcome:
    return {"better": "confirmed", "undecided": "undecided"}.get(verdict.kind, "contradicted")  # pyright: ignore[reportReturnType]


def _inferiority(verdict: Verdict, difference: Difference, margin: float) -> Outcome:
    return {"worse": "confirmed", "undecided": "undecided"}.get(verdict.kind, "contradicted")  # pyright: ignore[reportReturnType]


def _equality(verdict: Verdict, difference: Difference, margin: float) -> Outcome:
    if verdict.kind == "equivalent":
        return "confirmed"
    if difference.low is None or difference.high is None:
        return "undecided"
    if difference.low > margin or difference.high < -margin:
        return "contradicted"
    return "confirmed" if -margin < difference.low and difference.high < margin else "undecided"


def _non_inferiority(verdict: Verdict, difference: Difference, margin: float, *, bits: float | None) -> Outcome:
    margin = margin if bits is None else bits
    if difference.low is None or difference.high is None:
        return "undecided"
    if difference.high < margin:
        return "confirmed"
    return "contradicted" if difference.low > margin else "undecided"


# ---- spread over seeds, and two corpora


def _judge_variances(results: Results, *, study: str, arm: str, against: str, above: float) -> ClaimVerdict:
    if (result := results.get(study)) is None:
        return combine([])
    losses = [_losses(result, name) for name in (arm, against)]
    seeds = sorted(losses[0].keys() & losses[1].keys())
    ratio = spread_ratio(
        [losses[0][seed] for seed in seeds], [losses[1][seed] for seed in seeds], level=1 - result.error_rate
    )
    outcome: Outcome = "undecided"
    low = high = None
    if ratio is not None and ratio.low is not None and ratio.high is not None:
        low, high = ratio.low**2, ratio.high**2
        outcome = "confirmed" if low > above else "contradicted" if high < above else "undecided"
    value = None if ratio is None else ratio.ratio**2
    name = f"variance of {arm} / {against}"
    return combine(
        [Reading(name=name, outcome=outcome, value=value, low=low, high=high, unit="times", seeds=len(seeds))]
    )


def _losses(result: ExperimentResult, name: str) -> dict[int, float]:
    summary: ArmSummary = next(arm for arm in result.arms if arm.name == name)
    return dict(zip(summary.seeds, summary.losses, strict=True))


def _judge_interaction(results: Results, *, arm: str, helps: str, hurts: str) -> ClaimVerdict:
    if helps not in results or hurts not in results:
        return combine([])
    relative = [_relative(results[name], arm) for name in (helps, hurts)]
    name = f"{arm} - {results[helps].baseline}: {results[helps].data} - {results[hurts].data}"
    if None in relative:
        return combine(
            [Reading(name=name, outcome="undecided", value=None, low=None, high=None, unit="of the loss", seeds=0)]
        )
    first, second = (part for part in relative if part is not None)
    value = first.mean - second.mean
    std_err = combined(first.error**2, first.freedom, second.error**2, second.freedom)
    half = float(half_width(1 - results[helps].error_rate, std_err))
    low, high, margin = value - half, value + half, results[helps].design["spec"]["margin"]
    outcome: Outcome = "undecided"
    if high < 0:
        outcome = "confirmed"
    elif low > 0 or (-margin < low and high < margin):
        outcome = "contradicted"
    return combine(
        [
            Reading(
                name=name,
                outcome=outcome,
                value=value,
                low=low,
                high=high,
                unit="of the loss",
                seeds=min(first.seeds, second.seeds),
            )
        ]
    )


@dataclass(frozen=True, kw_only=True)
class _RelativeDifference:
    """A difference as a fraction of the baseline's loss, with an error that covers the wider interval."""

    mean: float
    error: float
    freedom: float
    seeds: int


def _relative(result: ExperimentResult, arm: str) -> _RelativeDifference | None:
    difference = next((verdict.difference for verdict in result.verdicts if verdict.arm == arm), None)
    loss = result.arms[0].mean
    if difference is None or difference.high is None or difference.freedom is None or not loss:
        return None
    unit = float(half_width(difference.level, (1.0, difference.freedom)))
    error = (difference.high - difference.mean) / unit
    if not math.isfinite(error):
        return None
    return _RelativeDifference(
        mean=difference.mean / loss, error=error / loss, freedom=difference.freedom, seeds=difference.seeds
    )
