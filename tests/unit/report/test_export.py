import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from qkflow.errors import UsageError
from qkflow.report import read_json, write_csv, write_json

ARMS = ("standard", "differential", "coupled")


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("seeds", [0, 1, 3])
def test_json_comes_back_as_it_was(synthetic: ModuleType, tmp_path: Path, seeds: int) -> None:
    summary = synthetic.study(ARMS, seeds=seeds, tuned=True, failed=[("coupled", 0)])
    assert read_json(write_json(summary, tmp_path / "results.json")) == summary


def test_a_loss_that_is_not_finite_is_null_and_comes_back_as_none_that_counts(
    synthetic: ModuleType, tmp_path: Path
) -> None:
    summary = synthetic.study()
    arm = summary.arms[1]
    torn = replace(arm.curves[0], bits_per_byte=(*arm.curves[0].bits_per_byte[:-1], math.inf))
    arms = (summary.arms[0], replace(arm, curves=(torn, *arm.curves[1:])))
    path = write_json(replace(summary, arms=arms), tmp_path / "results.json")
    plain = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert plain["arms"][1]["curves"][0]["bits_per_byte"][-1] is None
    assert math.isnan(read_json(path).arms[1].curves[0].bits_per_byte[-1])


@pytest.mark.parametrize("content", ["", "[]", "{}", "nonsense", '{"arms": [{"curves": 3}]}'])
def test_other_files_are_refused_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(UsageError, match=r"results\.json is not the results") as raised:
        read_json(tmp_path / "results.json")
    assert "\n" not in str(raised.value)


def test_csv_has_a_row_for_each_run_and_each_comparison(synthetic: ModuleType, tmp_path: Path) -> None:
    summary = synthetic.study(ARMS, failed=[("coupled", 2)])
    runs, comparisons = write_csv(summary, tmp_path / "results.csv")
    assert comparisons.name == "results-comparisons.csv"
    rows = read(runs)
    assert len(rows) == 14
    assert float(rows[0]["bits_per_byte"]) == summary.arms[0].bits_per_byte[0]
    found = read(comparisons)
    assert [row["arm"] for row in found] == ["differential", "coupled"]
    assert found[0]["verdict"] == "worse"
    first = summary.comparisons[0]
    for column, value in (
        ("mean", first.difference.mean),
        ("low", first.difference.low),
        ("p", first.difference.p),
        ("p_holm", first.p_holm),
        ("spread_ratio", first.spread.ratio),
        ("reach_seconds_high", first.reach.seconds_high),
        ("reached", first.reach.reached),
    ):
        assert float(found[0][column]) == value, column


def test_what_is_missing_is_an_empty_cell(synthetic: ModuleType, tmp_path: Path) -> None:
    _, comparisons = write_csv(synthetic.study(ARMS, seeds=0), tmp_path / "results.csv")
    assert read(comparisons)[0]["mean"] == ""


def test_no_name_is_a_formula(synthetic: ModuleType, tmp_path: Path) -> None:
    names = ("standard", *synthetic.HOSTILE, "+1", "-1", "@x", "\t=1", " =1")
    for path in write_csv(synthetic.study(names, seeds=2), tmp_path / "results.csv"):
        for row in read(path):
            for cell in row.values():
                try:
                    float(cell)
                except ValueError:
                    assert not cell.lstrip().startswith(("=", "+", "-", "@")), cell
