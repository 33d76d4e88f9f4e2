"""Runs that start from existing weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from qkflow.cli import main
from qkflow.data import CorpusConfig, open_corpus
from qkflow.errors import CheckpointError, Interrupted, UsageError
from qkflow.hub import export_run
from qkflow.models import Decoder
from qkflow.training import load_run, read_metrics, train
from qkflow.training.run_dir import read_config
from qkflow.training.tensors import digest, load_tensors, model_tensors, save_tensors


@pytest.fixture
def weights(configure: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return model_tensors(Decoder(configure().model))


def test_a_run_starts_from_initial_weights_and_stores_them(
    configure: Any, tmp_path: Path, weights: dict[str, torch.Tensor], at: Any
) -> None:
    train(configure(steps=1, lr=1e-9), tmp_path / "run", initial=weights)
    assert read_config(tmp_path / "run").initial == digest(weights)
    stored = load_tensors(tmp_path / "run" / "initial.safetensors")
    after = load_tensors(tmp_path / "run" / "weights.safetensors")
    for name, tensor in weights.items():
        assert torch.equal(stored[name], tensor)
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-6)
    train(configure(steps=1, lr=1e-9), tmp_path / "drawn")
    drawn = load_tensors(tmp_path / "drawn" / "weights.safetensors")
    assert not torch.allclose(drawn["embedding.weight"], weights["embedding.weight"], atol=1e-3)
    assert not (tmp_path / "drawn" / "initial.safetensors").exists()


@pytest.mark.parametrize("step", [0, 2])
def test_a_run_from_initial_weights_resumes_bit_for_bit(
    configure: Any, tmp_path: Path, weights: dict[str, torch.Tensor], watcher: Any, step: int
) -> None:
    config = configure(checkpoint_every=2)
    train(config, tmp_path / "whole", initial=weights)

    class Failing(watcher):
        def on_step(self, record: Any) -> None:
            if record["step"] == step + 1:
                raise Interrupted("killed") if step else RuntimeError("killed")

    with pytest.raises((RuntimeError, Interrupted)):
        train(config, tmp_path / "run", initial=weights, callbacks=[Failing()])
    train(None, tmp_path / "run", resume=True)
    files = [(tmp_path / name / "weights.safetensors").read_bytes() for name in ("whole", "run")]
    assert files[0] == files[1]


def test_altered_initial_weights_are_refused(
    configure: Any, tmp_path: Path, weights: dict[str, torch.Tensor], watcher: Any
) -> None:
    class Failing(watcher):
        def on_step(self, record: Any) -> None:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        train(configure(), tmp_path / "run", initial=weights, callbacks=[Failing()])
    save_tensors(tmp_path / "run" / "initial.safetensors", {name: t + 1 for name, t in weights.items()})
    with pytest.raises(CheckpointError, match=r"does not contain the initial weights"):
        train(None, tmp_path / "run", resume=True)


def test_weights_of_another_shape_create_no_run(
    configure: Any, tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    with pytest.raises(CheckpointError, match="do not match the model"):
        train(configure(model={"width": 8}), tmp_path / "run", initial=weights)
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_config_with_initial_weights_requires_them(
    configure: Any, tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    config = configure(initial=digest(weights))
    for initial in (None, {name: tensor + 1 for name, tensor in weights.items()}):
        with pytest.raises(UsageError, match="starts from the weights"):
            train(config, tmp_path / "run", initial=initial)
    train(config, tmp_path / "run", initial=weights)


def test_init_starts_from_the_weights_of_a_run(
    configure: Any, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(configure(steps=30, lr=1e-2), tmp_path / "first")
    (tmp_path / "small.json").write_text(json.dumps({"context": 16, "batch": 4, "steps": 1, "device": "cpu"}))
    begin = ["train", str(texts), "--init", str(tmp_path / "first"), "--config", str(tmp_path / "small.json")]
    assert main([*begin, "--out", str(tmp_path / "second")]) == 0
    first, second = load_run(tmp_path / "first"), load_run(tmp_path / "second")
    assert second.config.model == first.config.model
    assert second.config.initial == digest(model_tensors(first.model))
    last, start = (
        read_metrics(tmp_path / "first" / "metrics.jsonl")[-1],
        read_metrics(tmp_path / "second" / "metrics.jsonl")[0],
    )
    assert start["loss"] == pytest.approx(last["loss"], rel=1e-6)
    capsys.readouterr()
    for flags in (["--size", "1m"], ["--mechanism", "differential"], ["--tokens", "bpe"]):
        assert main([*begin, *flags, "--out", str(tmp_path / "third")]) == 2
        assert "--init" in capsys.readouterr().err
    assert main([*begin[:3], str(tmp_path), "--out", str(tmp_path / "third")]) == 2
    assert "has no config.json" in capsys.readouterr().err
    assert not (tmp_path / "third").exists()


def test_a_different_tokenizer_is_refused(
    configure: Any, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even if the numbers of tokens agree, the ids would mean other tokens."""
    train(configure(steps=1), tmp_path / "text")
    (tmp_path / "small.json").write_text(json.dumps({"batch": 4, "steps": 1, "device": "cpu"}))
    rest = ["--config", str(tmp_path / "small.json"), "--out", str(tmp_path / "out")]
    task = "mqar:pairs=2,length=16,keys={},train=20,validation=4,each=2"
    assert main(["train", task.format(6), "--init", str(tmp_path / "text"), *rest]) == 2
    assert "of kind 'bytes', but mqar" in capsys.readouterr().err
    assert main(["train", task.format(6), "--size", "100k", *rest[:2], "--out", str(tmp_path / "task")]) == 0
    for other in (str(texts), task.format(7)):
        capsys.readouterr()
        assert main(["train", other, "--init", str(tmp_path / "task"), *rest]) == 2
        assert "of kind 'words'" in capsys.readouterr().err
    assert main(["train", task.format(6), "--init", str(tmp_path / "task"), *rest]) == 0
    assert main(["export", str(tmp_path / "task"), str(tmp_path / "exported")]) == 0
    assert "tokenizer('" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    first = load_run(tmp_path / "task").tokenizer
    assert tokenizer(first.decode([0]).decode()).input_ids == [0]


def test_init_round_trips_through_an_exported_folder(configure: Any, texts: Path, tmp_path: Path) -> None:
    corpus = CorpusConfig(source=str(texts), tokens="bpe", vocabulary=300)
    shape = {"mechanism": "coupled:sharing=layers", "vocabulary": open_corpus(corpus).vocabulary}
    train(replace(configure(model=shape), data=corpus), tmp_path / "first")
    export_run(tmp_path / "first", tmp_path / "exported")
    (tmp_path / "small.json").write_text(json.dumps({"context": 16, "batch": 4, "steps": 1, "device": "cpu"}))
    first = load_run(tmp_path / "first")
    for origin in ("first", "exported"):
        out = tmp_path / f"from-{origin}"
        begin = ["train", str(texts), "--init", str(tmp_path / origin), "--config", str(tmp_path / "small.json")]
        assert main([*begin, "--out", str(out)]) == 0
        run = load_run(out)
        assert run.config.initial == digest(model_tensors(first.model))
        assert (run.config.model, run.config.data.tokens) == (first.config.model, "saved")
        assert run.tokenizer.to_json() == first.tokenizer.to_json()
