"""`qkflow export`: the printed instructions work, and errors take one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qkflow.cli.export import Export
from qkflow.hub import read_folder
from qkflow.training import load_run

Command = Callable[..., str]
pytestmark = pytest.mark.usefixtures("workspace")


def test_export_prints_code_that_loads_the_model(
    qkflow: Command, trained_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = qkflow("export", str(trained_run), "models/fox", "--shard-size", "10KB")
    wrote, *code = [line.strip() for line in output.splitlines() if line.strip()]
    assert wrote.startswith("wrote models/fox")
    exec(compile("\n".join(code), "code", "exec"), {})
    assert capsys.readouterr().out.startswith("The ")
    run, exported = load_run(trained_run), read_folder("models/fox")
    tokens = torch.tensor([[104, 105, 106]])
    assert torch.equal(exported.model()(tokens)[0], run.model(tokens)[0])
    assert exported.config == run.config.model
    card = Path("models/fox/README.md").read_text()
    assert "bits per byte" in card
    corpus = json.loads((trained_run / "environment.json").read_text())["data"]
    assert f"`{corpus['name']}` (SHA-256 `{corpus['digest']}`)" in card
    assert len(list(Path("models/fox").glob("model-*.safetensors"))) > 1


def test_a_bad_export_is_refused_with_one_line(usage_error: Command) -> None:
    Path("taken").mkdir()
    Path("taken/file").touch()
    assert "does not exist" in usage_error("export", "no-run", "out")
    assert "exists already" in usage_error("export", "no-run", "taken")
    assert Export(run_folder=Path("a"), folder=Path("b")).shard_size == "5GB"
