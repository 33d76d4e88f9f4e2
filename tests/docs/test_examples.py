"""The examples: short, and they run, without a warning, on data of their own, and say what they are there to show."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
TOLD = {
    "compare_two": r"standard .* parameters, 2 seeds\ngated-deltanet .* 2 seeds\ngated-deltanet .+ standard",
    "drop_in_layer": r"(CoupledAttention|QDelta): loss 0\.0\d+; then 3; .*\n(?=QDelta|$)",
    "own_mechanism": r"causality: kept \n(\w+: kept \n){12}circuitry: kept \n$",
    "read_attention": r"r = 1: loss 0\.\d+, \d+% .*\n.*\nr = 5: loss 0\.0\d+, \d+% of attention on the word",
    "retrofit_and_tune": r"changed outputs by 0\.0\nstep 0: loss 5\.[^$]*step 60: loss [0-2]\.[^$]*the same: True\n$",
}
"""What each says."""


def test_there_are_the_five_of_them() -> None:
    assert [path.stem for path in EXAMPLES] == sorted(TOLD)


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.compiled if path.stem == "own_mechanism" else ()) for path in EXAMPLES],
    ids=lambda path: path.stem,
)
def test_an_example_is_short_and_runs(
    path: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(path.read_text().splitlines()) <= 30
    monkeypatch.setattr("tempfile.tempdir", str(workplace))
    runpy.run_path(str(path), run_name="__main__")
    told = capsys.readouterr().out
    assert re.search(TOLD[path.stem], told), told
    assert 2 <= len(told.splitlines()) <= 20
