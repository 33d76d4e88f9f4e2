"""A run goes to the Hub's folder and comes back, through transformers too, without a bit changed."""

from __future__ import annotations

import json
import subprocess
import sys
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
    [("standard+affine:sharing=layers", "5GB"), (("qdelta", "differential"), "3KB"), ("kuramoto", "5GB")],
    ids=str,
)
def test_a_run_keeps_every_bit_on_its_way_through_transformers_and_back(
    run: Run, tmp_path: Path, mechanism: str | tuple[str, ...], shard: str
) -> None:
    made = load_run(run(mechanism))
    want = made.model(TOKENS)[0]
    export_run(made.folder, tmp_path / "out", shard_size=shard)
    assert ((tmp_path / "out" / "model.safetensors.index.json").exists()) == (shard != "5GB")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(theirs) is qkflow.hf.QKFlowForCausalLM
    assert torch.equal(theirs(TOKENS).logits, want)
    theirs.save_pretrained(tmp_path / "again", max_shard_size=shard)
    AutoTokenizer.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "again")
    back = read_folder(tmp_path / "again")
    assert back.config == made.config.model
    assert back.tokenizer is not None
    assert back.tokenizer.to_json() == made.tokenizer.to_json()
    assert torch.equal(back.model()(TOKENS)[0], want)
    assert back.weights.keys() == read_folder(tmp_path / "out").weights.keys()


def test_what_is_exported_is_what_save_pretrained_writes(folder: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "theirs")
    ours, theirs = (json.loads((place / "config.json").read_text()) for place in (folder, tmp_path / "theirs"))
    defaults = {"transformers_version", "classifier_norm", "classifier_spread", "classifier_qk_start"}
    assert {key: value for key, value in theirs.items() if key not in defaults} == ours
    said = GenerationConfig.from_pretrained(folder)
    assert (said.bos_token_id, said.eos_token_id, said.pad_token_id) == (256, 256, 256)


def test_importing_qkflow_hf_is_all_that_the_auto_classes_need_and_exporting_needs_nothing(folder: Path) -> None:
    script = (
        "import sys, qkflow, qkflow.hub, qkflow.cli; assert 'transformers' not in sys.modules\n"
        "sys.modules['transformers'] = None  # as if it were not installed\n"
        "try: import qkflow.hf\n"
        "except ImportError as error: print(error)\n"
        "del sys.modules['transformers']; import qkflow.hf\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model, tokenizer = (Auto.from_pretrained(sys.argv[1]) for Auto in (AutoModelForCausalLM, AutoTokenizer))\n"
        "written = model.generate(**tokenizer('hi', return_tensors='pt'), max_new_tokens=2)\n"
        "print(type(model).__name__, written.shape[1])"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "qkflow.hf needs transformers: pip install 'qkflow[hf]'",
        "QKFlowForCausalLM 4",
    ]


def test_a_card_says_what_the_model_is(folder: Path) -> None:
    card = (folder / "README.md").read_text()
    for said in ("`standard`", "1.2500 after 7 steps", "`abc`", "qkflow train 'my text.txt'", "import qkflow.hf"):
        assert said in card
    assert card.startswith("---\nlibrary_name: transformers\n")


def test_a_folder_that_holds_something_is_not_touched(run: Run, tmp_path: Path) -> None:
    made, taken = run(), tmp_path / "taken"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        export_run(made, taken)
    assert [path.name for path in taken.iterdir()] == ["notes.txt"]
    with pytest.raises(UsageError, match="exists already"):
        export_run(made, taken / "notes.txt")
    with pytest.raises(UsageError, match=r"notes\.txt is a file"):
        export_run(made, taken / "notes.txt" / "deeper" / "out")
    (tmp_path / "empty").mkdir()
    assert read_folder(export_run(made, tmp_path / "empty")).tokenizer is not None


def test_nothing_is_left_of_an_export_that_fails(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = run()

    def fails(*_: object) -> str:
        raise RuntimeError("no card today")

    monkeypatch.setattr("qkflow.hub.export.model_card", fails)
    with pytest.raises(RuntimeError, match="no card"):
        export_run(made, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("size", ["", "5", "GB", "0MB", "-1MB", "1.5GB", "5XB"])
def test_a_size_that_is_none_is_refused(tmp_path: Path, size: str) -> None:
    with pytest.raises(UsageError, match="such as 500MB"):
        export_run(tmp_path / "run", tmp_path / "out", shard_size=size)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        export_run(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_exported_folder_is_told_from_a_run(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is an exported model, not a run"):
        export_run(folder, tmp_path / "out")


def test_loaded_weights_lie_where_torch_puts_its_own(folder: Path) -> None:
    """Else the last bits of products may differ."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {parameter.data_ptr() % 64 for parameter in model.parameters()} == {0}
