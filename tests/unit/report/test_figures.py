import json
import math
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from qkflow.experiment.summary import ExperimentResult
from qkflow.probes.diagnostics import Diagnostic
from qkflow.report import figures
from qkflow.report.exhibits import exhibit_groups
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
        return [value] if "$" in value else [found for item in value.values() for found in inks(item)]
    return [found for item in value for found in inks(item)] if isinstance(value, list | tuple) else []


def drawings(summary: ExperimentResult) -> list[dict[str, Any]]:
    curves = figures.curves(summary).values()
    return [*curves, figures.forest(summary), figures.strips(summary), figures.reach(summary)]


def test_every_arm_has_a_line_and_a_band_and_the_difference_leaves_out_the_baseline(synthetic: ModuleType) -> None:
    curves = figures.curves(synthetic.study(ARMS))
    assert set(curves) == {"tokens-loss", "tokens-difference", "seconds-loss", "seconds-difference"}
    lines = [trace for trace in curves["tokens-loss"]["data"] if trace["mode"] == "lines+markers"]
    bands = [trace for trace in curves["tokens-loss"]["data"] if trace.get("fill")]
    assert [trace["meta"]["arm"] for trace in lines] == [trace["meta"]["arm"] for trace in bands] == [0, 1, 2]
    assert {trace["meta"]["arm"] for trace in curves["tokens-difference"]["data"]} == {1, 2}


def test_curves_end_at_the_means_of_the_runs(synthetic: ModuleType) -> None:
    summary = synthetic.study(ARMS)
    for trace, arm in zip(figures.curves(summary)["tokens-loss"]["data"][3:], summary.arms, strict=True):
        ends = [curve.bits_per_byte[-1] for curve in arm.curves]
        assert trace["y"][-1] == pytest.approx(sum(ends) / len(ends), abs=1e-5)
        assert trace["x"][-1] == arm.tokens


def test_the_forest_shows_mean_interval_seeds_and_margin(synthetic: ModuleType) -> None:
    summary = synthetic.study(ARMS)
    forest = figures.forest(summary)
    seeds, mean = forest["data"][:2]
    found = summary.comparisons[0].difference
    assert tuple(seeds["x"]) == found.by_seed
    assert mean["x"] == [found.mean]
    assert mean["x"][0] + mean["error_x"]["array"][0] == pytest.approx(found.high)
    assert mean["x"][0] - mean["error_x"]["arrayminus"][0] == pytest.approx(found.low)
    band = forest["layout"]["shapes"][0]
    assert (band["x0"], band["x1"]) == (-summary.margin, summary.margin)
    low, high = forest["layout"]["xaxis"]["range"]
    assert low < min(found.low, -summary.margin)
    assert high > max(found.high, summary.margin)


def test_strips_show_every_run_once(synthetic: ModuleType) -> None:
    summary = synthetic.study(ARMS, failed=[("coupled", 1)])
    points = [trace for trace in figures.strips(summary)["data"] if len(trace.get("text", [])) > 1]
    assert [tuple(trace["x"]) for trace in points] == [arm.bits_per_byte for arm in summary.arms]


def test_one_seed_has_points_and_no_interval(synthetic: ModuleType) -> None:
    summary = synthetic.study(ARMS, seeds=1)
    assert all(not trace["error_x"]["visible"] for trace in figures.forest(summary)["data"] if "error_x" in trace)
    assert not [trace for trace in figures.curves(summary)["tokens-loss"]["data"] if trace.get("fill")]


def test_a_study_without_a_run_draws_nothing_and_breaks_nothing(synthetic: ModuleType) -> None:
    for figure in drawings(synthetic.study(ARMS, seeds=0)):
        assert figure["data"] == []


@pytest.mark.parametrize("seeds", [0, 1, 3])
def test_figures_are_plain_data_with_colours_of_the_palette(synthetic: ModuleType, seeds: int) -> None:
    for figure in drawings(synthetic.study([f"arm {n}" for n in range(12)], seeds=seeds)):
        assert json.loads(json.dumps(figure, allow_nan=False)) == figure
        assert all(found["$"] in LIGHT for found in inks(figure))


def test_names_of_others_are_never_tags(synthetic: ModuleType) -> None:
    for figure in drawings(synthetic.study(("standard", *synthetic.HOSTILE), seeds=3)):
        for text in texts(figure):
            bare = text.replace("<b>", "").replace("</b>", "").replace("<extra></extra>", "")
            assert "<" not in bare, text
            assert text.isprintable()


def show(
    layer: float, *, x: tuple[str | float, ...] = ("only",), kind: Any = "bars", title: str = "gate"
) -> Diagnostic:
    values = (tuple(layer + n for n in range(len(x))), (0.5,) * len(x))
    return Diagnostic(
        title=title, kind=kind, x=x, series=("now", "then"), values=values, y_label="open", note="A note."
    )


def test_exhibits_of_one_number_lie_side_by_side_over_layers_and_arms() -> None:
    shown = {"a": [(show(1.0),), (show(2.0),)], "b": [(show(5.0),), ()]}
    (group,) = exhibit_groups(shown, ["base", "a", "b"])
    assert group.arms == ("a", "b")
    assert group.layers == ()
    (figure,) = group.figures
    drawn = [(trace["meta"]["arm"], trace["x"], trace["y"]) for trace in figure["data"]]
    assert drawn[0] == (1, ["layer 1", "layer 2"], [1.0, 2.0])
    assert drawn[2] == (2, ["layer 1"], [5.0])
    assert ("a", "2", "now", "only", "2.0000") in group.table.rows


@pytest.mark.parametrize("kind", ["lines", "bars", "heat"])
def test_longer_exhibits_have_a_figure_for_each_layer(kind: str) -> None:
    shown = {"a": [(), (show(1.0, x=(0.0, 1.0), kind=kind),), (show(2.0, x=(0.0, 1.0), kind=kind),)]}
    (group,) = exhibit_groups(shown, ["base", "a"])
    assert group.layers == (2, 3)
    values = [figure["data"][0]["z"][0] if kind == "heat" else figure["data"][0]["y"] for figure in group.figures]
    assert values == [[1.0, 2.0], [2.0, 3.0]]


def test_exhibits_of_others_are_text_and_may_hold_anything(synthetic: ModuleType) -> None:
    hostile = replace(show(math.nan, x=("<b>", "</script>")), title=synthetic.HOSTILE[0], y_label=synthetic.HOSTILE[2])
    (group,) = exhibit_groups({"a": [(hostile,)]}, ["a"])
    assert group.figures[0]["data"][0]["y"] == [None, None]
    assert all("<" not in text.replace("<extra></extra>", "") for text in texts(group.figures))
