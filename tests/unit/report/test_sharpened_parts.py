"""Tables, figures, files and the terminal of a study of sharper attention."""

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from qkflow.experiment.metrics.rationale import MetricChange, RationaleSummary, TrainingPoint
from qkflow.report import sharpened_csv, sharpened_figures, sharpened_json, sharpened_rows, sharpened_terminal


@pytest.fixture(scope="module")
def made(synthetic: ModuleType) -> ModuleType:
    return synthetic.beside("synthetic_sharpened")


def printed(found: RationaleSummary, *, colours: bool = False) -> str:
    out = io.StringIO()
    system = "standard" if colours else None
    Console(file=out, width=80, force_terminal=colours, color_system=system).print(sharpened_terminal(found))
    return out.getvalue()


@pytest.mark.parametrize("seeds", [0, 1, 5])
def test_the_terminal_tables_fit_eighty_columns(made: ModuleType, seeds: int) -> None:
    found = made.study(seeds=seeds)
    text = printed(found)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert (found.answer or "There is no answer yet.") in " ".join(text.split())
    assert ("unfinished: 0 of 4 runs" in text) == (seeds == 0)
    assert ("one seed" in text) == (seeds == 1)
    assert "3 instances left out: rationale outside the text" in text


def test_the_terminal_shows_the_rows_of_the_page(made: ModuleType) -> None:
    text = printed(made.study())
    for row in sharpened_rows.changes(made.study()).rows:
        if row[1] in ("accuracy, %", "mass, %", "sufficiency"):
            assert f"{row[2]} ({row[3]})" in text
    for name, *cells in sharpened_rows.readings(made.study()).rows:
        assert any(line.startswith(name) and all(c in line for c in cells[:6]) for line in text.splitlines())


def test_the_terminal_obeys_nobody(synthetic: ModuleType, made: ModuleType) -> None:
    text = printed(replace(made.study(("r = 1", *synthetic.HOSTILE), seeds=2), remarks=synthetic.HOSTILE))
    assert not {"\x1b", "\x00", "\x07", "\u202e"} & set(text)
    assert "[bold red]" in text  # markup is text
    assert "\x1b" in printed(made.study(), colours=True)


@pytest.mark.parametrize(
    ("name", "mean", "p_holm", "expected"),
    [
        ("mass", 0.1, 0.01, "better"),
        ("mass", -0.1, 0.01, "worse"),
        ("sufficiency", -0.1, 0.01, "better"),
        ("sufficiency", 0.1, 0.01, "worse"),
        ("mass", 0.1, 0.06, ""),
        ("mass", 0.1, None, ""),
        ("effective", -2.0, 0.001, ""),
    ],
)
def test_a_change_is_decided_by_its_corrected_p_and_the_metrics_direction(
    made: ModuleType, name: str, mean: float, p_holm: float | None, expected: str
) -> None:
    metric = next(one for one in made.METRICS if one.name == name)
    change = MetricChange(arm="r = 20", metric=metric.name, mean=mean, low=None, high=None, p=0.001, p_holm=p_holm)
    assert sharpened_rows.decided(metric, change, 0.95) == expected


def test_the_path_has_a_thin_line_a_seed_and_a_bold_mean_on_the_log_scale(made: ModuleType) -> None:
    found = made.study(("r = 1", "r = 20"), seeds=3)
    figure = sharpened_figures.path(found)
    thin, bold = figure["data"][:6], figure["data"][6:]
    assert [trace["meta"]["arm"] for trace in (*thin, *bold)] == [0, 0, 0, 1, 1, 1, 0, 1]
    assert all(trace["line"]["width"] < bold[0]["line"]["width"] for trace in thin)
    losses = [path[4].loss for path in found.arms[0].paths]
    assert math.isclose(bold[0]["x"][4], math.prod(losses) ** (1 / 3))
    assert bold[1]["y"][-1] == pytest.approx(100 * sum(path[-1].mass for path in found.arms[1].paths) / 3)
    assert figure["layout"]["xaxis"]["autorange"] == "reversed"
    assert figure["layout"]["shapes"][0]["x0"] == found.equal_loss


def test_points_without_a_place_on_the_axis_are_left_out(made: ModuleType) -> None:
    found = made.study(("r = 1",), seeds=1)
    path = tuple(
        TrainingPoint(step=n, loss=loss, mass=0.5, performance=1.0) for n, loss in enumerate((1.0, 0.0, math.nan, 0.5))
    )
    figure = sharpened_figures.path(replace(found, arms=(replace(found.arms[0], paths=(path,)),)))
    assert [trace["x"] for trace in figure["data"]] == [[1.0, 0.5], [1.0, 0.5]]


@pytest.mark.parametrize(("lowest", "expected"), [(0.9, ("nticks", 5)), (0.05, ("dtick", "D2")), (1e-6, ("dtick", 1))])
def test_ticks_follow_the_span_of_losses(made: ModuleType, lowest: float, expected: tuple[str, str | int]) -> None:
    found = made.study(("r = 1",), seeds=1)
    path = tuple(TrainingPoint(step=n, loss=loss, mass=0.5, performance=1.0) for n, loss in enumerate((1.0, lowest)))
    figure = sharpened_figures.path(replace(found, arms=(replace(found.arms[0], paths=(path,)),)))
    assert expected in figure["layout"]["xaxis"].items()


def test_strips_join_the_runs_of_a_seed(made: ModuleType) -> None:
    found = made.study(("r = 1", "r = 20"), seeds=2)
    figure = sharpened_figures.strips(found, "mass")
    values = [[100 * x for x in arm.readings["mass"].by_seed] for arm in found.arms]
    assert figure["data"][0]["x"] == [values[0][0], values[1][0]]
    assert figure["layout"]["xaxis"]["title"]["text"] == "mass, %"
    assert sharpened_figures.strips(made.study(seeds=0), "mass")["data"] == []


def test_long_training_is_thinned_to_its_end(made: ModuleType) -> None:
    points = [TrainingPoint(step=n, loss=1.0, mass=0.5, performance=1.0) for n in range(1000)]
    kept = sharpened_rows.thinned(points)
    assert len(kept) <= sharpened_rows.MOST_POINTS
    assert kept[-1].step == 999


def test_json_holds_everything_and_nothing_json_has_not(
    synthetic: ModuleType, made: ModuleType, tmp_path: Path
) -> None:
    found = made.study(("r = 1", *synthetic.HOSTILE), seeds=2)
    point = TrainingPoint(step=1, loss=math.inf, mass=math.nan, performance=1.0)
    arms = (replace(found.arms[0], paths=((point,),)), *found.arms[1:])
    path = sharpened_json(replace(found, arms=arms), tmp_path / "results.json")
    plain = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert plain["arms"][0]["paths"] == [[{"loss": None, "mass": None, "performance": 1.0, "step": 1}]]
    assert plain["arms"][1]["readings"]["mass"]["by_seed"] == list(found.arms[1].readings["mass"].by_seed)
    assert plain["arms"][1]["tried"] == {"0.001": 0.21, "0.01": 0.05, "0.1": None}
    assert plain["arms"][2]["name"] == synthetic.HOSTILE[1]
    assert plain["changes"][0]["p_holm"] == found.changes[0].p_holm
    assert plain["examples"][0]["words"] == list(found.examples[0].words)


def test_csv_has_a_row_for_each_run_and_each_change_and_no_formula(
    synthetic: ModuleType, made: ModuleType, tmp_path: Path
) -> None:
    found = made.study(("r = 1", "=1+1", "@x", *synthetic.HOSTILE), seeds=2)
    runs, changes = sharpened_csv(found, tmp_path / "results.csv")
    assert changes.name == "results-changes.csv"
    with runs.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * len(found.arms)
    assert float(rows[3]["mass"]) == found.arms[1].readings["mass"].by_seed[1]
    with changes.open(newline="") as file:
        differences = list(csv.DictReader(file))
    assert [float(row["low"]) for row in differences] == [one.low for one in found.changes]
    for row in (*rows, *differences):
        assert not row["arm"].startswith(("=", "+", "-", "@"))


def test_along_training_a_task_of_writing_is_told_by_its_first_word(made: ModuleType) -> None:
    assert sharpened_rows.paths(made.study()).columns[-1] == "accuracy, %"
    assert sharpened_rows.paths(replace(made.study(), kind="generation")).columns[-1] == "first word right, %"
