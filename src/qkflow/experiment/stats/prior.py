r"""Variances moderated towards a prior: what earlier runs say about the spread over seeds.

Few seeds say little about their own spread. Smyth (2004) combines the variance s^2 of n differences with a prior
variance s_0^2 worth f_0 degrees of freedom:

    s~^2 = (f_0 s_0^2 + (n - 1) s^2) / (f_0 + n - 1),       degrees of freedom  f_0 + n - 1

The prior comes from calibration runs on other data, so it can be wrong. It is dropped (f_0 = 0)

- for an arm whose own variance contradicts it: s^2 / s_0^2 above the upper 5 % point of chi^2_{n-1} / (n - 1);
- for all arms if the baseline's variance contradicts it. The differences of all arms share the baseline's runs, so
  their covariance is the baseline's variance. It is s_0^2 / 2 if all arms spread equally, so twice the mean covariance
  is held against the same limit.

The limits treat s_0 as exact. Limits from F(n - 1, f_0), which allow for its uncertainty, keep the prior too often: in
simulations of three arms with three seeds at a nominal 5 %, 8 % err if one arm spreads 4 times as much and 12 % if the
baseline does, against 6 % and 6 % with these limits.

G. K. Smyth, Linear models and empirical Bayes methods for assessing differential expression in microarray experiments,
Statistical Applications in Genetics and Molecular Biology 3 (2004), article 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from qkflow.errors import UsageError

MAX_FREEDOM = 3.0
"""The most degrees of freedom of a prior. A stronger one errs too often where it is wrong."""

_CONTRADICTION = 0.05


@dataclass(frozen=True, kw_only=True)
class Prior:
    """The spread over seeds that calibration runs had.

    >>> Prior(spread=0.008, freedom=4.0)
    Traceback (most recent call last):
    qkflow.errors.UsageError: the freedom of a prior must be above 0 and at most 3, got 4.0
    """

    spread: float
    """Standard deviation of a paired difference of two runs, as a fraction of the baseline's loss."""
    freedom: float = MAX_FREEDOM
    """Degrees of freedom that the prior is worth."""

    def __post_init__(self) -> None:
        if not 0 < self.spread < np.inf:
            raise UsageError(f"the spread of a prior must be above 0, got {self.spread}")
        if not 0 < self.freedom <= MAX_FREEDOM:
            raise UsageError(f"the freedom of a prior must be above 0 and at most 3, got {self.freedom}")


PRIOR = Prior(spread=0.0080)
"""The prior for language models, measured by `benchmarks/calibration.py` on standard against standard: 100k parameters
with the default training regime on python-stdlib (800k tokens per run), enwik8 and MEDLINE abstracts (500k), 12 data
seeds with 4 initializations each. The spread of a record is sqrt(2 x mean variance over initializations) / mean loss;
this is the root mean square over the three."""


def moderated(
    variance: Any, seeds: Any, prior_variance: Any, prior_freedom: float, *, keep: Any = True
) -> tuple[Any, Any, Any]:
    """The moderated variance, its degrees of freedom, and whether the prior was used; elementwise.

    `keep` is False where the prior was dropped for another reason.

    >>> variance, freedom, used = moderated(np.array([1.0, 9.0]), 3, 2.0, 3.0)
    >>> variance.tolist(), freedom.tolist(), used.tolist()
    ([1.6, 9.0], [5.0, 2.0], [True, False])
    """
    own_freedom = np.subtract(seeds, 1)
    used = (variance <= prior_variance * _limit(own_freedom)) & keep
    added = np.where(used, prior_freedom, 0.0)
    freedom = own_freedom + added
    return np.where(used, (added * prior_variance + own_freedom * variance) / freedom, variance), freedom, used


def baseline_variance(by_seed: Float[np.ndarray, "*studies arms seeds"]) -> tuple[Any, int]:
    """The baseline's variance from the covariances of the arms' differences, and its degrees of freedom (0: unknown).

    Missing seeds are NaN. Two arms give the covariance over the seeds that both have; the mean over all pairs of arms
    is weighted by their degrees of freedom.

    >>> variance, freedom = baseline_variance(np.array([[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]]))
    >>> float(variance), freedom
    (1.0, 2)
    """
    arms = by_seed.shape[-2]
    has_seed = np.isfinite(by_seed).reshape(-1, *by_seed.shape[-2:])[0] if by_seed.size else np.empty((0, 0), bool)
    total, weight, freedom = np.zeros(by_seed.shape[:-2]), 0, 0
    for a in range(arms):
        for b in range(a + 1, arms):
            shared = has_seed[a] & has_seed[b]
            count = int(shared.sum()) - 1
            if count > 0:
                x, y = (by_seed[..., arm, :][..., shared] for arm in (a, b))
                total += ((x - x.mean(-1, keepdims=True)) * (y - y.mean(-1, keepdims=True))).sum(-1)
                weight, freedom = weight + count, max(freedom, count)
    return (total / weight, freedom) if weight else (total, 0)


def prior_holds_for_all(variance: Any, freedom: int, prior_variance: Any) -> Any:
    """Whether the baseline's variance (`baseline_variance`) is consistent with the prior."""
    return (
        np.less_equal(2 * variance, prior_variance * _limit(freedom)) if freedom else np.full(np.shape(variance), True)
    )


def _limit(freedom: Any) -> Any:
    """The largest plausible ratio of a variance to the prior's."""
    from scipy.special import chdtri

    return chdtri(freedom, _CONTRADICTION) / freedom
