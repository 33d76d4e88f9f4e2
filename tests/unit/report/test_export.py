import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from qkflow.config import to_dict
from qkflow.experiment.result import ExperimentResult
from qkflow.report import build_report, export_csv, export_json, terminal
from qkflow.report.html import render
from qkflow.report.study import comparison_table

ARMS = ("standard", "differential", "coupled")


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("seeds", [0, 3])
def test_json_contains_the_whole_result(synthetic: ModuleType, tmp_path: Path, seeds: int) -> None:
    result = synthetic.study(ARMS, seeds=seeds, tuned=True, failed=[("coupled", 0)])
    record = json.loads(export_json(result, tmp_path / "results.json").read_text())
    assert record == json.loads(json.dumps(to_dict(result)))


def test_numbers_that_are_not_finite_are_null(synthetic: ModuleType, tmp_path: Path) -> None:
    result = synthetic.study()
    arm = result.arms[1]
    diverged = replace(arm.curves[0], losses=(*arm.curves[0].losses[:-1], math.inf))
    arms = (result.arms[0], replace(arm, curves=(diverged, *arm.curves[1:])))
    path = export_json(replace(result, arms=arms), tmp_path / "results.json")
    record = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert record["arms"][1]["curves"][0]["losses"][-1] is None


def test_csv_has_one_row_per_run_and_per_arm(synthetic: ModuleType, tmp_path: Path) -> None:
    result = synthetic.study(ARMS, failed=[("coupled", 2)])
    paths = {path.name: read(path) for path in export_csv(result, tmp_path / "results.csv")}
    assert set(paths) == {"results.csv", "results-comparisons.csv", "results-cost.csv"}
    assert len(paths["results.csv"]) == 14
    assert float(paths["results.csv"][0]["bits_per_byte"]) == result.arms[0].losses[0]
    baseline, first, _ = paths["results-comparisons.csv"]
    assert [row["arm"] for row in paths["results-comparisons.csv"]] == list(ARMS)
    assert (baseline["verdict"], first["verdict"]) == ("baseline", "worse")
    item = result.comparisons[0]
    for column, value in (
        ("difference", item.difference.mean),
        ("low", item.difference.low),
        ("p", item.difference.p),
        ("p_adjusted", item.p_adjusted),
        ("std_ratio", item.spread.ratio),
        ("seconds_high", item.reach.seconds_high),
        ("reached", item.reach.reached),
    ):
        assert float(first[column]) == value, column
    assert tuple(map(float, first["by_seed"].split())) == item.difference.by_seed


def test_missing_values_are_empty_cells(synthetic: ModuleType, tmp_path: Path) -> None:
    paths = {path.name: path for path in export_csv(synthetic.study(ARMS, seeds=0), tmp_path / "results.csv")}
    assert read(paths["results-comparisons.csv"])[1]["difference"] == ""


def test_no_cell_is_a_formula(synthetic: ModuleType, tmp_path: Path) -> None:
    names = ("standard", *synthetic.HOSTILE, "+1", "-1", "@x", "\t=1", " =1")
    for path in export_csv(synthetic.study(names, seeds=2), tmp_path / "results.csv"):
        for row in read(path):
            for cell in row.values():
                try:
                    float(cell.split(" ")[0])
                except ValueError:
                    assert not cell.lstrip().startswith(("=", "+", "-", "@")), cell


EIGHT = (
    "standard",
    "differential",
    "coupled",
    "qdelta",
    "kuramoto",
    "a+b",
    "standard:window=64",
    "differential:window=64",
)


def printed(result: ExperimentResult, width: int = 80, *, colors: bool = False) -> str:
    out = io.StringIO()
    system = "standard" if colors else None
    Console(file=out, width=width, force_terminal=colors, color_system=system).print(terminal(result))
    return out.getvalue()


@pytest.mark.parametrize("seeds", [0, 1, 10])
def test_tables_fit_80_columns(synthetic: ModuleType, seeds: int) -> None:
    text = printed(synthetic.study(EIGHT, seeds=seeds, failed=[("qdelta", 0)]))
    assert max(len(line) for line in text.splitlines()) <= 80
    for name in EIGHT:
        assert name[:8] in text


def test_the_terminal_shows_the_rows_of_the_page(synthetic: ModuleType) -> None:
    result = synthetic.study(EIGHT, seeds=5)
    text = printed(result)
    table = comparison_table(result)
    for row in table.select(table.terminal).texts():
        assert any(line.startswith(row[0][:12]) and all(c in line for c in row[1:]) for line in text.splitlines()), row
    for verdict in result.verdicts:
        assert verdict.advice is None or verdict.advice in " ".join(text.split())


def test_the_terminal_needs_at_most_24_lines_for_eight_arms(synthetic: ModuleType) -> None:
    assert len(printed(synthetic.study(EIGHT, seeds=5)).splitlines()) < 25


@pytest.mark.parametrize(
    ("advice", "seeds_needed", "want"),
    [
        ("About 99 seeds would decide, longer runs or a wider margin may be cheaper.", 99, "About 99 seeds"),
        ("The interval of this arm alone is not enough: about 15 seeds would decide.", 15, "About 15 seeds"),
        ("The 105 held-out documents vary too much: use more documents or a wider margin.", None, "vary too much."),
        ("More than 1000 seeds would be needed: use longer runs or a wider margin.", None, "would be needed."),
        ("At least 2 seeds of both arms are needed.", None, "are needed."),
    ],
)
def test_every_arm_has_one_line_of_advice_in_the_terminal(
    synthetic: ModuleType, advice: str, seeds_needed: int | None, want: str
) -> None:
    """Any advice fits one line beside a long name; the page has all of it."""
    result = synthetic.study((*EIGHT[:2], *(f"standard:window={n}" for n in range(100, 106))), seeds=5)
    verdicts = tuple(
        replace(verdict, kind="undecided", advice=advice, seeds_needed=seeds_needed) for verdict in result.verdicts
    )
    result = replace(result, verdicts=verdicts)
    lines = printed(result).splitlines()
    assert len(lines) < 25
    assert max(map(len, lines)) <= 80
    assert sum(want in line for line in lines) == 7
    assert advice in render(build_report(result))


def test_output_to_a_file_is_plain_text(synthetic: ModuleType) -> None:
    assert "\x1b" not in printed(synthetic.study(EIGHT))
    assert "\x1b" in printed(synthetic.study(EIGHT), colors=True)


def test_names_cannot_control_the_terminal(synthetic: ModuleType) -> None:
    text = printed(synthetic.study(("standard", *synthetic.HOSTILE), seeds=2))
    assert not {"\x1b", "\x00", "\x07", "\u202e"} & set(text)
    assert "[bold red]" in text  # markup is not interpreted


def test_failures_remarks_and_progress_are_shown(synthetic: ModuleType) -> None:
    text = printed(synthetic.study(EIGHT[:2], seeds=1, unfinished=True, failed=[("differential", 0)]), 200)
    assert "differential: seed 0: the loss was not finite" in text
    assert "One seed only" in text
    assert "0 of 2 runs are finished, 1 failed" in text
