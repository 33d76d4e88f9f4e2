"""Recall tasks on the command line."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from qkflow.cli import main
from qkflow.cli.evaluate import recall_tables
from qkflow.training import CellResult

TINY = {"steps": 4, "batch": 4, "evaluate_every": 2, "model": {"width": 16, "layers": 1, "heads": 2, "hidden": 16}}
PAIRS = "mqar:pairs=1+2,length=16,keys=4,values=4,train=40,validation=8,each=5"
NEEDLE = "s-niah-1:length=64,lengths=64+96,depths=0+100,digits=1,train=40,validation=8,each=4"


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, session_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QKFLOW_CACHE", session_cache)
    monkeypatch.setenv("COLUMNS", "80")
    Path("tiny.json").write_text(json.dumps(TINY))


def qkflow(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Return the output of a command."""
    capsys.readouterr()
    assert main(list(args)) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Return the one-line error of a command that must fail."""
    capsys.readouterr()
    assert main(list(args)) == 2
    error = capsys.readouterr().err.strip()
    assert "\n" not in error
    return error


def test_train_prints_accuracy_and_eval_prints_it_by_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    shown = qkflow(capsys, "train", PAIRS, "--config", "tiny.json", "--out", "run").splitlines()
    assert sum("bits per answer token  accuracy" in line for line in shown) == 3
    assert shown[-1].startswith("held-out accuracy: ")
    assert "(chance 25.0 %); saved in run" in shown[-1]
    assert qkflow(capsys, "train", "--resume", "run").splitlines()[-1] == shown[-1]

    printed = json.loads(qkflow(capsys, "eval", "run", "--json"))
    assert (printed["chance"], printed["questions"], printed["split"]) == (0.25, 15, "test")
    assert printed["unit"] == "answer token"  # in bytes
    stored = json.loads(Path("run/recall.json").read_text())["cells"]
    assert [{name: cell[name] for name in stored[0]} for cell in printed["cells"]] == stored
    assert all(cell["low"] <= cell["accuracy"] <= cell["high"] for cell in printed["cells"])

    lines = qkflow(capsys, "eval", "run").splitlines()
    assert lines[1].split() == ["pairs", "length", "accuracy", "95", "%", "interval", "questions"]
    assert [line.split()[0] for line in lines[2:4]] == ["1", "2"]
    other = qkflow(capsys, "eval", "run", PAIRS.replace("pairs=1+2,length=16", "pairs=3,length=20"))
    assert other.splitlines()[2].split()[:2] == ["3", "20"]

    assert "differs from" in refused(capsys, "eval", "run", PAIRS.replace("keys=4", "keys=5"))
    Path("text.txt").write_text("some words of a text " * 99)
    assert "use a recall task" in refused(capsys, "eval", "run", "text.txt")
    assert "--context 16" in refused(capsys, "train", PAIRS, "--context", "32", "--steps", "2")


def test_eval_prints_needle_accuracy_by_length_and_depth(capsys: pytest.CaptureFixture[str]) -> None:
    qkflow(capsys, "train", NEEDLE, "--config", "tiny.json", "--out", "run")
    lines = qkflow(capsys, "eval", "run").splitlines()
    assert lines[1].split() == ["depth", "64", "96"]
    assert [line.split()[0] for line in lines[2:5]] == ["0", "100", "mean"]
    assert any("of 16 questions right (chance 10.0 %)" in line for line in lines)
    learnt = qkflow(capsys, "eval", "run", "--split", "train").splitlines()  # at any depth
    assert [line.split()[0] for line in learnt[2:13]] == [*(f"{n}-{n + 9}" for n in range(0, 90, 10)), "90-100", "mean"]
    assert main(["generate", "run", "no such words"]) == 2
    assert capsys.readouterr().out == ""
    text = Path("text.txt")
    text.write_text("some words of a text " * 99)
    qkflow(capsys, "train", "text.txt", "--config", "tiny.json", "--out", "text")
    assert "differs from" in refused(capsys, "eval", "text", NEEDLE)


@pytest.mark.parametrize("right", [0, 13, 20])
def test_a_grid_fits_into_eighty_columns_with_its_intervals(right: int) -> None:
    lengths, depths = [2**n for n in range(8, 16)], [0, 25, 50, 75, 100]
    cells = [
        CellResult(
            pairs=None, length=length, depth=depth, instances=20, questions=20, right=right, squares=float(right)
        )
        for length in lengths
        for depth in depths
    ]
    console = Console(width=80)
    with console.capture() as shown:
        for table in recall_tables(cells, ["length", "depth"]):
            console.print(table)
    lines = shown.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in shown.get()
    assert [line.split()[0] for line in lines].count("mean") == 2
    assert " ".join(lines[0].split() + lines[7].split()) == (
        "depth 256 512 1,024 2,048 4,096 8,192 depth 16,384 32,768"
    )
