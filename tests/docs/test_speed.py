"""The tables of docs/speed.md and README.md are what benchmarks/tables.py makes of docs/results/data/speed.json."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {name: (ROOT / name).read_text() for name in ("docs/speed.md", "README.md")}
RESULTS = json.loads((ROOT / "docs/results/data/speed.json").read_text())


def load_tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("speed_tables", ROOT / "benchmarks/tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["speed_tables"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


tables = load_tables()


def row(**changes: Any) -> Any:
    fields = {
        "table": "training",
        "work": "`1m`",
        "against": "HF Llama",
        "kind": "speed",
        "ratio": 1.404,
        "quartiles": (1.3, 1.5),
        "ours": 15512.0,
        "peer": 0.04567,
        "unit": "tokens/s",
        "at_least": 1.4,
        "control": 0.05,
        "rounds": 5,
        "threads": 2,
    }
    return tables.Row(**{**fields, **changes})


def results_of(*rows: Any) -> dict[str, Any]:
    return {"benchmarks": {"train": {"rows": [asdict(row) for row in rows]}}}


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_those_of_the_results(page: str) -> None:
    assert tables.fill(PAGES[page], RESULTS) == PAGES[page], "run: python benchmarks/run_all.py --tables"


@pytest.mark.parametrize("page", PAGES)
def test_a_changed_number_is_detected(page: str) -> None:
    changed = re.sub(r"\| (\d)\.(\d\d)( |\|)", r"| \g<1>.\g<2>9\3", PAGES[page], count=1)
    assert changed != PAGES[page]
    assert tables.fill(changed, RESULTS) == PAGES[page]


def test_every_row_has_a_table_on_the_page() -> None:
    assert {row.table for row in tables.read_rows(RESULTS)} == {*tables.TABLES}
    shown = re.findall(r"<!-- table: ([\w-]+) -->", PAGES["docs/speed.md"])
    assert sorted(shown) == sorted([*tables.TABLES, "runs", "missed"])


def test_every_row_of_the_readme_was_measured() -> None:
    assert {*tables.README} <= {(row.table, row.work, row.against) for row in tables.read_rows(RESULTS)}


def test_the_page_has_no_other_tables() -> None:
    outside = re.sub(r"<!-- table: .*?<!-- end -->", "", PAGES["docs/speed.md"], flags=re.DOTALL)
    assert not re.search(r"^\|", outside, re.MULTILINE)


def test_all_benchmarks_were_run() -> None:
    (names,) = re.findall(r"^BENCHMARKS = \(([^)]*)\)", (ROOT / "benchmarks/run_all.py").read_text(), re.MULTILINE)
    assert [*RESULTS["benchmarks"]] == re.findall(r'"(\w+)"', names)


@pytest.mark.parametrize(
    ("changes", "is_met", "text"),
    [
        ({}, True, "at least 1.4: met"),
        ({"ratio": 1.39}, False, "at least 1.4: **missed**"),
        ({"at_least": None, "at_most": 1.41}, True, "at most 1.41: met"),
        ({"at_least": None, "at_most": 1.4}, False, "at most 1.4: **missed**"),
    ],
)
def test_a_row_says_whether_its_target_is_met(changes: dict[str, Any], is_met: bool, text: str) -> None:
    assert row(**changes).is_met is is_met
    assert f"| {text} |" in tables.list_table([row(**changes)])


def test_a_list_has_one_line_per_row() -> None:
    table = tables.list_table([row(), row(against="x-transformers", at_least=None, quartiles=None, ratio=12.34)])
    assert table.splitlines() == [
        "| | against | times as fast | target | qkflow | peer |",
        "|---|---|---|---|---|---|",
        "| `1m` | HF Llama | 1.40 (1.30 to 1.50) | at least 1.4: met | 15,500 tokens/s | 0.0457 tokens/s |",
        "| | x-transformers | 12.3 | | 15,500 tokens/s | 0.0457 tokens/s |",
    ]


def test_a_grid_has_one_column_per_variant() -> None:
    rows = [row(against="512"), row(against="4,096", at_least=1.5), row(work="`5m`", against="512", at_least=None)]
    assert tables.grid_table(rows).splitlines() == [
        "| | 512 | 4,096 | target |",
        "|---|---|---|---|",
        "| `1m` | 1.40 (1.30 to 1.50) | 1.40 (1.30 to 1.50) | 512 at least 1.4: met; 4,096 at least 1.5: **missed** |",
        "| `5m` | 1.40 (1.30 to 1.50) | | |",
    ]


def test_missed_targets_are_listed() -> None:
    assert tables.missed_table([row(), row(at_least=None)]) == "All 1 targets are met."
    assert "| `1m` | HF Llama | 1.20 (1.30 to 1.50) | at least 1.4 |" in tables.missed_table([row(), row(ratio=1.2)])


def test_only_marked_tables_are_replaced() -> None:
    page = "before\n<!-- table: training -->\nold\n<!-- end -->\n| after |\n"
    text = tables.fill(page, results_of(row()))
    assert text.startswith("before\n<!-- table: training -->\n\n| | against |")
    assert text.endswith("|\n\n<!-- end -->\n| after |\n")
    assert "old" not in text


def test_an_unknown_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown table 'trianing'"):
        tables.fill("<!-- table: trianing -->\n<!-- end -->", results_of(row()))
