"""Differences between two arms: with an interval, p values, the smallest effect in sight, and the spread over seeds.

The mathematics of the interval is in `paired`, that of the smallest effect in `power`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Real

from qkflow.experiment.stats.paired import paired
from qkflow.experiment.stats.power import RELATIVE_SPREAD, announced_smallest, smallest_effect
from qkflow.experiment.stats.t_dist import half_width, tail


@dataclass(frozen=True, kw_only=True)
class Difference:
    """An arm minus the baseline, in held-out bits per byte or per answer token: below zero, the arm is better."""

    seeds: int
    """Pairs of runs, one of each arm with the same seed."""
    documents: int
    """Held-out documents that every run scored."""
    by_seed: tuple[float, ...]
    """The difference of each pair, over all documents."""
    mean: float
    """Their mean."""
    spread: float | None
    """Their standard deviation; None with one seed."""
    error: float | None
    """The standard error of the mean, for new seeds and new documents; None with one seed."""
    freedom: float | None
    """Degrees of freedom of that error."""
    level: float
    """Confidence of the interval, 0.95 say."""
    low: float | None
    """Lower end of the interval; None with one seed."""
    high: float | None
    """Upper end."""
    p: float | None
    """Probability of a difference as large in either direction if there were none; None with one seed."""
    p_signs: float | None
    """The same by flipping signs, without a normal distribution; None where so few seeds cannot go below the level."""
    smallest: float | None
    """The smallest true difference that such a study finds four times in five; None with one seed."""
    smallest_rests_on: str
    """Whose spread `smallest` rests on: `its own spread` or `calibration`."""


@dataclass(frozen=True, kw_only=True)
class SpreadRatio:
    """How much an arm's runs differ from seed to seed, beside the baseline's."""

    arm: float
    """Standard deviation over seeds of the arm's held-out loss."""
    baseline: float
    """The baseline's."""
    ratio: float
    """Arm over baseline."""
    low: float | None
    """Lower end of the ratio's interval; None where there are too few seeds."""
    high: float | None
    """Upper end."""
    p: float | None
    """Probability of a ratio as far from one if both spread alike."""


def difference(
    arm: Float[np.ndarray, "seeds documents"],
    baseline: Float[np.ndarray, "seeds documents"],
    sizes: Real[np.ndarray, " documents"],
    *,
    level: float = 0.95,
    comparisons: int = 1,
    prior_spread: float | None = None,
    calibrated: bool = True,
) -> Difference:
    """Compare two arms: nats of each held-out document (a row a seed, the same seed in both), and its bytes.

    `comparisons` is how many arms the study holds against the baseline: `smallest` allows for Holm's correction.
    `prior_spread` stands in for the spread of two seeds; left out, it is calibration's part of the baseline's loss,
    unless calibration says nothing of such losses: then their own spread has to serve.

    >>> nats = np.array([[70.0, 140.0], [71.0, 142.0], [69.0, 139.0]])
    >>> found = difference(nats - [[2.0, 4.0], [2.5, 5.0], [2.0, 4.5]], nats, np.array([50, 100]))
    >>> round(found.mean, 4), round(found.low, 4), round(found.high, 4), round(found.p, 4)
    (-0.0641, -0.0824, -0.0459, 0.0043)
    """
    _check(arm, baseline, sizes, level)
    seeds, documents = arm.shape
    alpha = (1 - level) / comparisons
    if seeds == 1:
        alone = float((arm.astype(np.float64) - baseline).sum() / math.log(2) / sizes.sum())
        return Difference(
            seeds=1, documents=documents, by_seed=(alone,), mean=alone, spread=None, error=None, freedom=None,
            level=level, low=None, high=None, p=None, p_signs=None, smallest=None, smallest_rests_on="calibration",
        )  # fmt: skip
    found = paired(arm, baseline, sizes)
    mean = float(found.mean)
    width = max(float(half_width(level, one)) for one in found.yardsticks)
    own = seeds > 2 or not calibrated
    if not own:
        if prior_spread is None:
            prior_spread = RELATIVE_SPREAD * float(baseline.sum(dtype=np.float64) / seeds / math.log(2) / sizes.sum())
        extra = math.sqrt(max(0.0, float(found.error**2 - found.spread**2 / seeds)))
        smallest = smallest_effect(spread=prior_spread, seeds=seeds, alpha=alpha, documents=extra)
    else:
        smallest = announced_smallest(*found.yardsticks, alpha=alpha)
    return Difference(
        seeds=seeds,
        documents=documents,
        by_seed=tuple(found.by_seed.tolist()),
        mean=mean,
        spread=float(found.spread),
        error=float(found.error),
        freedom=float(found.freedom),
        level=level,
        low=mean - width,
        high=mean + width,
        p=float(found.p()),
        p_signs=sign_flip(found.by_seed) if 2.0 ** (1 - seeds) <= 1 - level else None,
        smallest=smallest,
        smallest_rests_on="its own spread" if own else "calibration",
    )


def beyond(found: Difference, distance: float) -> float:
    """P(the mean is this far above the truth): one-sided, the larger over the two yardsticks; 1/2 at zero."""
    if found.spread is None or found.error is None:
        raise ValueError("one seed has no error: compare at least 2 seeds")
    alone = found.spread / math.sqrt(found.seeds), found.seeds - 1
    return max(float(tail(distance, alone)), float(tail(distance, (found.error, found.freedom))))


def sign_flip(differences: Sequence[float] | Float[np.ndarray, " n"], *, exact: int = 16, draws: int = 2**16) -> float:
    """The part of all sign flips of the differences whose sum is as far from zero: two-sided, exact up to 16 seeds.

    Beyond that, flips are drawn with a fixed seed, and the data's own counts among them.

    >>> sign_flip([1.0, 2.0, 3.0])
    0.25
    """
    values = np.asarray(differences, dtype=np.float64)
    n = len(values)
    if n <= exact:
        signs = 1 - 2 * (np.arange(2 ** max(0, n - 1))[:, None] >> np.arange(n) & 1)  # the last sign stays: symmetry
    else:
        signs = np.random.default_rng(0).choice(np.array([-1, 1]), (draws, n))
    as_far = np.abs(signs @ values) >= np.abs(values.sum()) * (1 - 1e-12)
    return float(as_far.mean()) if n <= exact else float((as_far.sum() + 1) / (draws + 1))


def holm(p_values: Sequence[float | None]) -> tuple[float | None, ...]:
    """P values after Holm's correction over all of them; one that is missing counts as an arm, and stays missing.

    >>> holm([0.01, 0.04, None, 0.03])
    (0.04, 0.09, None, 0.09)
    """
    known = [(p, place) for place, p in enumerate(p_values) if p is not None]
    adjusted: list[float | None] = [None] * len(p_values)
    least = 0.0
    for rank, (p, place) in enumerate(sorted(known)):
        least = max(least, min(1.0, (len(p_values) - rank) * p))
        adjusted[place] = least
    return tuple(adjusted)


def spread(arm: Sequence[float], baseline: Sequence[float], *, level: float = 0.95) -> SpreadRatio | None:
    r"""Compare how much two arms vary from seed to seed: paired variances, by Pitman and Morgan, and more widely.

    Variances are equal if sums and differences of the pairs do not correlate. With r the correlation of the pairs and l
    the logarithm of the ratio of standard deviations over the true ratio, that test is

        sinh(l) / sqrt((1 - r^2) / (n - 2)) ~ t_{n-2}           exact for normal pairs, too narrow for heavy tails
        l / (s_w / 2) ~ t_{n-1}                                 s_w^2 = n / (n - 1)^3 \sum_i w_i^2

    where the second, from the pairs' own pulls w_i = x_i^2 / mean(x^2) - y_i^2 / mean(y^2) (x, y from their means),
    allows for such tails but is too narrow for few seeds: the wider interval and the larger p value of the two are
    given. Two seeds give the ratio alone; None if it is undefined.

    >>> found = spread([1.0, 3.0, 2.0, 6.0, 4.0], [1.0, 2.0, 1.5, 2.5, 2.2])
    >>> round(found.ratio, 2), round(found.low, 2), round(found.high, 2), round(found.p, 3)
    (3.24, 1.86, 5.64, 0.004)
    """
    if len(arm) != len(baseline):
        raise ValueError(f"the arms must have the same seeds, got {len(arm)} losses and {len(baseline)}")
    n = len(arm)
    if n < 2 or np.ptp(baseline) == 0:
        return None
    ours, theirs = float(np.std(arm, ddof=1)), float(np.std(baseline, ddof=1))
    ratio, low, high, p = ours / theirs, None, None, None
    if n > 2 and np.ptp(arm) > 0:
        x, y = (np.square(np.subtract(losses, np.mean(losses))) for losses in (arm, baseline))
        pulls = x / x.mean() - y / y.mean()
        normal = math.sqrt(max(0.0, 1 - float(np.corrcoef(arm, baseline)[0, 1]) ** 2) / (n - 2)), n - 2
        heavy = math.sqrt(n / (n - 1) ** 3 * float(pulls @ pulls)) / 2, n - 1
        log = abs(math.log(ratio))
        p = 2 * max(float(tail(math.sinh(log), normal)), float(tail(log, heavy)))
        width = max(math.asinh(half_width(level, normal)), float(half_width(level, heavy)))
        low, high = ratio * math.exp(-width), ratio * math.exp(width)
    return SpreadRatio(arm=ours, baseline=theirs, ratio=ratio, low=low, high=high, p=p)


def _check(arm: np.ndarray, baseline: np.ndarray, sizes: np.ndarray, level: float) -> None:
    if arm.ndim != 2 or arm.shape != baseline.shape or sizes.shape != arm.shape[1:] or not arm.size:
        raise ValueError(
            f"expected nats [seeds, documents] of both arms and sizes [documents], got {arm.shape}, {baseline.shape} "
            f"and {sizes.shape}: pair the runs by seed and the documents by place"
        )
    if not (np.isfinite(arm).all() and np.isfinite(baseline).all()):
        raise ValueError("a loss is not finite: leave out runs that failed")
    if (sizes < 0).any() or sizes.sum() <= 0:
        raise ValueError("sizes must be the documents' bytes, none negative and not all zero")
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
