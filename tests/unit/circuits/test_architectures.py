"""Hugging Face models: only QK parameters change the attention maps, and splitting changes nothing."""

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


def build(kind: str, **options: Any) -> nn.Module:
    model, config, shape = KINDS[kind]
    torch.manual_seed(0)
    network = getattr(transformers, model)(getattr(transformers, config)(**shape, **NO_TOKENS, **options)).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return network


@torch.no_grad()
def run(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the hidden states and the attention map."""
    output = model(input_ids=torch.arange(3, 8)[None], output_attentions=True)
    return output.last_hidden_state, output.attentions[0]


@pytest.mark.parametrize("kind", KINDS)
def test_only_qk_parameters_change_the_attention_map(kind: str) -> None:
    model = build(kind)
    hidden, attention = run(model)
    keys = list(model.state_dict())
    groups = circuit_groups(model, 0.1, r=20.0)
    assert list(model.state_dict()) == keys
    assert all(torch.equal(new, old) for new, old in zip(run(model), (hidden, attention), strict=True))
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(map(id, model.parameters()))
    members = {group["circuit"]: group["params"] for group in groups}
    key_biases = {id(p) for name, p in model.named_parameters() if name.endswith(("key.bias", "bias_key"))}
    for circuit in ("ov", "qk"):
        for parameter in members[circuit]:
            original = parameter.detach().clone()
            parameter.data.add_(torch.randn_like(parameter))
            new_hidden, new_attention = run(model)
            if id(parameter) not in key_biases:  # softmax is invariant to them
                assert not torch.equal(new_hidden, hidden)
                assert torch.equal(new_attention, attention) == (circuit == "ov")
            parameter.data.copy_(original)


def test_gpt2_cross_attention_has_separate_queries() -> None:
    circuits = find_circuits(build("gpt2", add_cross_attention=True))
    slices = {(param.name, param.matrix) for param in circuits.qk if param.name.startswith("h.0.crossattention")}
    weights = {(name.removeprefix("h.0.crossattention."), matrix) for name, matrix in slices if "weight" in name}
    assert weights == {("q_attn.weight", ""), ("c_attn.weight", "key")}


def test_t5_relative_bias_and_cross_attention_are_qk() -> None:
    circuits = find_circuits(transformers.T5Model(transformers.T5Config(**T5)))
    qk = {param.name for param in circuits.qk}
    assert "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight" in qk
    assert "decoder.block.0.layer.1.EncDecAttention.k.weight" in qk
    assert "decoder.block.0.layer.1.EncDecAttention.o.weight" in {param.name for param in circuits.ov}
    assert "shared.weight" in circuits.rest


def test_split_model_saves_and_loads_with_transformers(tmp_path: Path) -> None:
    model = build("gpt2")
    groups = circuit_groups(model, 0.1, r=20.0)
    with torch.no_grad():
        groups[0]["params"][0].mul_(2)
    model.save_pretrained(tmp_path)  # pyright: ignore[reportCallIssue]
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.equal(run(loaded)[1], run(model)[1])
    assert "h.0.attn.c_attn.weight" in dict(loaded.named_parameters())


def test_unknown_fused_layout_raises() -> None:
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 4, "vocab_size": 11, "n_positions": 8, "rotary_dim": 4}
    model = transformers.CodeGenModel(transformers.CodeGenConfig(**shape, bos_token_id=None, eos_token_id=None))
    with pytest.raises(
        ValueError, match=r"architecture of CodeGenModel is unknown: .*h\.\*\.attn\.qkv_proj\.weight \[48, 16\]"
    ):
        find_circuits(model)
