"""Charts of diagnostics: lines, bars, heat maps and phase wheels."""

import json
import math
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest

from qkflow.probes import probe_layers
from qkflow.probes.diagnostics import Diagnostic
from qkflow.report import build_report, diagnostics
from qkflow.report.attention_maps import load_maps
from qkflow.report.diagnostics import diagnostic_blocks
from qkflow.report.html import render
from qkflow.report.palette import LIGHT
from qkflow.training import load_run

TOKENS = ("<b>", "a", "a", "␣")


def wheel(*rows: tuple[float, ...], label: str = "token") -> Diagnostic:
    x = tuple(float(n) for n in range(1, len(rows[0]) + 1))
    series = tuple(f"head {n}" for n in range(len(rows)))
    return Diagnostic(title="phases", kind="wheel", x=x, series=series, values=rows, x_label=label, y_label="phase")


def square(size: int, scale: float = 1.0) -> Diagnostic:
    names = tuple(f"{n}" for n in range(1, size + 1))
    rows = tuple(tuple(scale / (1 + t + u) if u < t else math.nan for u in range(size)) for t in range(size))
    x = tuple(float(n) for n in range(1, size + 1))
    return Diagnostic(title="cells", kind="heat", x=x, series=names, values=rows, x_label="token", y_label="locking")


def inks(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [value["$"]] if "$" in value else [role for item in value.values() for role in inks(item)]
    return [role for item in value for role in inks(item)] if isinstance(value, list | tuple) else []


def texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in texts(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in texts(item)]
    return [value] if isinstance(value, str) else []


@dataclass(frozen=True)
class Group:
    """The blocks of one diagnostic."""

    title: str
    caption: str
    layers: list[str]
    figures: list[dict[str, Any]]
    table: Any


def groups_of(*args: Any) -> list[Group]:
    blocks: Any = diagnostic_blocks(*args)
    return [
        Group(
            title=blocks[n].text,
            caption=blocks[n + 1].caption,
            layers=[label for label in blocks[n + 1].charts if label],
            figures=list(blocks[n + 1].charts.values()),
            table=blocks[n + 2],
        )
        for n in range(0, len(blocks), 3)
    ]


def test_a_wheel_has_one_circle_per_series_with_its_points_and_their_mean() -> None:
    quarter = math.pi / 2
    (group,) = groups_of({"a": [(wheel((0.0, quarter), (0.3, 0.3)),)]}, ["base", "a"])
    figure = group.figures[0]
    assert figure["layout"]["meta"] == {"wheels": 2}
    assert {"polar", "polar2"} <= set(figure["layout"])
    points, mean, other, _ = figure["data"]
    assert points["theta"] == [0.0, quarter]
    assert points["thetaunit"] == "radians"
    assert points["r"][0] < points["r"][1] <= 1
    assert mean["theta"] == [pytest.approx(math.pi / 4, abs=1e-3)] * 2
    assert mean["r"] == [0, pytest.approx(math.sqrt(0.5), abs=1e-3)]
    assert other["subplot"] == "polar2"
    assert [note["text"] for note in figure["layout"]["annotations"]] == ["head 0<br>R = 0.71", "head 1<br>R = 1.00"]
    assert group.table.texts()[1] == ("a", "1", "head 1", "0.3000", "1.0000")
    assert json.loads(json.dumps(figure, allow_nan=False)) == figure
    assert set(inks(figure)) <= set(LIGHT)


def test_wheels_of_one_token_and_of_no_finite_phase_are_drawn() -> None:
    single, nothing = groups_of({"a": [(wheel((2.0,)),)], "b": [(wheel((math.nan,)),)]}, ["a", "b"])
    assert single.layers == nothing.layers == ["1"]
    assert single.figures[0]["data"][0]["theta"] == [2.0]
    assert nothing.figures[0]["data"][0]["theta"] == []
    assert nothing.table.texts()[0][-1] == "0.0000"


def test_token_labels_replace_positions() -> None:
    shown = {"a": [(square(4), wheel((0.0,) * 4), wheel((1.0,) * 4, label="step"), wheel((2.0,) * 3))]}
    cells, wheels = groups_of(shown, ["a"], TOKENS)
    assert cells.figures[0]["data"][0]["x"] == cells.figures[0]["data"][0]["y"]
    assert cells.figures[0]["data"][0]["x"] == ["&lt;b&gt; (1)", "a (2)", "a (3)", "␣ (4)"]
    assert wheels.figures[0]["data"][0]["text"][1] == "a (2)"
    assert [figure["data"][0]["text"][1] for figure in wheels.figures[1:]] == ["2.0", "2.0"]
    assert wheels.figures[0]["layout"]["annotations"][0]["text"].startswith("head 0")


def test_heat_maps_of_all_layers_share_a_scale_and_square_ones_are_square() -> None:
    (group,) = groups_of({"a": [(square(4, 1.0),), (square(4, 3.0),)]}, ["a"])
    scales = [(figure["data"][0]["zmin"], figure["data"][0]["zmax"]) for figure in group.figures]
    assert scales == [(-1.5, 1.5)] * 2
    assert group.figures[0]["layout"]["yaxis"]["scaleanchor"] == "x"


def test_the_table_of_a_large_heat_map_has_the_largest_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "MAX_ROWS", 12)
    (group,) = groups_of({"a": [(square(9, -1.0),), (square(9),)]}, ["a"])
    assert group.table.caption == "cells: the largest values of each layer"
    assert len(group.table.rows) == 12
    assert group.table.texts()[0] == ("a", "1", "2", "1.0", "-0.5000")
    small = groups_of({"a": [(square(2),)]}, ["a"])[0].table
    assert (small.caption, len(small.rows)) == ("cells", 4)


def test_a_page_shows_the_phases_of_a_model_with_its_tokens(synthetic: ModuleType, tmp_path: Any) -> None:
    arms = ("standard", "kuramoto")
    runs = synthetic.folder(tmp_path, arms, mechanisms=arms, layers=2, excerpts=1, width=16)
    maps = load_maps(arms, tmp_path, runs)
    assert maps.missing == []
    text = render(build_report(synthetic.study(arms, seeds=2), maps))
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    charts = [data["figures"][f"diagnostic-{n}"] for n in range(4)]
    assert [len(variants) for variants in charts] == [1, 1, 2, 2]
    order, _, cells, wheels = charts
    assert len(order[0]["data"]) == 2  # kuramoto has half as many heads
    assert cells[1]["data"][0]["x"][:3] == ["d (1)", "e (2)", "f (3)"]
    seen = probe_layers(
        load_run(runs["kuramoto"]).model, json.loads((tmp_path / "corpus.json").read_text())["excerpts"][0]["tokens"]
    )
    assert tuple(wheels[1]["data"][0]["theta"]) == seen[1].diagnostics[-1].values[0]
    assert len(json.dumps(charts)) < 200_000


def show(
    layer: float, *, x: tuple[str | float, ...] = ("only",), kind: Any = "bars", title: str = "gate"
) -> Diagnostic:
    values = (tuple(layer + n for n in range(len(x))), (0.5,) * len(x))
    return Diagnostic(
        title=title, kind=kind, x=x, series=("now", "then"), values=values, y_label="open", note="A note."
    )


def test_one_number_per_layer_is_drawn_over_layers_and_arms() -> None:
    shown = {"a": [(show(1.0),), (show(2.0),)], "b": [(show(5.0),), ()]}
    (group,) = groups_of(shown, ["base", "a", "b"])
    assert group.caption == "a, b. A note."
    assert group.layers == []
    (figure,) = group.figures
    drawn = [(trace["meta"]["arm"], trace["x"], trace["y"]) for trace in figure["data"]]
    assert drawn[0] == (1, ["layer 1", "layer 2"], [1.0, 2.0])
    assert drawn[2] == (2, ["layer 1"], [5.0])
    assert ("a", "2", "now", "only", "2.0000") in group.table.texts()


@pytest.mark.parametrize("kind", ["lines", "bars", "heat"])
def test_longer_diagnostics_have_one_figure_per_layer(kind: str) -> None:
    shown = {"a": [(), (show(1.0, x=(0.0, 1.0), kind=kind),), (show(2.0, x=(0.0, 1.0), kind=kind),)]}
    (group,) = groups_of(shown, ["base", "a"])
    assert group.layers == ["2", "3"]
    values = [figure["data"][0]["z"][0] if kind == "heat" else figure["data"][0]["y"] for figure in group.figures]
    assert values == [[1.0, 2.0], [2.0, 3.0]]


def test_untrusted_diagnostics_stay_text(synthetic: ModuleType) -> None:
    hostile = replace(show(math.nan, x=("<b>", "</script>")), title=synthetic.HOSTILE[0], y_label=synthetic.HOSTILE[2])
    (group,) = groups_of({"a": [(hostile,)]}, ["a"])
    assert group.figures[0]["data"][0]["y"] == [None, None]
    assert all("<" not in text.replace("<extra></extra>", "") for text in texts(group.figures))
