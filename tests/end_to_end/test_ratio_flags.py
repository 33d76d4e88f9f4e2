"""`qkflow train` with a separate learning rate for queries and keys."""

import json
from pathlib import Path

import pytest

from qkflow.cli import main

TINY = {
    "steps": 2,
    "context": 16,
    "batch": 2,
    "evaluate_tokens": 64,
    "final_tokens": 64,
    "model": {"width": 16, "layers": 1, "heads": 2, "hidden": 16},
}


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, session_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QKFLOW_CACHE", session_cache)
    Path("tiny.json").write_text(json.dumps(TINY))
    Path("text.txt").write_text("".join(f"line {i}: the quick brown fox number {i * i}\n" for i in range(200)))


def qkflow(*flags: str) -> int:
    return main(["train", "text.txt", "--config", "tiny.json", *flags])


@pytest.mark.parametrize(
    ("flags", "folder"),
    [
        (["--qk-ratio", "20", "--qk-growth", "40"], "standard-r=20-growth=40-seed0"),
        (["--mechanism", "standard:r=20,growth=40"], "standard-r=20-growth=40-seed0"),
    ],
)
def test_flags_and_mechanism_options_are_equivalent(flags: list[str], folder: str) -> None:
    assert qkflow(*flags) == 0
    config = json.loads(Path("runs", folder, "config.json").read_text())
    assert (config["qk_ratio"], config["qk_growth"], config["model"]["mechanism"]) == (20.0, 40.0, "standard")


def test_a_duplicate_or_invalid_ratio_raises_a_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, fragment in (
        (["--mechanism", "standard:r=20", "--qk-ratio", "5"], "--mechanism standard:r=20 sets a ratio already"),
        (["--qk-ratio", "0"], "qk_ratio must be a finite number above 0, got 0.0"),
        (["--mechanism", "standard:r=x"], "r must be a finite number above 0, got 'x'"),
    ):
        assert qkflow(*flags) == 2
        error = capsys.readouterr().err
        assert fragment in error
        assert error.count("\n") == 1
    assert not Path("runs").exists()
