"""Moderated variances, and when the prior is dropped."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from qkflow.config import from_dict, to_dict
from qkflow.experiment.stats.prior import PRIOR, Prior, baseline_variance, moderated, prior_holds_for_all


def test_a_prior_has_a_positive_spread_and_at_most_three_degrees_of_freedom() -> None:
    assert from_dict(Prior, to_dict(PRIOR)) == PRIOR
    for spread, freedom in ((0.0, 3.0), (float("nan"), 3.0), (float("inf"), 3.0), (0.1, 0.0), (0.1, 3.5)):
        with pytest.raises(ValueError, match="of a prior must be above 0"):
            Prior(spread=spread, freedom=freedom)


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
def test_the_variance_is_a_mean_weighted_by_degrees_of_freedom(seeds: int) -> None:
    variance, freedom, used = moderated(np.array([0.5, 2.0]), seeds, 1.5, 2.5)
    assert variance == pytest.approx((2.5 * 1.5 + (seeds - 1) * np.array([0.5, 2.0])) / (seeds + 1.5))
    assert freedom.tolist() == [seeds + 1.5] * 2
    assert used.all()


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
def test_the_prior_is_dropped_where_the_variance_contradicts_it(seeds: int) -> None:
    limit = stats.chi2.isf(0.05, seeds - 1) / (seeds - 1)
    variance, freedom, used = moderated(np.array([0.99 * limit, 1.01 * limit]), seeds, 1.0, 3.0)
    assert used.tolist() == [True, False]
    assert (variance[1], freedom[1]) == (1.01 * limit, seeds - 1)
    assert not moderated(0.5, seeds, 1.0, 3.0, keep=False)[2]


def test_the_baselines_variance_is_the_covariance_of_the_differences() -> None:
    rng = np.random.default_rng(0)
    baseline = 2 * rng.standard_normal(20_000)
    by_seed = rng.standard_normal((3, 20_000)) - baseline
    variance, freedom = baseline_variance(by_seed)
    assert variance == pytest.approx(4, rel=0.03)
    assert freedom == 19_999
    pairs = [np.cov(by_seed[a], by_seed[b])[0, 1] for a, b in ((0, 1), (0, 2), (1, 2))]
    assert variance == pytest.approx(np.mean(pairs))


def test_missing_seeds_are_left_out_of_the_covariance() -> None:
    by_seed = np.random.default_rng(0).standard_normal((3, 6))
    by_seed[1, 4:] = np.nan
    by_seed[2, 1:] = np.nan
    variance, freedom = baseline_variance(by_seed)
    assert (variance, freedom) == (pytest.approx(np.cov(by_seed[0, :4], by_seed[1, :4])[0, 1]), 3)
    assert baseline_variance(by_seed[:1]) == (0, 0)


def test_a_baseline_that_spreads_drops_the_prior_of_all_arms() -> None:
    assert prior_holds_for_all(np.array(0.5), 4, 1.0)
    assert not prior_holds_for_all(np.array(8.0), 4, 1.0)
    assert prior_holds_for_all(np.array(8.0), 0, 1.0)  # one arm: its own variance is tested
