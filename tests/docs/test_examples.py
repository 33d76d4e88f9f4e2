"""The examples are short, run without warnings, and print what they demonstrate."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
EXPECTED_OUTPUT = {
    "compare_two": r"standard: .* parameters, 2 seeds\ngated-deltanet: .* 2 seeds\ngated-deltanet: undecided",
    "drop_in_layer": r"(CoupledAttention|QDelta): loss 0\.0\d+, next token 3, .*\n(?=QDelta|$)",
    "encoder": r"(\w+:rotary_base=None, step 0: \d\d%.*\n.*\n.*step 80: (100|9\d)% of answers are right\n){2}$",
    "lora": r"step 0: loss 5\.[^$]*step 30: loss [^$]*step 30: loss [0-2]\.[^$]*predicts the same: True\n$",
    "own_mechanism": r"causality: passed\npermutation: skipped .*\n(\w+: passed\n){12}circuits: passed\n$",
    "read_attention": r"r = 1: loss 0\.\d+, \d+% .*\nr = 5: loss 0\.0\d+, \d+% of attention on the deciding token",
    "retrofit_and_tune": r"by 0\.0\nstep 0: loss 5\.[^$]*step 60: loss [0-2]\.[^$]*same outputs: True\n$",
}

COMPILED = (
    pytest.mark.compiled,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # from torch.compile
)
MARKS = {
    "own_mechanism": COMPILED,
    "lora": pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # from peft
}


def test_every_example_is_tested() -> None:
    assert [path.stem for path in EXAMPLES] == sorted(EXPECTED_OUTPUT)


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=MARKS.get(path.stem, ())) for path in EXAMPLES],
    ids=lambda path: path.stem,
)
def test_example(
    path: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(path.read_text().splitlines()) <= 40
    monkeypatch.setattr("tempfile.tempdir", str(workdir))
    runpy.run_path(str(path), run_name="__main__")
    output = capsys.readouterr().out
    assert re.search(EXPECTED_OUTPUT[path.stem], output), output
    assert 2 <= len(output.splitlines()) <= 20


def test_lora_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SystemExit, match="pip install peft"):
        runpy.run_path(str(next(path for path in EXAMPLES if path.stem == "lora")))
