import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.experiment.stats.curves import Curve
from qkflow.report.series import MOST, Band, by_evaluation, differences, usual


def curve(seed: int, losses: list[float], pace: float = 1.0) -> Curve:
    tokens = tuple(100 * (n + 1) for n in range(len(losses)))
    return Curve(seed=seed, tokens=tokens, seconds=tuple(pace * t for t in tokens), bits_per_byte=tuple(losses))


@given(st.lists(st.lists(st.floats(0.5, 9), min_size=4, max_size=4), min_size=1, max_size=5))
@settings(deadline=None, max_examples=25)
def test_the_band_holds_every_run_and_its_mean(runs: list[list[float]]) -> None:
    band = by_evaluation([curve(seed, losses) for seed, losses in enumerate(runs)], "tokens")
    assert band.runs == [len(runs)] * 4
    for point in range(4):
        values = [losses[point] for losses in runs]
        assert band.low[point] == pytest.approx(min(values), rel=1e-6)
        assert band.high[point] == pytest.approx(max(values), rel=1e-6)
        assert band.mean[point] == pytest.approx(sum(values) / len(values), rel=1e-6)


def test_a_run_that_stopped_early_and_a_loss_that_is_not_finite_leave_the_others() -> None:
    band = by_evaluation([curve(0, [4.0, 3.0, 2.0]), curve(1, [5.0, math.nan])], "tokens")
    assert band.runs == [2, 1, 1]
    assert band.mean == [4.5, 3.0, 2.0]


def test_no_curve_is_an_empty_band() -> None:
    assert by_evaluation([], "tokens") == Band.empty() == differences([curve(0, [1.0])], [], "tokens")
    assert Band.empty().after(0.1) == []


def test_differences_are_paired_by_seed() -> None:
    baseline = [curve(0, [4.0, 3.0]), curve(1, [6.0, 5.0])]
    arm = [curve(1, [6.5, 5.5]), curve(0, [4.5, 3.5]), curve(9, [0.0, 0.0])]
    band = differences(arm, baseline, "tokens")
    assert (band.mean, band.low, band.high, band.runs) == ([0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [2, 2])


def test_by_seconds_the_baseline_is_read_where_the_arm_stands_and_never_beyond_its_end() -> None:
    band = differences([curve(0, [4.0, 3.0, 2.0], pace=1.5)], [curve(0, [5.0, 3.0, 1.0])], "seconds")
    assert band.x == [150.0, 300.0]  # 450 s lies beyond the baseline's 300
    assert band.mean == [pytest.approx(0.0), pytest.approx(2.0)]


def test_long_curves_are_thinned_and_keep_both_ends() -> None:
    band = by_evaluation([curve(0, [float(n) for n in range(1000)])], "tokens")
    assert len(band.x) == MOST
    assert (band.mean[0], band.mean[-1]) == (0.0, 999.0)


def test_what_comes_early_can_stay_out_of_the_frame() -> None:
    band = by_evaluation([curve(0, [9.0, *[2.0] * 19])], "tokens")
    assert max(band.after(0.1)) == 2.0


@pytest.mark.parametrize("values", [[], [1.0], [2.0, 2.0], [math.nan, 1.0]])
def test_there_is_no_range_without_two_values(values: list[float]) -> None:
    assert usual(values, 0.1) is None
