import json
import math
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.experiment.result import ExperimentResult
from qkflow.experiment.stats.curves import Curve
from qkflow.report import figures
from qkflow.report.palette import LIGHT

ARMS = ("standard", "differential", "coupled")


def texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in texts(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in texts(item)]
    return [value] if isinstance(value, str) else []


def inks(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict):
        return [value] if "$" in value else [ink for item in value.values() for ink in inks(item)]
    return [ink for item in value for ink in inks(item)] if isinstance(value, list | tuple) else []


def all_figures(result: ExperimentResult) -> list[dict[str, Any]]:
    return [
        *figures.learning_curves(result).values(),
        figures.forest(result),
        figures.loss_strips(result),
        figures.reach(result),
    ]


def test_every_arm_has_a_line_and_a_band_except_the_baseline_in_differences(synthetic: ModuleType) -> None:
    curves = figures.learning_curves(synthetic.study(ARMS))
    assert list(curves) == ["loss by tokens", "loss by seconds", "difference by tokens", "difference by seconds"]
    lines = [trace for trace in curves["loss by tokens"]["data"] if trace["mode"] == "lines+markers"]
    bands = [trace for trace in curves["loss by tokens"]["data"] if trace.get("fill")]
    assert [trace["meta"]["arm"] for trace in lines] == [trace["meta"]["arm"] for trace in bands] == [0, 1, 2]
    assert {trace["meta"]["arm"] for trace in curves["difference by tokens"]["data"]} == {1, 2}


def test_curves_end_at_the_mean_of_the_runs(synthetic: ModuleType) -> None:
    result = synthetic.study(ARMS)
    for trace, arm in zip(figures.learning_curves(result)["loss by tokens"]["data"][3:], result.arms, strict=True):
        ends = [curve.losses[-1] for curve in arm.curves]
        assert trace["y"][-1] == pytest.approx(sum(ends) / len(ends), abs=1e-5)
        assert trace["x"][-1] == arm.tokens


def test_the_forest_shows_mean_interval_seeds_and_margin(synthetic: ModuleType) -> None:
    result = synthetic.study(ARMS)
    forest = figures.forest(result)
    seeds, mean = forest["data"][:2]
    difference = result.comparisons[0].difference
    assert tuple(seeds["x"]) == difference.by_seed
    assert mean["x"] == [difference.mean]
    assert mean["x"][0] + mean["error_x"]["array"][0] == pytest.approx(difference.high)
    assert mean["x"][0] - mean["error_x"]["arrayminus"][0] == pytest.approx(difference.low)
    band = forest["layout"]["shapes"][0]
    assert (band["x0"], band["x1"]) == (-result.margin, result.margin)
    low, high = forest["layout"]["xaxis"]["range"]
    assert low < min(difference.low, -result.margin)
    assert high > max(difference.high, result.margin)


def test_strips_show_every_run_once(synthetic: ModuleType) -> None:
    result = synthetic.study(ARMS, failed=[("coupled", 1)])
    points = [trace for trace in figures.loss_strips(result)["data"] if len(trace.get("text", [])) > 1]
    assert [tuple(trace["x"]) for trace in points] == [arm.losses for arm in result.arms]


def test_one_seed_has_points_and_no_interval(synthetic: ModuleType) -> None:
    result = synthetic.study(ARMS, seeds=1)
    assert all(not trace["error_x"]["visible"] for trace in figures.forest(result)["data"] if "error_x" in trace)
    assert not [trace for trace in figures.learning_curves(result)["loss by tokens"]["data"] if trace.get("fill")]


def test_a_study_without_runs_has_empty_figures(synthetic: ModuleType) -> None:
    for figure in all_figures(synthetic.study(ARMS, seeds=0)):
        assert figure["data"] == []


@pytest.mark.parametrize("seeds", [0, 1, 3])
def test_figures_are_json_with_colors_of_the_palette(synthetic: ModuleType, seeds: int) -> None:
    for figure in all_figures(synthetic.study([f"arm {n}" for n in range(12)], seeds=seeds)):
        assert json.loads(json.dumps(figure, allow_nan=False)) == figure
        assert all(ink["$"] in LIGHT for ink in inks(figure))


def test_names_are_never_tags(synthetic: ModuleType) -> None:
    for figure in all_figures(synthetic.study(("standard", *synthetic.HOSTILE), seeds=3)):
        for text in texts(figure):
            bare = text.replace("<b>", "").replace("</b>", "").replace("<extra></extra>", "")
            assert "<" not in bare, text
            assert text.isprintable()


def curve(seed: int, losses: list[float], pace: float = 1.0) -> Curve:
    tokens = tuple(100 * (n + 1) for n in range(len(losses)))
    return Curve(seed=seed, tokens=tokens, seconds=tuple(pace * t for t in tokens), losses=tuple(losses))


@given(st.lists(st.lists(st.floats(0.5, 9), min_size=4, max_size=4), min_size=1, max_size=5))
@settings(deadline=None, max_examples=25)
def test_the_band_contains_every_run_and_their_mean(runs: list[list[float]]) -> None:
    mean = figures.mean_curve([curve(seed, losses) for seed, losses in enumerate(runs)], "tokens")
    assert mean.runs == [len(runs)] * 4
    for point in range(4):
        values = [losses[point] for losses in runs]
        assert mean.low[point] == pytest.approx(min(values), rel=1e-6)
        assert mean.high[point] == pytest.approx(max(values), rel=1e-6)
        assert mean.mean[point] == pytest.approx(sum(values) / len(values), rel=1e-6)


def test_short_runs_and_non_finite_losses_do_not_affect_the_others() -> None:
    mean = figures.mean_curve([curve(0, [4.0, 3.0, 2.0]), curve(1, [5.0, math.nan])], "tokens")
    assert mean.runs == [2, 1, 1]
    assert mean.mean == [4.5, 3.0, 2.0]


def test_the_mean_of_no_curves_is_empty() -> None:
    assert (
        figures.mean_curve([], "tokens")
        == figures.MeanCurve()
        == figures.difference_curve([curve(0, [1.0])], [], "tokens")
    )
    assert figures.MeanCurve().ends_after(0.1) == []


def test_differences_are_paired_by_seed() -> None:
    baseline = [curve(0, [4.0, 3.0]), curve(1, [6.0, 5.0])]
    arm = [curve(1, [6.5, 5.5]), curve(0, [4.5, 3.5]), curve(9, [0.0, 0.0])]
    mean = figures.difference_curve(arm, baseline, "tokens")
    assert (mean.mean, mean.low, mean.high, mean.runs) == ([0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [2, 2])


def test_by_seconds_the_baseline_is_interpolated_but_not_extrapolated() -> None:
    mean = figures.difference_curve([curve(0, [4.0, 3.0, 2.0], pace=1.5)], [curve(0, [5.0, 3.0, 1.0])], "seconds")
    assert mean.x == [150.0, 300.0]  # 450 s lies beyond the baseline's 300
    assert mean.mean == [pytest.approx(0.0), pytest.approx(2.0)]


def test_long_curves_are_thinned_and_keep_both_ends() -> None:
    mean = figures.mean_curve([curve(0, [float(n) for n in range(1000)])], "tokens")
    assert len(mean.x) == figures.MAX_POINTS
    assert (mean.mean[0], mean.mean[-1]) == (0.0, 999.0)


def test_early_points_can_be_left_out_of_the_frame() -> None:
    mean = figures.mean_curve([curve(0, [9.0, *[2.0] * 19])], "tokens")
    assert max(mean.ends_after(0.1)) == 2.0


@pytest.mark.parametrize("values", [[], [1.0], [2.0, 2.0], [math.nan, 1.0]])
def test_a_range_needs_two_different_values(values: list[float]) -> None:
    assert figures.padded_range(values, 0.1) is None
