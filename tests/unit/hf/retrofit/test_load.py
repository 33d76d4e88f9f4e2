"""`load_retrofitted` restores every bit, and refuses altered folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from qkflow.circuits import circuit_groups
from qkflow.errors import CheckpointError, UsageError
from qkflow.hf.retrofit import is_retrofitted, load_retrofitted, remove_retrofit, retrofit
from qkflow.mechanisms.coupling import CouplingConfig

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox", "mixtral"])
def test_a_saved_model_is_loaded_to_the_bit(models: Any, kind: str, tmp_path: Path) -> None:
    model = models.randomise_couplings(retrofit(models(kind, dtype=torch.bfloat16), layers=[1]))
    circuit_groups(model, 1e-3, r=10.0)  # splits fused matrices in memory; files keep them fused
    model.save_pretrained(tmp_path, max_shard_size="4KB" if kind == "llama" else "5GB")
    loaded = load_retrofitted(tmp_path)
    assert type(loaded) is type(model)
    assert not loaded.training
    assert (loaded.dtype, loaded.config.qkflow_retrofit) == (torch.bfloat16, model.config.qkflow_retrofit)
    assert_close(dict(loaded.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    assert_close(loaded(models.tokens()).logits, model(models.tokens()).logits, rtol=0, atol=0)
    loaded.save_pretrained(tmp_path / "again")
    assert load_retrofitted(tmp_path / "again", dtype=torch.float32, attention="eager").dtype == torch.float32
    assert not is_retrofitted(remove_retrofit(loaded))


def test_a_classifier_is_loaded_as_a_classifier(models: Any, tmp_path: Path) -> None:
    coupling = CouplingConfig(dynamics="hamiltonian", dt=0.0, integrator="leapfrog", hidden=3)
    model = models.randomise_couplings(retrofit(models("llama", suffix="ForSequenceClassification"), coupling))
    model.save_pretrained(tmp_path)
    loaded = load_retrofitted(tmp_path)
    assert type(loaded) is transformers.LlamaForSequenceClassification
    assert_close(loaded(models.tokens()).logits, model(models.tokens()).logits, rtol=0, atol=0)


def test_a_model_loaded_without_its_coupling_is_not_retrofitted_again(models: Any, tmp_path: Path) -> None:
    retrofit(models("llama")).save_pretrained(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(UsageError, match="load its folder with load_retrofitted"):
        retrofit(plain)


Change = Callable[[Path], None]


def _edit_config(**values: Any) -> Change:
    def change(folder: Path) -> None:
        data = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**data, **values}))

    return change


def _edit_retrofit_config(**values: Any) -> Change:
    def change(folder: Path) -> None:
        record = json.loads((folder / "config.json").read_text())["qkflow_retrofit"]
        _edit_config(qkflow_retrofit={**record, **values})(folder)

    return change


def _replace_by_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])


def _remove_coupling(folder: Path) -> None:
    path = folder / "model.safetensors"
    without_coupling = {name: tensor for name, tensor in safetensors.load_file(path).items() if "coupling" not in name}
    safetensors.save_file(without_coupling, path, metadata={"format": "pt"})


def _replace_by_link(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.rename(folder.parent / "outside.safetensors")
    path.symlink_to(folder.parent / "outside.safetensors")


def _point_outside(folder: Path) -> None:
    names = safetensors.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../elsewhere/model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (_edit_config(qkflow_retrofit=None), "saved without a coupling"),
        (_edit_config(qkflow_retrofit="__import__"), "expected an object"),
        (_edit_retrofit_config(code="x"), "unknown config key 'code' in 'qkflow_retrofit'"),
        (
            _edit_retrofit_config(coupling={"dynamics": "affine", "code": "x"}),
            "unknown config key 'code' in 'coupling'",
        ),
        (_edit_retrofit_config(layers=[5]), "some of its 2"),
        (_edit_retrofit_config(layers=[0]), r"unexpected: model.layers.1.self_attn.coupling"),
        (_edit_retrofit_config(coupling={"dynamics": "affine", "hidden": 3}), r"mismatched: .*coupling.*\[3, 4\]"),
        (_edit_config(hidden_size=32), "mismatched"),
        (_edit_config(num_attention_heads="many"), "cannot be loaded as LlamaForCausalLM"),
        (_edit_config(architectures=["os"]), "expected a model of transformers"),
        (_edit_config(architectures=["GPT2LMHeadModel"]), "unknown model_type for GPT2LMHeadModel 'llama'"),
        (_edit_config(attn_implementation="someone/kernel"), "has attn_implementation 'someone/kernel'"),
        (_edit_config(quantization_config={"quant_method": "x"}), "quantised weights are not supported"),
        (
            lambda folder: (folder / "adapter_config.json").write_text("{}"),
            "has adapter_config.json, which would be loaded instead of its weights",
        ),
        (lambda folder: (folder / "config.json").write_text("[" * 10_000), "cannot be read as JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "contains a list: expected a JSON object"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (_replace_by_pickle, "safetensors only"),
        (_truncate, "not a safetensors file"),
        (_remove_coupling, r"missing: .*coupling"),
        (_replace_by_link, "leads out of its folder"),
        (_edit_config(auto_map={"AutoModelForCausalLM": "evil.Model"}), "'auto_map', which names code"),
        (_edit_config(num_hidden_layers=10**9), "requires 1,000,000,000 layers"),
        (lambda folder: (folder / "custom_generate").mkdir(), "'custom_generate', which is code"),
        (
            lambda folder: (folder / "shard-00001-model-00001-of-00001.safetensors").write_text("?"),
            "which would be loaded instead of its weights",
        ),
        (_point_outside, r"refers to the file '../elsewhere/model.safetensors', which is outside the folder"),
    ],
)
def test_an_altered_folder_is_refused_with_one_line(models: Any, tmp_path: Path, change: Change, fragment: str) -> None:
    retrofit(models("llama")).save_pretrained(tmp_path)
    change(tmp_path)
    with pytest.raises(UsageError, match=fragment) as caught:
        load_retrofitted(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_damaged_folder_is_a_checkpoint_error(models: Any, tmp_path: Path) -> None:
    retrofit(models("llama")).save_pretrained(tmp_path)
    _truncate(tmp_path)
    with pytest.raises(CheckpointError):
        load_retrofitted(tmp_path)
