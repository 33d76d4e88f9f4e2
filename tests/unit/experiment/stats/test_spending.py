"""The levels of rounds: against a simulated random walk, and by their bounds."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from qkflow.experiment.stats.spending import round_levels


@pytest.mark.parametrize(
    ("seeds", "spent"),
    [((5,), (0.05,)), ((2, 4, 8, 16), (0.0125,) * 4), ((3, 4, 5, 6, 20), (0.001, 0.002, 0.004, 0.008, 0.035))],
)
def test_each_round_errs_as_often_as_it_may(seeds: tuple[int, ...], spent: tuple[float, ...]) -> None:
    levels = round_levels(seeds, spent)
    steps = np.random.default_rng(0).standard_normal((200_000, seeds[-1]))
    z = np.cumsum(steps, 1)[:, np.array(seeds) - 1] / np.sqrt(seeds)
    crosses = np.abs(z) > stats.norm.isf(np.array(levels) / 2)
    first = np.where(crosses.any(1), crosses.argmax(1), -1)
    for k, error in enumerate(spent):
        assert (first == k).mean() == pytest.approx(error, abs=4 * np.sqrt(error / 200_000))


def test_levels_exceed_the_error_spent_because_rounds_share_seeds() -> None:
    levels = round_levels((2, 4, 8, 16), (0.0125,) * 4)
    assert levels[0] == pytest.approx(0.0125)
    assert all(level > 0.0125 for level in levels[1:])
    distant = round_levels((2, 2000), (0.025, 0.025))
    assert distant[1] == pytest.approx(0.025, rel=0.03)  # rounds that share almost nothing


def test_tiny_shares_are_handled() -> None:
    levels = round_levels((2, 3, 50), (1e-12, 1e-6, 0.006))
    assert levels[:2] == pytest.approx((1e-12, 1e-6), rel=1e-3)
    assert 0.006 <= levels[2] < 0.0061
