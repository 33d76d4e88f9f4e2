"""Exported runs keep every bit, through `from_pretrained` and `save_pretrained` as well."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import qkflow.hf
from qkflow.errors import UsageError
from qkflow.hub import export_run, read_folder
from qkflow.training import load_run

Run = Callable[..., Path]
TOKENS = torch.tensor([[104, 105, 7, 8, 9], [72, 101, 108, 108, 111]])


@pytest.mark.parametrize(
    ("mechanism", "shard"),
    [
        ("standard+affine:sharing=layers", "5GB"),
        (("qdelta", "differential"), "3KB"),
        (("nonlinear-query", "coupled:conv=3,key_shift=True,qk_norm=before"), "5GB"),
        ("kuramoto", "5GB"),
        (("kda", "eda"), "5GB"),
        (("comba", "qdelta:erase=own"), "5GB"),
    ],
    ids=str,
)
def test_export_transformers_and_back_change_no_bit(
    run: Run, tmp_path: Path, mechanism: str | tuple[str, ...], shard: str
) -> None:
    source = load_run(run(mechanism))
    expected = source.model(TOKENS)[0]
    export_run(source.folder, tmp_path / "out", shard_size=shard)
    assert ((tmp_path / "out" / "model.safetensors.index.json").exists()) == (shard != "5GB")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(loaded) is qkflow.hf.QKFlowForCausalLM
    assert torch.equal(loaded(TOKENS).logits, expected)
    loaded.save_pretrained(tmp_path / "again", max_shard_size=shard)
    AutoTokenizer.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "again")
    reloaded = read_folder(tmp_path / "again")
    assert reloaded.config == source.config.model
    assert reloaded.tokenizer is not None
    assert reloaded.tokenizer.to_json() == source.tokenizer.to_json()
    assert torch.equal(reloaded.model()(TOKENS)[0], expected)
    assert reloaded.weights.keys() == read_folder(tmp_path / "out").weights.keys()


def test_export_writes_the_same_config_as_save_pretrained(folder: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    exported, saved = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "saved"))
    defaults = {"transformers_version", "classifier_norm", "classifier_spread", "classifier_qk_start"}
    assert {key: value for key, value in saved.items() if key not in defaults} == exported
    generation = GenerationConfig.from_pretrained(folder)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (256, 256, 256)


def test_the_model_card_describes_the_run(folder: Path) -> None:
    card = (folder / "README.md").read_text()
    for fragment in ("`standard`", "1.2500 after 7 steps", "`abc`", "qkflow train 'my text.txt'", "import qkflow.hf"):
        assert fragment in card
    assert card.startswith("---\nlibrary_name: transformers\n")


def test_an_existing_folder_is_not_overwritten(run: Run, tmp_path: Path) -> None:
    finished_run, taken = run(), tmp_path / "taken"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        export_run(finished_run, taken)
    assert [path.name for path in taken.iterdir()] == ["notes.txt"]
    with pytest.raises(UsageError, match="exists already"):
        export_run(finished_run, taken / "notes.txt")
    with pytest.raises(UsageError, match=r"notes\.txt is a file"):
        export_run(finished_run, taken / "notes.txt" / "deeper" / "out")
    (tmp_path / "empty").mkdir()
    assert read_folder(export_run(finished_run, tmp_path / "empty")).tokenizer is not None


def test_a_failed_export_leaves_no_files(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished_run = run()

    def fail(*_: object) -> str:
        raise RuntimeError("no card")

    monkeypatch.setattr("qkflow.hub.export.model_card", fail)
    with pytest.raises(RuntimeError, match="no card"):
        export_run(finished_run, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("size", ["", "5", "GB", "0MB", "-1MB", "1.5GB", "5XB"])
def test_an_invalid_shard_size_is_refused(tmp_path: Path, size: str) -> None:
    with pytest.raises(UsageError, match="such as 500MB"):
        export_run(tmp_path / "run", tmp_path / "out", shard_size=size)


def test_a_missing_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        export_run(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_exported_folder_is_refused_as_a_run(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is an exported model, not a run"):
        export_run(folder, tmp_path / "out")


def test_loaded_weights_are_aligned_as_pytorch_aligns_its_own(folder: Path) -> None:
    """The last bits of matrix products depend on the alignment."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {parameter.data_ptr() % 64 for parameter in model.parameters()} == {0}
