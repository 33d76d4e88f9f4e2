"""Hugging Face's models: QK is what moves their maps, OV is what does not, and splitting changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qkflow.circuits import circuit_groups, find_circuits

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 11,
    "max_position_embeddings": 8,
}
GPT2: dict[str, Any] = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 11, "n_positions": 8}
T5: dict[str, Any] = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 11}
FALCON = {"num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True}
KINDS = {
    "llama": ("LlamaModel", "LlamaConfig", {**SMALL, "num_key_value_heads": 1}),
    "gpt2": ("GPT2Model", "GPT2Config", GPT2),
    "bert": ("BertModel", "BertConfig", SMALL),
    "t5": ("T5EncoderModel", "T5Config", T5),
    "gpt_neox": ("GPTNeoXModel", "GPTNeoXConfig", SMALL),
    "falcon": ("FalconModel", "FalconConfig", {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 11, **FALCON}),
    "phi3": ("Phi3Model", "Phi3Config", {**SMALL, "num_key_value_heads": 1}),
}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "attn_implementation": "eager"}


def made(kind: str, **more: Any) -> nn.Module:
    model, config, shape = KINDS[kind]
    torch.manual_seed(0)
    found = getattr(transformers, model)(getattr(transformers, config)(**shape, **NO_TOKENS, **more)).eval()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return found


@torch.no_grad()
def read(model: nn.Module) -> tuple[Tensor, Tensor]:
    """The stream behind the model, and its map."""
    found = model(input_ids=torch.arange(3, 8)[None], output_attentions=True)
    return found.last_hidden_state, found.attentions[0]


@pytest.mark.parametrize("kind", KINDS)
def test_each_parameter_is_in_one_group_and_each_group_does_what_its_circuit_does(kind: str) -> None:
    model = made(kind)
    before, seen = read(model)
    keys = list(model.state_dict())
    groups = circuit_groups(model, 0.1, r=20.0)
    assert list(model.state_dict()) == keys
    assert all(torch.equal(one, other) for one, other in zip(read(model), (before, seen), strict=True))
    listed = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(listed) == sorted(map(id, model.parameters()))
    members = {group["circuit"]: group["params"] for group in groups}
    keys_biases = {id(p) for name, p in model.named_parameters() if name.endswith(("key.bias", "bias_key"))}
    for circuit in ("ov", "qk"):
        for parameter in members[circuit]:
            held = parameter.detach().clone()
            parameter.data.add_(torch.randn_like(parameter))
            after, now = read(model)
            if id(parameter) not in keys_biases:  # which no softmax sees
                assert not torch.equal(after, before)
                assert torch.equal(now, seen) == (circuit == "ov")
            parameter.data.copy_(held)


def test_gpt2_that_looks_at_an_encoder_has_its_queries_apart() -> None:
    found = find_circuits(made("gpt2", add_cross_attention=True))
    slices = {(part.name, part.matrix) for part in found.qk if part.name.startswith("h.0.crossattention")}
    weights = {(name.removeprefix("h.0.crossattention."), matrix) for name, matrix in slices if "weight" in name}
    assert weights == {("q_attn.weight", ""), ("c_attn.weight", "key")}


def test_t5_looks_by_its_relative_positions_and_in_its_decoder_across() -> None:
    found = find_circuits(transformers.T5Model(transformers.T5Config(**T5)))
    qk = {part.name for part in found.qk}
    assert "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight" in qk
    assert "decoder.block.0.layer.1.EncDecAttention.k.weight" in qk
    assert "decoder.block.0.layer.1.EncDecAttention.o.weight" in {part.name for part in found.ov}
    assert "shared.weight" in found.rest


def test_a_split_model_is_saved_as_others_save_theirs(tmp_path: Path) -> None:
    model = made("gpt2")
    groups = circuit_groups(model, 0.1, r=20.0)
    with torch.no_grad():
        groups[0]["params"][0].mul_(2)
    model.save_pretrained(tmp_path)  # pyright: ignore[reportCallIssue]
    fresh = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.equal(read(fresh)[1], read(model)[1])
    assert "h.0.attn.c_attn.weight" in dict(fresh.named_parameters())


def test_an_order_of_fused_heads_that_is_not_known_is_not_guessed() -> None:
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 4, "vocab_size": 11, "n_positions": 8, "rotary_dim": 4}
    model = transformers.CodeGenModel(transformers.CodeGenConfig(**shape, bos_token_id=None, eos_token_id=None))
    with pytest.raises(
        ValueError, match=r"no circuits are known in CodeGenModel: .*h\.0\.attn\.qkv_proj\.weight \[48, 16\]"
    ):
        find_circuits(model)
