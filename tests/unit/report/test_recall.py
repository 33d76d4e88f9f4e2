"""Accuracies on a task as a reader meets them: the terminal, the page's figures and tables, the CSV and the JSON."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from qkflow.experiment.metrics.recall import RecallSummary, recall
from qkflow.experiment.summary import ExperimentResult
from qkflow.report import read_json, recall_rows, terminal, write_json, write_recall_csv
from qkflow.report.gallery import Gallery
from qkflow.report.page import page
from qkflow.report.recall_figures import figures, heat, lines
from qkflow.report.shell import typeset

ARMS = ("standard", "coupled", "deltanet", "gated-deltanet", "qdelta")
TASKS = ("mqar", "s-niah-2")


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "window.Plotly = {};")


def printed(summary: ExperimentResult, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(terminal(summary))
    return out.getvalue()


def of(summary: ExperimentResult) -> RecallSummary:
    assert summary.recall is not None
    return summary.recall


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_the_terminal_shows_every_arm_along_the_axis_in_eighty_columns(
    synthetic: ModuleType, name: str, seeds: int
) -> None:
    summary = synthetic.task((*ARMS, "differential:window=64,rotary_base=500000"), name=name, seeds=seeds)
    text = printed(summary)
    assert max(map(len, text.splitlines())) <= 80
    for one in of(summary).arms:
        for reading in (one.overall, *one.along):
            assert recall_rows.with_half(reading) in text
    assert ("±" in text) == (seeds > 1)
    assert "verdicts rest on the loss" in " ".join(text.split())
    assert "bits/answer" in text


def test_seeds_that_are_alike_get_no_interval_of_no_width(synthetic: ModuleType) -> None:
    found = synthetic.task(("standard", "qdelta"), seeds=2)
    grid = synthetic.GRIDS["mqar"]
    tallies = synthetic.tallies(dict.fromkeys(range(len(grid.cells)), 0))
    runs = {
        name: [synthetic.RunAnswers(seed=seed, tallies=tallies) for seed in (0, 1)] for name in ("standard", "qdelta")
    }
    text = printed(replace(found, recall=recall(grid, runs)))
    assert "0.0 =" in text
    assert "; = all seeds alike)" in text
    assert "±" not in text


def test_the_page_speaks_of_the_training_length_only_where_it_is_marked(synthetic: ModuleType) -> None:
    summary = synthetic.task(ARMS, name="s-niah-2")
    assert "The upright line marks" in page(summary, Gallery())
    elsewhere = replace(summary, recall=replace(of(summary), context=48))
    assert "The upright line marks" not in page(elsewhere, Gallery())
    assert "Each point is a mean over depths" in page(elsewhere, Gallery())


def test_a_chance_with_many_zeros_is_told_in_words(synthetic: ModuleType) -> None:
    found = replace(of(synthetic.task(("standard", "qdelta"))), chance=16.0**-12)
    assert recall_rows.chance(found) == "A guess among the possible answers is right less than 0.0001 % of the time."


def test_many_places_are_shown_in_several_tables(synthetic: ModuleType) -> None:
    grid = synthetic.GRIDS["mqar"]
    cells = tuple(replace(grid.cells[0], pairs=10_000 + n) for n in range(17))
    runs = {
        name: [
            synthetic.RunAnswers(seed=seed, tallies=synthetic.tallies(dict.fromkeys(range(17), 20 + n + seed)))
            for seed in (0, 1)
        ]
        for n, name in enumerate(ARMS)
    }
    summary = replace(synthetic.task(ARMS), recall=recall(replace(grid, cells=cells), runs))
    text = printed(summary)
    assert max(map(len, text.splitlines())) <= 80
    assert all(f"{10_000 + n:,}" in text for n in range(17))


def test_a_text_study_says_nothing_of_recall(synthetic: ModuleType) -> None:
    summary = synthetic.study(ARMS)
    text = page(summary, Gallery())
    assert "RecallSummary" not in text
    assert "bits per byte" in text
    assert "answer token" not in text + printed(summary)
    assert "accuracy" not in printed(summary).lower()


@pytest.mark.parametrize("name", TASKS)
def test_the_page_of_a_task_counts_by_answers_and_holds_every_accuracy(synthetic: ModuleType, name: str) -> None:
    summary = synthetic.task(ARMS, name=name)
    text = page(summary, Gallery())
    assert "bits per byte" not in text
    assert "bits per answer token" in text
    assert f"right {100 * of(summary).chance:.2g} % of the time" in text
    assert "verdict rests on the loss" in text
    found = of(summary)
    for table in (recall_rows.accuracies(found), recall_rows.differences(found), recall_rows.every_cell(found)):
        for row in table.rows:
            assert all(typeset(cell) in text for cell in row[1:])
    for arm in ARMS[1:]:
        assert typeset(recall_rows.told(found, arm)).replace("'", "&#39;") in text
    assert ("By length and depth" in text) == (name != "mqar")
    drawn = json.loads(text.split('id="data">')[1].split("</script>")[0])["figures"]
    maps = {f"recall-{n}" for n in range(len(ARMS))} if name != "mqar" else set()
    assert {figure for figure in drawn if figure.startswith("recall")} == {"recall", *maps}
    assert all(f'id="plot-{figure}"' in text for figure in ("recall", *maps))


def test_a_task_of_which_nothing_is_answered_yet_has_a_page_too(synthetic: ModuleType) -> None:
    summary = synthetic.task(ARMS, seeds=1, unfinished=True)
    assert summary.recall is None
    assert 'id="recall"' not in page(summary, Gallery())
    assert "bits/answer" in printed(summary)
    partly = synthetic.task(ARMS, name="s-niah-2", seeds=3, unfinished=True)
    assert {name for name in figures(of(partly)) if name != "recall"} == {"recall-0", "recall-1"}
    assert "\N{EN DASH}" in recall_rows.accuracies(of(partly)).rows[-1]
    page(partly, Gallery())
    printed(partly)


def test_lines_go_through_the_means_and_bands_along_the_ends_of_the_intervals(synthetic: ModuleType) -> None:
    found = of(synthetic.task(ARMS))
    traces = lines(found)["data"]
    bands, means = traces[: len(ARMS)], traces[len(ARMS) :]
    for one, band, mean in zip(found.arms, bands, means, strict=True):
        assert mean["x"] == [4, 8, 16, 32]
        assert mean["y"] == pytest.approx(
            [100 * reading.accuracy.mean for reading in one.along if reading.accuracy], abs=1e-3
        )
        high, low = band["y"][:4], band["y"][4:][::-1]
        assert high == [100 * reading.accuracy.high for reading in one.along if reading.accuracy]
        assert low == [100 * reading.accuracy.low for reading in one.along if reading.accuracy]
    alone = lines(of(synthetic.task(ARMS, seeds=1)))["data"]
    assert len(alone) == len(ARMS)  # one seed has no band


def test_a_heat_map_has_each_cell_at_its_place_on_a_scale_that_all_arms_share(synthetic: ModuleType) -> None:
    found = of(synthetic.task(ARMS, name="s-niah-2"))
    for n, one in enumerate(found.arms):
        (trace,) = heat(found, n)["data"]
        assert (trace["zmin"], trace["zmax"]) == (0, 100)
        for cell, reading in zip(found.cells, one.cells, strict=True):
            row, column = trace["y"].index(f"{cell.depth:,}"), trace["x"].index(f"{cell.length:,}")
            assert reading.accuracy is not None
            assert trace["z"][row][column] == pytest.approx(100 * reading.accuracy.mean, abs=1e-3)
            assert trace["text"][row][column] == f"{100 * reading.accuracy.mean:.0f}"


def test_csv_has_a_row_for_each_run_and_cell_and_json_comes_back(synthetic: ModuleType, tmp_path: Path) -> None:
    summary = synthetic.task(("standard", "=qdelta"), name="s-niah-2", failed=[("=qdelta", 1)])
    assert read_json(write_json(summary, tmp_path / "results.json")) == summary
    with write_recall_csv(of(summary), tmp_path / "recall.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["arm", "seed", "pairs", "length", "depth", "instances", "questions", "right"]
    assert len(rows) == 5 * 20
    assert {row["arm"] for row in rows} == {"standard", "'=qdelta"}
    first = of(summary).arms[0].runs[0].tallies[0]
    assert (rows[0]["pairs"], rows[0]["length"], rows[0]["depth"]) == ("", "256", "0")
    assert int(rows[0]["right"]) == first.right


def test_results_written_before_there_were_tasks_are_read(synthetic: ModuleType, tmp_path: Path) -> None:
    summary = synthetic.study(ARMS)
    path = write_json(summary, tmp_path / "results.json")
    data = json.loads(path.read_text())
    del data["unit"], data["recall"]
    path.write_text(json.dumps(data))
    assert read_json(path) == summary


def test_the_sentence_says_which_way_and_how_sure(synthetic: ModuleType) -> None:
    grid = replace(synthetic.GRIDS["mqar"], cells=synthetic.GRIDS["mqar"].cells[:1])

    def told(*pairs: tuple[int, int]) -> str:
        runs = {
            name: [
                synthetic.RunAnswers(seed=seed, tallies=synthetic.tallies({0: pair[n]}))
                for seed, pair in enumerate(pairs)
            ]
            for n, name in enumerate(("standard", "arm"))
        }
        return recall_rows.told(recall(grid, runs), "arm")

    assert told((40, 45)) == "Accuracy 90.0 %, 10.0 points above standard's (one seed, no interval)."
    assert told((40, 35), (45, 45)) == (
        "Accuracy 80.0 %, 5.0 points below standard's (95 % interval -68.5 to +58.5; 2 seeds)."
    )
    assert told((50, 50), (50, 50)) == "Accuracy 100.0 %, the same as standard's (alike in all 2 seeds)."
    assert recall_rows.told(recall(grid, {"standard": [], "arm": []}), "arm") == ""
