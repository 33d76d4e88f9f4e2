"""Accuracy on a task in the terminal, on the page, and in CSV and JSON files."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from qkflow.config import to_dict
from qkflow.experiment.metrics.recall import RecallSummary, recall
from qkflow.experiment.result import ExperimentResult
from qkflow.report import build_report, export_csv, export_json, terminal
from qkflow.report.html import minus_signs, render
from qkflow.report.recall import (
    accuracy_chart,
    accuracy_sentence,
    accuracy_table,
    cell_table,
    chance_sentence,
    difference_table,
    section,
)
from qkflow.report.sections import FigureGrid

ARMS = ("standard", "coupled", "deltanet", "gated-deltanet", "qdelta")
TASKS = ("mqar", "s-niah-2")


def page(result: ExperimentResult) -> str:
    return render(build_report(result))


def printed(result: ExperimentResult) -> str:
    out = io.StringIO()
    Console(file=out, width=80, color_system=None).print(terminal(result))
    return out.getvalue()


def recall_of(result: ExperimentResult) -> RecallSummary:
    assert result.recall is not None
    return result.recall


def heat_maps(summary: RecallSummary) -> dict[str, Any]:
    grids = [block for block in section(summary).blocks if isinstance(block, FigureGrid)]
    return {figure.name: figure.charts[""] for grid in grids for figure in grid.figures}


def equal_answers(synthetic: ModuleType, *, correct: int) -> RecallSummary:
    grid = synthetic.GRIDS["mqar"]
    tallies = synthetic.tallies(dict.fromkeys(range(len(grid.cells)), correct))
    answers = [synthetic.RunAnswers(seed=seed, tallies=tallies) for seed in (0, 1)]
    return recall(grid, {"standard": answers, "qdelta": answers})


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("seeds", [1, 3])
def test_the_terminal_shows_every_arm_along_the_axis_in_80_columns(
    synthetic: ModuleType, name: str, seeds: int
) -> None:
    result = synthetic.task((*ARMS, "differential:window=64,rotary_base=500000"), name=name, seeds=seeds)
    text = printed(result)
    assert max(map(len, text.splitlines())) <= 80
    for row in accuracy_table(recall_of(result)).texts():
        assert all(cell in text for cell in row[1:])
    lines = [line for line in text.splitlines() if line.startswith("standard")]
    assert any("±" in line for line in lines) == (seeds > 1)
    assert "Verdicts use the loss" in " ".join(text.split())
    assert "answer" in text


def test_equal_seeds_do_not_get_an_interval_of_width_zero(synthetic: ModuleType) -> None:
    summary = equal_answers(synthetic, correct=0)
    text = printed(replace(synthetic.task(("standard", "qdelta"), seeds=2), recall=summary))
    assert "0.0 (equal)" in text
    assert "equal: the same in every seed" in " ".join(text.split())
    assert "±0" not in text
    assert difference_table(summary).texts()[0][1] == "0.0 (equal)"


def test_the_caption_mentions_the_training_length_only_where_it_is_drawn(synthetic: ModuleType) -> None:
    result = synthetic.task(ARMS, name="s-niah-2")
    assert "The vertical line marks" in page(result)
    other = page(replace(result, recall=replace(recall_of(result), context=48)))
    assert "The vertical line marks" not in other
    assert "Each point is a mean over depths" in other


def test_a_tiny_chance_is_an_upper_bound(synthetic: ModuleType) -> None:
    summary = replace(recall_of(synthetic.task(("standard", "qdelta"))), chance=16.0**-12)
    assert chance_sentence(summary) == "Guessing is correct in less than 0.0001% of the cases."


def test_a_long_axis_is_printed_as_several_tables(synthetic: ModuleType) -> None:
    grid = synthetic.GRIDS["mqar"]
    cells = tuple(replace(grid.cells[0], pairs=10_000 + n) for n in range(17))
    runs = {
        name: [
            synthetic.RunAnswers(seed=seed, tallies=synthetic.tallies(dict.fromkeys(range(17), 20 + n + seed)))
            for seed in (0, 1)
        ]
        for n, name in enumerate(ARMS)
    }
    text = printed(replace(synthetic.task(ARMS), recall=recall(replace(grid, cells=cells), runs)))
    assert max(map(len, text.splitlines())) <= 80
    assert all(f"{10_000 + n:,}" in text for n in range(17))


def test_a_study_on_text_does_not_mention_recall(synthetic: ModuleType) -> None:
    result = synthetic.study(ARMS)
    text = page(result)
    assert "Recall" not in text
    assert "bits per byte" in text
    assert "answer token" not in text + printed(result)
    assert "accuracy" not in printed(result).lower()


@pytest.mark.parametrize("name", TASKS)
def test_the_page_of_a_task_has_every_accuracy(synthetic: ModuleType, name: str) -> None:
    result = synthetic.task(ARMS, name=name)
    text, summary = page(result), recall_of(result)
    assert "bits per byte" not in text
    assert "bits per answer token" in text
    assert chance_sentence(summary) in text
    assert "Verdicts use the loss" in text
    for table in (accuracy_table(summary), difference_table(summary), cell_table(summary)):
        for row in table.texts():
            assert all(minus_signs(cell) in text for cell in row[1:])
    for arm in ARMS[1:]:
        assert minus_signs(accuracy_sentence(summary, arm)) in text
    assert ("By length and depth" in text) == (name != "mqar")
    drawn = json.loads(text.split('id="data">')[1].split("</script>")[0])["figures"]
    maps = {f"recall-{n}" for n in range(len(ARMS))} if name != "mqar" else set()
    assert {figure for figure in drawn if figure.startswith("recall")} == {"recall", *maps}
    assert all(f'id="plot-{figure}"' in text for figure in ("recall", *maps))


def test_an_unfinished_task_has_a_page(synthetic: ModuleType) -> None:
    result = synthetic.task(ARMS, seeds=1, unfinished=True)
    assert result.recall is None
    assert 'id="recall"' not in page(result)
    assert "answer" in printed(result)
    partial = synthetic.task(ARMS, name="s-niah-2", seeds=3, unfinished=True)
    assert set(heat_maps(recall_of(partial))) == {"recall-0", "recall-1"}
    assert "\N{EN DASH}" in accuracy_table(recall_of(partial)).texts()[-1]
    page(partial)
    printed(partial)


def test_lines_are_the_means_and_bands_the_intervals(synthetic: ModuleType) -> None:
    summary = recall_of(synthetic.task(ARMS))
    traces = accuracy_chart(summary)["data"]
    bands, means = traces[: len(ARMS)], traces[len(ARMS) :]
    for arm, band, mean in zip(summary.arms, bands, means, strict=True):
        accuracies = [item.accuracy for item in arm.along if item.accuracy]
        assert mean["x"] == [4, 8, 16, 32]
        assert mean["y"] == pytest.approx([100 * accuracy.mean for accuracy in accuracies], abs=1e-3)
        assert band["y"][:4] == [100 * (accuracy.high or 0) for accuracy in accuracies]
        assert band["y"][4:][::-1] == [100 * (accuracy.low or 0) for accuracy in accuracies]
    single = accuracy_chart(recall_of(synthetic.task(ARMS, seeds=1)))["data"]
    assert len(single) == len(ARMS)  # one seed has no band


def test_heat_maps_have_every_cell_and_share_a_scale(synthetic: ModuleType) -> None:
    summary = recall_of(synthetic.task(ARMS, name="s-niah-2"))
    for figure, arm in zip(heat_maps(summary).values(), summary.arms, strict=True):
        (trace,) = figure["data"]
        assert (trace["zmin"], trace["zmax"]) == (0, 100)
        for cell, item in zip(summary.cells, arm.cells, strict=True):
            row, column = trace["y"].index(f"{cell.depth:,}"), trace["x"].index(f"{cell.length:,}")
            assert item.accuracy is not None
            assert trace["z"][row][column] == pytest.approx(100 * item.accuracy.mean, abs=1e-3)
            assert trace["text"][row][column] == f"{100 * item.accuracy.mean:.0f}"


def test_csv_has_one_row_per_run_and_cell(synthetic: ModuleType, tmp_path: Path) -> None:
    result = synthetic.task(("standard", "=qdelta"), name="s-niah-2", failed=[("=qdelta", 1)])
    record = json.loads(export_json(result, tmp_path / "results.json").read_text())
    assert record == json.loads(json.dumps(to_dict(result)))
    paths = {path.name: path for path in export_csv(result, tmp_path / "results.csv")}
    with paths["results-recall.csv"].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["arm", "seed", "pairs", "length", "depth", "instances", "questions", "right"]
    assert len(rows) == 5 * 20
    assert {row["arm"] for row in rows} == {"standard", "'=qdelta"}
    first = recall_of(result).arms[0].runs[0].tallies[0]
    assert (rows[0]["pairs"], rows[0]["length"], rows[0]["depth"]) == ("", "256", "0")
    assert int(rows[0]["right"]) == first.right


def test_the_sentence_has_the_direction_and_the_interval(synthetic: ModuleType) -> None:
    grid = replace(synthetic.GRIDS["mqar"], cells=synthetic.GRIDS["mqar"].cells[:1])

    def sentence(*pairs: tuple[int, int]) -> str:
        runs = {
            name: [
                synthetic.RunAnswers(seed=seed, tallies=synthetic.tallies({0: pair[n]}))
                for seed, pair in enumerate(pairs)
            ]
            for n, name in enumerate(("standard", "arm"))
        }
        return accuracy_sentence(recall(grid, runs), "arm")

    assert sentence((40, 45)) == "Accuracy: 90.0%, 10.0 points above standard (one seed, no interval)."
    assert sentence((40, 35), (45, 45)) == (
        "Accuracy: 80.0%, 5.0 points below standard (95% interval -68.5 to +58.5; 2 seeds)."
    )
    assert sentence((50, 50), (50, 50)) == "Accuracy: 100.0%, equal to standard (the same in all 2 seeds)."
    assert accuracy_sentence(recall(grid, {"standard": [], "arm": []}), "arm") == ""
