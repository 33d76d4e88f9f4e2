"""The outcomes in docs/results/claims.md and README.md are what benchmarks/scoreboard.py makes of claims.json."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from qkflow.recipes.claims import CLAIMS

ROOT = Path(__file__).parents[2]
PAGES = {name: (ROOT / name).read_text() for name in ("docs/results/claims.md", "README.md")}
RECORDS = json.loads((ROOT / "docs/results/data/claims.json").read_text())


def load_scoreboard() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scoreboard", ROOT / "benchmarks/scoreboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


scoreboard = load_scoreboard()


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_those_of_the_outcomes(page: str) -> None:
    assert "<!-- claims: " in PAGES[page]
    assert scoreboard.fill(PAGES[page], RECORDS) == PAGES[page], "run: python benchmarks/scoreboard.py"


@pytest.mark.parametrize("page", PAGES)
def test_a_changed_number_is_found(page: str) -> None:
    changed = json.loads(json.dumps(RECORDS))
    for record in changed.values():
        for reading in record["verdict"]["readings"]:
            reading["value"] = (reading["value"] or 0) + 1
    assert scoreboard.fill(PAGES[page], changed) != PAGES[page]


def test_every_claim_has_a_row_with_its_command_and_outcomes_have_details() -> None:
    page = PAGES["docs/results/claims.md"]
    for claim in CLAIMS:
        assert f"`qkflow reproduce {claim.name}`" in page
        assert (f"### {claim.name}" in page) == (claim.name in RECORDS)


def test_every_claim_has_a_short_form_for_the_readme() -> None:
    assert [*scoreboard.README] == [claim.name for claim in CLAIMS]


def test_outcomes_follow_from_the_readings_that_are_shown() -> None:
    for name, record in RECORDS.items():
        outcomes = {reading["outcome"] for reading in record["verdict"]["readings"]} - {None}
        assert record["verdict"]["outcome"] in outcomes, name
