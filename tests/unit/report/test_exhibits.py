"""Exhibits of many numbers: cells, wheels, and the names of tokens."""

import json
import math
from types import ModuleType
from typing import Any

import pytest

from qkflow.probes import probe_layers
from qkflow.probes.diagnostics import Diagnostic
from qkflow.report import exhibits
from qkflow.report.exhibits import exhibit_groups
from qkflow.report.gallery import gather
from qkflow.report.page import page
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
        return [value["$"]] if "$" in value else [found for item in value.values() for found in inks(item)]
    return [found for item in value for found in inks(item)] if isinstance(value, list | tuple) else []


def test_a_wheel_has_a_circle_for_each_series_with_its_points_and_their_mean() -> None:
    quarter = math.pi / 2
    (group,) = exhibit_groups({"a": [(wheel((0.0, quarter), (0.3, 0.3)),)]}, ["base", "a"])
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
    assert group.table.rows[1] == ("a", "1", "head 1", "0.3000", "1.0000")
    assert json.loads(json.dumps(figure, allow_nan=False)) == figure
    assert set(inks(figure)) <= set(LIGHT)


def test_wheels_of_one_token_and_of_nothing_are_drawn() -> None:
    single, nothing = exhibit_groups({"a": [(wheel((2.0,)),)], "b": [(wheel((math.nan,)),)]}, ["a", "b"])
    assert single.layers == nothing.layers == (1,)  # a point on a wheel is no figure of a whole layer
    assert single.figures[0]["data"][0]["theta"] == [2.0]
    assert nothing.figures[0]["data"][0]["theta"] == []
    assert nothing.table.rows[0][-1] == "0.0000"


def test_tokens_are_named_where_an_exhibit_counts_them() -> None:
    shown = {"a": [(square(4), wheel((0.0,) * 4), wheel((1.0,) * 4, label="step"), wheel((2.0,) * 3))]}
    cells, wheels = exhibit_groups(shown, ["a"], TOKENS)
    assert cells.figures[0]["data"][0]["x"] == cells.figures[0]["data"][0]["y"]
    assert cells.figures[0]["data"][0]["x"] == ["&lt;b&gt; (1)", "a (2)", "a (3)", "␣ (4)"]
    assert wheels.figures[0]["data"][0]["text"][1] == "a (2)"
    assert [figure["data"][0]["text"][1] for figure in wheels.figures[1:]] == ["2.0", "2.0"]
    assert wheels.figures[0]["layout"]["annotations"][0]["text"].startswith("head 0")


def test_cells_of_all_layers_have_one_scale_and_squares_are_square() -> None:
    (group,) = exhibit_groups({"a": [(square(4, 1.0),), (square(4, 3.0),)]}, ["a"])
    scales = [(figure["data"][0]["zmin"], figure["data"][0]["zmax"]) for figure in group.figures]
    assert scales == [(-1.5, 1.5)] * 2
    assert group.figures[0]["layout"]["yaxis"]["scaleanchor"] == "x"


def test_a_table_beside_very_many_cells_holds_the_largest_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exhibits, "MOST_ROWS", 12)
    (group,) = exhibit_groups({"a": [(square(9, -1.0),), (square(9),)]}, ["a"])
    assert group.table.caption == "cells: the largest numbers of each layer"
    assert len(group.table.rows) == 12
    assert group.table.rows[0] == ("a", "1", "2", "1.0", "-0.5000")
    small = exhibit_groups({"a": [(square(2),)]}, ["a"])[0].table
    assert (small.caption, len(small.rows)) == ("cells", 4)


def test_a_page_shows_phases_of_a_model_with_the_names_of_its_tokens(synthetic: ModuleType, tmp_path: Any) -> None:
    arms = ("standard", "kuramoto")
    runs = synthetic.folder(tmp_path, arms, mechanisms=arms, layers=2, excerpts=1, width=16)
    gallery = gather(arms, tmp_path, runs)
    assert gallery.missing == []
    text = page(synthetic.study(arms, seeds=2), gallery)
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert [len(figures) for figures in data["exhibits"]] == [1, 1, 2, 2]
    order, _, cells, wheels = data["exhibits"]
    assert len(order[0]["data"]) == 2  # heads, half as many as the model says
    assert cells[1]["data"][0]["x"][:3] == ["d (1)", "e (2)", "f (3)"]
    seen = probe_layers(
        load_run(runs["kuramoto"]).model, json.loads((tmp_path / "corpus.json").read_text())["excerpts"][0]["tokens"]
    )
    assert tuple(wheels[1]["data"][0]["theta"]) == seen[1].diagnostics[-1].values[0]
    assert len(json.dumps(data["exhibits"])) < 200_000
