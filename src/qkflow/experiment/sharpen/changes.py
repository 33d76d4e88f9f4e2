r"""How far an arm lies from the baseline in a number that each test instance has, paired by seed and by instance.

The equations are those of `qkflow.experiment.stats.paired`, with documents of size one. Only seeds that agree to the
last digit (s = 0) are treated differently: V_int then takes the place of s^2 / n.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from qkflow.experiment.metrics.rationale import MetricChange, MetricName
from qkflow.experiment.stats.differences import holm
from qkflow.experiment.stats.paired import crossed
from qkflow.experiment.stats.t_dist import combined, half_width, tail

_ROUNDING = 1e-12
"""Means that agree to this are the same: sums in another order differ in their last digits."""

Values = Float64[np.ndarray, "seeds instances"]


class Gap(NamedTuple):
    """A paired difference; with one seed it has neither an interval nor a p value."""

    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None


def gap(arm: Values, baseline: Values, *, level: float) -> Gap:
    """An interval for new seeds and new instances, the wider of two as in `paired`.

    >>> right, wrong = np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]]), np.zeros((2, 3))
    >>> found = gap(right, wrong, level=0.95)
    >>> round(found.mean, 3), round(found.low, 2), round(found.high, 2)
    (0.667, -3.0, 4.33)
    """
    d = arm - baseline
    seeds, instances = d.shape
    by_seed = d.mean(1)
    mean = float(by_seed.mean())
    if seeds == 1:
        return Gap(mean)
    found = crossed(d, np.ones(instances))
    yardsticks = found.yardsticks
    if np.ptp(by_seed) < _ROUNDING:
        alone, freedom = float(found.interaction), seeds - 1
        yardsticks = (math.sqrt(alone), freedom), combined(alone, freedom, found.error**2, max(1, instances - 1))
    width = max(float(half_width(level, one)) for one in yardsticks)
    p = 2 * max(float(tail(abs(mean), one)) for one in yardsticks)
    return Gap(mean, mean - width, mean + width, p)


def changes(
    metrics: Sequence[MetricName],
    baseline: Mapping[int, Mapping[str, np.ndarray]],
    others: Mapping[str, Mapping[int, Mapping[str, np.ndarray]]],
    *,
    level: float,
) -> tuple[MetricChange, ...]:
    """Every arm's runs (by seed) against the baseline's, in every metric; Holm's correction over arms, within a metric.

    Seeds that one of the two lacks, and instances without the number in any run of them, are left out.
    """
    found: list[MetricChange] = []
    for metric in metrics:
        gaps: dict[str, Gap] = {}
        for arm, runs in others.items():
            seeds = [seed for seed in baseline if seed in runs]
            if not seeds:
                continue
            ours, theirs = (np.stack([some[seed][metric] for seed in seeds]) for some in (runs, baseline))
            known = np.isfinite(ours).all(0) & np.isfinite(theirs).all(0)
            if known.any():
                gaps[arm] = gap(ours[:, known], theirs[:, known], level=level)
        corrected = holm([one.p for one in gaps.values()])
        for (arm, one), p_holm in zip(gaps.items(), corrected, strict=True):
            found.append(
                MetricChange(arm=arm, metric=metric, mean=one.mean, low=one.low, high=one.high, p=one.p, p_holm=p_holm)
            )
    return tuple(found)
