"""`qkflow sharpen` from the command line, with real processes, to the report."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from qkflow.cli import main
from qkflow.cli.compare import ExperimentDisplay

SMALL = ["--train", "40", "--test", "12", "--ratios", "1,20", "--steps", "3", "--rates", "1e-3"]
SENTINEL = "xyzzyword"


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, session_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QKFLOW_CACHE", session_cache)
    monkeypatch.setenv("COLUMNS", "80")


def sharpen(monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    monkeypatch.setattr(sys, "argv", ["qkflow", "sharpen", *flags])
    return main(["sharpen", *flags])


def run_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *flags: str) -> str:
    capsys.readouterr()
    assert sharpen(monkeypatch, *flags) == 2
    return capsys.readouterr().err


def left(study: Path) -> dict[str, bytes]:
    return {str(path.relative_to(study)): path.read_bytes() for path in study.rglob("*") if path.is_file()}


def test_one_command_runs_the_study_and_a_second_run_changes_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*SMALL, "--seeds", "2", "--jobs", "2", "--out", "study"]
    assert sharpen(monkeypatch, *flags) == 0
    output = capsys.readouterr().out
    assert "On agreement (built-in grammar), compared with r = 1: r = 20" in output.replace("\n", " ")
    assert "report: " in output
    study = Path("study")
    results = json.loads((study / "results.json").read_text())
    assert (results["finished"], results["runs"]) == (4, 4)
    assert {change["arm"] for change in results["changes"]} == {"r = 20"}
    assert "<html" in (study / "report.html").read_text()
    assert len((study / "results.csv").read_text().splitlines()) == 5
    before = left(study)
    assert sharpen(monkeypatch, *flags) == 0
    after = left(study)
    assert [name for name in before if after[name] != before[name] and name != "lock"] == []
    assert after.keys() == before.keys()
    weights = study / "runs/standard_r=20/seed-1/weights.safetensors"
    trained = weights.read_bytes()
    shutil.rmtree(weights.parent)
    assert main(["compare", "--resume", "study"]) == 0  # either command resumes any study
    assert weights.read_bytes() == trained
    assert "leave out --seeds" in run_fails(capsys, monkeypatch, "--resume", "study", "--seeds", "3")


def posts(folder: Path) -> None:
    """Write posts in HateXplain's format, with one word that must not appear in any output."""
    data: dict[str, Any] = {}
    for number in range(30):
        label = ("hatespeech", "normal", "offensive")[number % 3]
        words = [SENTINEL, f"Filler{number % 4}", "posted", SENTINEL]
        marks = [] if label == "normal" else [[1, 0, 0, 1]] * 3
        annotators = [{"label": label, "annotator_id": annotator, "target": ["None"]} for annotator in range(3)]
        data[f"{number}_{'gab' if number % 2 else 'twitter'}"] = {
            "post_id": f"{number}_gab",
            "post_tokens": words,
            "annotators": annotators,
            "rationales": marks,
        }
    names = list(data)
    folder.mkdir()
    (folder / "dataset.json").write_text(json.dumps(data))
    (folder / "post_id_divisions.json").write_text(
        json.dumps({"train": names[:18], "val": names[18:24], "test": names[24:]})
    )


def test_no_text_of_a_task_that_may_not_be_quoted_is_written(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    posts(Path("posts"))
    flags = ["--task", "hatexplain", "--data", "posts", *SMALL[4:], "--seeds", "1", "--out", "study"]
    assert sharpen(monkeypatch, *flags) == 0
    assert sharpen(monkeypatch, *flags, "--json") == 0
    output = "".join(capfd.readouterr())
    assert "HateXplain" in output
    for text in (output, *(content.decode("latin-1") for content in left(Path("study")).values())):
        assert SENTINEL not in text.lower()
        assert "filler" not in text.lower()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ratios", "1,x"], "--ratios must be numbers separated by commas"),
        (["--ratios", "0,1"], "r must be a finite number above 0, got 0, 1"),
        (["--ratios", "1,nan"], "r must be a finite number above 0, got 1, nan"),
        (["--ratios", "1"], "at least two arms are needed: give --ratios 1,20"),
        (["--growth", "no"], "--growth must be numbers"),
        (["--rates", "fast"], "--rates must be numbers"),
        (["--seeds", "0"], "seeds must be at least 1, got 0"),
        (["--task", "squad"], "the task squad needs data: set --data"),
        (["--task", "hatexplain", "--data", "nowhere"], "nowhere: set --data"),
        (["--data", "empty.jsonl"], "empty.jsonl is empty"),
        (["--data", "~nobody-here/x"], "unknown home directory"),
        (["--mechanism", "standart", "--train", "40", "--test", "8"], "did you mean 'standard'"),
        (["--form", "CACO"], "--form is for the task synthetic"),
        (["--task", "synthetic", "--mechanism", "qdelta"], "the one-layer model of the theory"),
        (["--task", "synthetic", "--published", "--train", "8", "--test", "4"], "leave out --published"),
        (["--train", "40", "--test", "8", "--out", "empty.jsonl"], "empty.jsonl is a file: choose a folder"),
        (["--train", "40", "--test", "8", "--out", "."], "is not empty (empty.jsonl)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_errors_are_one_line_and_leave_no_files(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str
) -> None:
    Path("empty.jsonl").touch()
    assert sharpen(monkeypatch, *flags) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [path.name for path in Path().iterdir()] == ["empty.jsonl"]


@pytest.mark.parametrize(("flags", "message"), [(["--task", "agrement"], "agreement"), (["--form", "FAF"], "FAFO")])
def test_an_unknown_name_lists_the_known_ones(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str
) -> None:
    assert sharpen(monkeypatch, *flags) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_help_lists_the_options(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as left_with:
        sharpen(monkeypatch, "--help")
    assert left_with.value.code == 0
    output = capsys.readouterr().out
    assert "Test whether faster query-key learning sharpens attention" in " ".join(output.split())
    for flag in ("--task", "--data", "--ratios", "--growth", "--published", "--seeds", "--tau", "--pooling", "--out"):
        assert flag in output


def test_ctrl_c_exits_with_130_and_prints_the_resume_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    signals = iter([signal.SIGINT])  # a second signal would end this process

    def interrupt(self: ExperimentDisplay, progress: Any) -> None:
        for number in signals:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(ExperimentDisplay, "on_progress", interrupt)
    flags = [*SMALL[:6], "--steps", "100000000", "--rates", "1e-3", "--seeds", "1", "--jobs", "1", "--out", "study"]
    assert sharpen(monkeypatch, *flags) == 130
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "stopped with 0 of 2 runs finished: resume with `qkflow compare --resume study`" in error
