"""Student's t and power: against scipy's noncentral t and simulated studies."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from qkflow.experiment.stats.paired import crossed
from qkflow.experiment.stats.t_dist import (
    combined,
    half_width,
    observed_power,
    observed_smallest,
    power,
    quantile,
    seeds_needed,
    smallest_effect,
    tail,
)


@pytest.mark.parametrize("seeds", [2, 3, 5, 10, 40])
@pytest.mark.parametrize("effect", [0.0, 0.3, 1.0, 3.0, 12.0])
@pytest.mark.parametrize("alpha", [0.05, 0.008])
def test_with_a_known_spread_the_power_is_that_of_the_noncentral_t(seeds: int, effect: float, alpha: float) -> None:
    critical = stats.t.isf(alpha / 2, seeds - 1)
    want = stats.nct.sf(critical, seeds - 1, effect * math.sqrt(seeds))
    assert power(2 * effect, spread=2.0, seeds=seeds, alpha=alpha) == pytest.approx(want, abs=2e-4)


@pytest.mark.parametrize(("seeds", "by_document"), [(2, 2.0), (3, 2.0), (5, 1.0), (10, 4.0)])
def test_power_with_document_variance_matches_simulated_studies(seeds: int, by_document: float) -> None:
    rng = np.random.default_rng(0)
    bits = rng.standard_normal((4000, seeds, 1)) + by_document * rng.standard_normal((4000, 1, 100))
    effect = smallest_effect(spread=1.0, seeds=seeds, alpha=0.05, documents=by_document / 10)
    measured = crossed(bits + effect, np.ones(100))
    assert ((measured.p() < 0.05) & (measured.mean > 0)).mean() == pytest.approx(0.8, abs=0.03)


@given(
    seeds=st.integers(2, 20),
    spread=st.floats(1e-4, 10),
    part=st.sampled_from([0.0, 0.3, 2.0]),
    alpha=st.sampled_from([0.05, 0.04, 0.008, 0.001]),
)
@settings(deadline=None, max_examples=25)
def test_the_smallest_effect_has_power_0_8(seeds: int, spread: float, part: float, alpha: float) -> None:
    known = {"spread": spread, "seeds": seeds, "alpha": alpha, "documents": part * spread}
    assert power(smallest_effect(**known), **known) == pytest.approx(0.8, abs=1e-5)


@given(effect=st.floats(0.2, 5), alpha=st.sampled_from([0.05, 0.008]), chance=st.sampled_from([0.8, 0.9]))
@settings(deadline=None, max_examples=25)
def test_seeds_needed_is_the_smallest_sufficient_number(effect: float, alpha: float, chance: float) -> None:
    needed = seeds_needed(effect, spread=1.0, alpha=alpha, chance=chance)
    assert power(effect, spread=1.0, seeds=needed, alpha=alpha) >= chance
    assert needed == 2 or power(effect, spread=1.0, seeds=needed - 1, alpha=alpha) < chance


def test_no_number_of_seeds_removes_document_variance() -> None:
    assert seeds_needed(1.0, spread=1.0, alpha=0.05, documents=0.5) is None
    assert seeds_needed(1.0, spread=1.0, alpha=0.05, documents=0.2) > seeds_needed(1.0, spread=1.0, alpha=0.05)
    assert seeds_needed(50.0, spread=1.0, alpha=0.05) == 2
    assert seeds_needed(0.01, spread=1.0, alpha=0.05, most=100) is None
    assert seeds_needed(0.01, spread=1.0, alpha=0.05, most=10**6) > 10**4


def on_paper(seeds: int, effect: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Means and spreads of 20000 studies whose differences spread by one."""
    values = effect + np.random.default_rng(seeds).standard_normal((20000, seeds))
    return values.mean(1), values.std(1, ddof=1)


@pytest.mark.parametrize("seeds", [3, 5, 10])
@pytest.mark.parametrize("truth", [0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95])
def test_observed_power_is_calibrated_on_average(seeds: int, truth: float) -> None:
    """Equation (2), over studies whose true power is known."""
    effects = np.linspace(0, 8, 100)
    effect = float(np.interp(truth, [power(e, spread=1.0, seeds=seeds, alpha=0.05) for e in effects], effects))
    _, spreads = on_paper(seeds)
    announced = [observed_power(effect, (s / math.sqrt(seeds), seeds - 1), alpha=0.05) for s in spreads[:1000]]
    assert np.mean(announced) == pytest.approx(truth, abs=0.07)


def test_power_from_an_estimated_spread_is_too_optimistic() -> None:
    effect = smallest_effect(spread=1.0, seeds=3, alpha=0.05) / 1.59  # found in half of the studies
    assert power(effect, spread=1.0, seeds=3, alpha=0.05) == pytest.approx(0.5, abs=0.02)
    _, spreads = on_paper(3)
    assert np.mean([power(effect, spread=float(s), seeds=3, alpha=0.05) for s in spreads[:1000]]) > 0.6


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_a_study_detects_its_smallest_effect_with_power_0_8(seeds: int) -> None:
    means, spreads = on_paper(seeds)
    errors = spreads / math.sqrt(seeds)
    smallest = np.array([observed_smallest((error, seeds - 1), alpha=0.04) for error in errors[:4000]])
    measured = (means[:4000] + smallest) / errors[:4000] > quantile(0.98, seeds - 1)
    assert measured.mean() == pytest.approx(0.8, abs=0.02)


def test_the_larger_of_two_standard_errors_counts() -> None:
    sharp, blunt = (0.01, 4), (0.02, 9)
    assert observed_power(0.05, sharp, blunt, alpha=0.05) == observed_power(0.05, blunt, alpha=0.05)
    assert observed_smallest(sharp, blunt, alpha=0.05) == observed_smallest(blunt, alpha=0.05)
    assert observed_power(observed_smallest(blunt, alpha=0.05), blunt, alpha=0.05) == pytest.approx(0.8)


def test_the_t_distribution_equals_scipys() -> None:
    assert float(quantile(0.98, 2.5)) == pytest.approx(stats.t.ppf(0.98, 2.5))
    assert float(tail(3.0, (2.0, 7))) == pytest.approx(stats.t.sf(1.5, 7))
    assert float(half_width(0.9, (2.0, math.inf))) == pytest.approx(2 * stats.norm.ppf(0.95))
    assert [float(tail(x, (0.0, 3))) for x in (-1.0, 0.0, 1.0)] == [1, 0.5, 0]


def test_a_sum_of_two_variances_has_welchs_degrees_of_freedom() -> None:
    one, two = np.array([1.0, 2.0, 4.0, 4.5]), np.array([3.0, 3.5, 9.0, 1.0, 0.0, 2.0])
    error, freedom = combined(one.var(ddof=1) / 4, 3, two.var(ddof=1) / 6, 5)
    want = stats.ttest_ind(one, two, equal_var=False)
    assert freedom == pytest.approx(want.df)
    assert (one.mean() - two.mean()) / error == pytest.approx(want.statistic)
    assert combined(0.0, 3, 0.0, 5) == (0, 3)


def test_invalid_arguments_of_power_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 seeds, got 1"):
        power(1.0, spread=1.0, seeds=1, alpha=0.05)
    with pytest.raises(ValueError, match="a spread or documents above 0"):
        power(1.0, spread=0.0, seeds=3, alpha=0.05)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        power(-1.0, spread=1.0, seeds=3, alpha=0.05)
