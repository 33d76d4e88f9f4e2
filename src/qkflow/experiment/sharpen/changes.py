"""Paired differences of all rationale metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from qkflow.experiment.metrics.rationale import MetricChange, MetricName
from qkflow.experiment.stats.paired import MeanDifference, holm, mean_difference


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
        gaps: dict[str, MeanDifference] = {}
        for arm, runs in others.items():
            seeds = [seed for seed in baseline if seed in runs]
            if not seeds:
                continue
            ours, theirs = (np.stack([some[seed][metric] for seed in seeds]) for some in (runs, baseline))
            known = np.isfinite(ours).all(0) & np.isfinite(theirs).all(0)
            if known.any():
                gaps[arm] = mean_difference(ours[:, known], theirs[:, known], level=level)
        corrected = holm([one.p for one in gaps.values()])
        for (arm, one), p_holm in zip(gaps.items(), corrected, strict=True):
            found.append(
                MetricChange(arm=arm, metric=metric, mean=one.mean, low=one.low, high=one.high, p=one.p, p_holm=p_holm)
            )
    return tuple(found)
