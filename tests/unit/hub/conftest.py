"""Run folders with random weights, and folders exported from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qkflow.config import to_dict
from qkflow.data import ByteTokenizer, CorpusConfig, Tokenizer, save_tokenizer
from qkflow.hub import export_run
from qkflow.models import Decoder, DecoderConfig
from qkflow.training import TrainConfig
from qkflow.training.tensors import model_tensors, save_tensors

Run = Callable[..., Path]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Write the folder of a finished run with random weights."""
    return lambda mechanism="standard", tokenizer=None: _run(tmp_path / "run", mechanism, tokenizer or ByteTokenizer())


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported folder with three shards. Do not write to it."""
    root = tmp_path_factory.mktemp("exported")
    return export_run(_run(root / "run", "standard", ByteTokenizer()), root / "folder", shard_size="6KB")


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    """A copy of the exported folder."""
    return Path(shutil.copytree(exported, tmp_path / "exported"))


def _run(folder: Path, mechanism: str | tuple[str, ...], tokenizer: Tokenizer) -> Path:
    folder.mkdir()
    shape = DecoderConfig(width=16, layers=2, heads=2, hidden=8, vocabulary=tokenizer.vocabulary, mechanism=mechanism)
    model = Decoder(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    config = TrainConfig(data=CorpusConfig(source="text.txt"), model=shape, steps=7)
    record = {"command": ["qkflow", "train", "my text.txt"], "data": {"name": "text.txt", "digest": "abc"}}
    evaluated = {"kind": "eval", "step": 7, "bits_per_byte": 1.25, "perplexity": 2.5}
    (folder / "config.json").write_text(json.dumps(to_dict(config)))
    (folder / "environment.json").write_text(json.dumps(record))
    (folder / "metrics.jsonl").write_text(json.dumps(evaluated) + "\n")
    save_tokenizer(tokenizer, folder / "tokenizer.json")
    save_tensors(folder / "weights.safetensors", model_tensors(model))
    return folder
