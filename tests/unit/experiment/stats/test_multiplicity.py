"""Adjusted p values: Holm's by hand and by closure, step-down max-t against simulation and by its bounds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from qkflow.experiment.stats.multiplicity import holm, holm_adjusted, max_t_adjusted


def test_holm_by_hand() -> None:
    assert holm([0.01]) == (0.01,)
    assert holm([0.01, 0.02, 0.03]) == pytest.approx((0.03, 0.04, 0.04))
    assert holm([0.5, 0.001, 0.6]) == pytest.approx((1.0, 0.003, 1.0))
    assert holm([0.02, None]) == (0.04, None)
    assert holm([]) == ()


@given(ps=st.lists(st.floats(0, 1), min_size=1, max_size=5))
@settings(deadline=None, max_examples=25)
def test_holm_is_the_closure_of_bonferroni(ps: list[float]) -> None:
    """An arm's adjusted p is the largest Bonferroni p over all sets of arms that hold it."""
    sets = [s for size in range(1, len(ps) + 1) for s in itertools.combinations(range(len(ps)), size)]
    want = [max(min(1.0, len(s) * min(ps[i] for i in s)) for s in sets if arm in s) for arm in range(len(ps))]
    assert holm(ps) == pytest.approx(want)


def test_hypotheses_without_a_p_value_count() -> None:
    p = np.array([[0.01, 0.02], [0.3, 0.001]])
    assert holm_adjusted(p, others=1).tolist() == [list(holm([*row, None]))[:2] for row in p]
    f, share = np.full((2, 2), 5.0), np.full((2, 2), 0.5)
    assert (max_t_adjusted(p, f, share, others=1) > max_t_adjusted(p, f, share)).all()


@pytest.mark.parametrize(
    ("freedom", "share"),
    [((2, 2, 2), 0.5), ((5, 2, 9.5), 0.5), ((1, 1, 1, 1), 0.3), ((20,) * 8, 0.5), ((4, 4, 4), 0.0)],
)
def test_max_t_is_the_chance_of_the_smallest_p_value(freedom: tuple[float, ...], share: float) -> None:
    rng, n, f = np.random.default_rng(0), 200_000, np.array(freedom, float)
    z = np.sqrt(share) * rng.standard_normal((n, 1)) + np.sqrt(1 - share) * rng.standard_normal((n, len(f)))
    smallest = (2 * stats.t.sf(np.abs(z) / np.sqrt(rng.chisquare(f, z.shape) / f), f)).min(1)
    for p in (0.002, 0.01, 0.05):
        values = np.full(len(f), 0.9)
        values[0] = p
        adjusted = max_t_adjusted(values, f, np.full(len(f), share))[0]
        rate = (smallest <= p).mean()
        assert adjusted == pytest.approx(rate, abs=4 * np.sqrt(rate / n))


families = st.integers(1, 6).flatmap(
    lambda arms: st.tuples(
        st.lists(st.floats(1e-8, 1), min_size=arms, max_size=arms),
        st.lists(st.floats(1, 40), min_size=arms, max_size=arms),
        st.lists(st.floats(-0.2, 1), min_size=arms, max_size=arms),
    )
)


@given(family=families)
@settings(deadline=None, max_examples=40)
def test_max_t_lies_between_the_p_value_and_holms(family: tuple[list[float], ...]) -> None:
    p, f, share = (np.array(x) for x in family)
    adjusted = max_t_adjusted(p, f, share)
    assert (adjusted >= p).all()
    assert (adjusted <= holm_adjusted(p) + 1e-15).all()
    order = np.argsort(p, kind="stable")
    assert (np.diff(adjusted[order]) >= 0).all()
    if len(p) == 1:
        assert adjusted[0] == p[0]


def test_a_larger_share_of_the_baseline_needs_less_correction() -> None:
    p, f = np.array([0.02, 0.3, 0.4]), np.full(3, 12.0)
    adjusted = [float(max_t_adjusted(p, f, np.full(3, share))[0]) for share in (0.0, 0.2, 0.5, 0.9)]
    assert adjusted[0] == pytest.approx(1 - 0.98**3, rel=1e-6)  # independent arms
    assert adjusted[0] > adjusted[1] > adjusted[2]
    assert adjusted[2] == adjusted[3]  # the share is capped


def test_batches_give_the_same_numbers_as_single_families() -> None:
    rng = np.random.default_rng(3)
    p, f, share = rng.random((7, 4)) ** 3, rng.uniform(1, 30, (7, 4)), rng.uniform(0, 0.5, (7, 4))
    rows = [max_t_adjusted(*row) for row in zip(p, f, share, strict=True)]
    np.testing.assert_allclose(max_t_adjusted(p, f, share), rows, rtol=1e-13)


def test_extreme_p_values_are_handled() -> None:
    p = np.array([0.0, 1e-300, 1.0])
    adjusted = max_t_adjusted(p, np.array([1.0, 1e9, 3.0]), np.full(3, 0.5))
    assert np.isfinite(adjusted).all()
    assert (adjusted[0], adjusted[2]) == (0, 1)
