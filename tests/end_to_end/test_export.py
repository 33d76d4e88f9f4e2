"""`qkflow export`: what is typed next works, and what cannot be exported is refused on one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from qkflow.cli import main
from qkflow.cli.export import Export
from qkflow.hub import read_folder
from qkflow.training import load_run

TINY = {"steps": 2, "context": 16, "batch": 4, "evaluate_tokens": 256, "final_tokens": 256}
SHAPE = {"width": 16, "layers": 1, "heads": 2, "hidden": 8}


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QKFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    Path("tiny.json").write_text(json.dumps({**TINY, "model": SHAPE}))
    Path("text.txt").write_text("".join(f"line {i}: the quick brown fox number {i * i}\n" for i in range(400)))


def test_a_trained_run_is_exported_with_words_on_how_to_load_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "text.txt", "--config", "tiny.json", "--out", "run"]) == 0
    capsys.readouterr()
    assert main(["export", "run", "models/fox", "--shard-size", "10KB"]) == 0
    shown = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert shown[0].startswith("wrote models/fox")
    script = "\n".join(shown[1:])
    exec(compile(script, "shown", "exec"), {})  # what the user is told to type
    assert capsys.readouterr().out.startswith("The ")
    run, found = load_run("run"), read_folder("models/fox")
    tokens = torch.tensor([[104, 105, 106]])
    assert torch.equal(found.model()(tokens)[0], run.model(tokens)[0])
    assert found.config == run.config.model
    card = Path("models/fox/README.md").read_text()
    assert "bits per byte" in card
    corpus = json.loads(Path("run/environment.json").read_text())["corpus"]
    assert f"`{corpus['name']}` (SHA-256 `{corpus['digest']}`)" in card
    assert len(list(Path("models/fox").glob("model-*.safetensors"))) > 1


def test_what_cannot_be_exported_is_refused_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("taken").mkdir()
    Path("taken/file").touch()
    for args, said in ((("no-run", "out"), "does not exist"), (("no-run", "taken"), "exists already")):
        assert main(["export", *args]) == 2
        error = capsys.readouterr().err.strip()
        assert said in error
        assert "\n" not in error
    assert Export(run_folder=Path("a"), folder=Path("b")).shard_size == "5GB"
