"""Circuits of known architectures are found; others are named with patterns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from qkflow.circuits import circuit_groups, find_circuits, split_fused
from qkflow.circuits.find import summarize_names
from qkflow.errors import UsageError
from qkflow.mechanisms import mechanisms
from qkflow.models import Decoder, DecoderConfig

COUPLED = ("differential+affine", "standard+hamiltonian:sharing=layers", "qdelta+affine:sharing=layers")


class UnknownModel(nn.Module):
    """Layers whose fused matrix has a name that no known architecture uses."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"mix": nn.Linear(4, 12), "back": nn.Linear(4, 4)}) for _ in range(layers)
        )


def names(model: nn.Module, circuit: str, **patterns: Any) -> set[str]:
    return {param.name for param in getattr(find_circuits(model, **patterns), circuit)}


@pytest.mark.parametrize("spec", [*sorted(mechanisms()), *COUPLED])
def test_mechanism_parameters_are_grouped_as_declared(spec: str) -> None:
    model = Decoder(DecoderConfig(width=24, layers=2, heads=2, hidden=16, vocabulary=11, mechanism=spec))
    groups = circuit_groups(model, 0.1, r=3.0)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(map(id, model.parameters()))
    for circuit in ("qk", "ov"):
        declared = {
            id(block.mechanism.get_parameter(name))
            for block in model.blocks
            for name in getattr(block.mechanism.circuits(), circuit)
        }
        group = next(group for group in groups if group["circuit"] == circuit)
        assert {id(parameter) for parameter in group["params"]} == declared


@pytest.mark.parametrize(
    ("options", "qk", "ov"),
    [
        (
            {},
            {"in_proj_weight", "in_proj_bias"},
            {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"},
        ),
        ({"bias": False}, {"in_proj_weight"}, {"in_proj_weight", "out_proj.weight"}),
        (
            {"kdim": 6, "vdim": 10, "bias": False, "add_bias_kv": True},
            {"q_proj_weight", "k_proj_weight", "bias_k"},
            {"v_proj_weight", "bias_v", "out_proj.weight"},
        ),
    ],
)
def test_multihead_attention_fused_and_separate(options: dict[str, Any], qk: set[str], ov: set[str]) -> None:
    layer = nn.MultiheadAttention(8, 2, **options)
    assert names(layer, "qk") == qk
    assert names(layer, "ov") == ov
    assert find_circuits(layer).rest == ()


def test_torch_transformer() -> None:
    model = nn.Transformer(8, 2, 1, 1, dim_feedforward=16, dropout=0.0, batch_first=True)
    circuits = find_circuits(model)
    assert {param.name.rsplit(".", 1)[0] for param in circuits.qk} == {
        "encoder.layers.0.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.multihead_attn",
    }
    assert all("linear" in name or "norm" in name for name in circuits.rest)


def test_unknown_architecture_error_lists_parameters_and_patterns() -> None:
    with pytest.raises(UsageError, match="architecture of UnknownModel is unknown: name the parameters") as caught:
        circuit_groups(UnknownModel(12), 0.1)
    assert "layers.*.mix.weight [12, 4], layers.*.mix.bias [12], layers.*.back.weight" in str(caught.value)
    assert "qk=['*.query.weight'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_patterns_and_slices_apply_to_every_layer() -> None:
    model = UnknownModel()
    patterns: dict[str, Any] = {
        "qk": ["*.mix.*[0:0:8]"],
        "ov": ["*.mix.weight[0:8:12]", "*.mix.bias[0:8:12]", "*.back.*"],
    }
    for _ in range(2):  # the same patterns apply to a split model
        groups = circuit_groups(model, 0.1, r=4.0, **patterns)
        assert [(group["circuit"], len(group["params"])) for group in groups] == [("qk", 4), ("ov", 8)]
        assert {parameter.shape[0] for parameter in groups[0]["params"]} == {8}
    assert [len(group["params"]) for group in circuit_groups(model, 0.1)] == [4, 4, 4]  # no patterns needed


def test_remaining_rows_of_a_sliced_parameter_are_rest() -> None:
    model = UnknownModel(1)
    groups = circuit_groups(model, 0.1, qk=["*.mix.weight[0:2:5]"])
    assert [(group["circuit"], sorted(len(p) for p in group["params"])) for group in groups] == [
        ("qk", [3]),
        ("rest", [4, 4, 9, 12]),
    ]


def test_patterns_replace_the_known_circuit() -> None:
    model = Decoder(DecoderConfig(width=8, layers=1, heads=2, hidden=8, vocabulary=5, mechanism="standard+affine"))
    assert len(names(model, "qk")) > 2
    patterns = ["*.query.weight", "*.key.weight"]
    assert names(model, "qk", qk=patterns) == {"blocks.0.mechanism.query.weight", "blocks.0.mechanism.key.weight"}
    assert names(model, "ov", qk=patterns) == names(model, "ov")
    assert names(model, "ov", qk=["*.value.weight"]) == {"blocks.0.mechanism.output.weight"}


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"qk": ["mixx.*"]}, r"'mixx\.\*' matches no parameter: .* Parameters: layers\.\*\.mix\.weight \[12, 4\]"),
        ({"qk": ["*.mix.weight[0:64]"]}, r"matches no parameter: .* name\[0:0:64\] \(dimension:start:stop\)"),
        ({"qk": ["*.mix.weight[0:8:13]"]}, r"mix\.weight\[0:8:13\] is not a slice of a parameter of shape \[12, 4\]"),
        ({"qk": ["*.mix.bias[1:0:2]"]}, r"mix\.bias\[1:0:2\] is not a slice"),
        ({"qk": ["*.mix.weight[0:4:4]"]}, "start < stop"),
        ({"qk": ["*.mix.weight"], "ov": ["*.weight"]}, r"layers\.0\.mix\.weight is in both circuits"),
        ({"qk": ["*.mix.weight[0:0:8]"], "ov": ["*.mix.weight[0:7:12]"]}, "is in both circuits"),
        ({"qk": ["*.mix.weight[0:0:8]", "*.mix.weight[1:0:2]"]}, r"slices of layers\.0\.mix\.weight overlap"),
    ],
)
def test_invalid_patterns_raise_one_line_errors(patterns: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        find_circuits(UnknownModel(1), **patterns)
    assert "\n" not in str(caught.value)


def test_slices_that_differ_from_the_existing_split_raise() -> None:
    model = UnknownModel(1)
    split_fused(model, qk=["*.mix.weight[0:0:8]"])
    with pytest.raises(
        UsageError, match=r"layers\.0\.mix\.weight is already split along dimension 0 at rows other than \[0:0:6\]"
    ):
        find_circuits(model, qk=["*.mix.weight[0:0:6]"])


def test_parameter_in_both_circuits_raises() -> None:
    layer = nn.MultiheadAttention(4, 1, bias=False, kdim=5, vdim=5)
    layer.v_proj_weight = layer.k_proj_weight
    with pytest.raises(UsageError, match="k_proj_weight is in both circuits"):
        find_circuits(layer)
    assert names(layer, "ov", qk=["q_proj_weight", "k_proj_weight"]) == {"out_proj.weight"}


def test_summarize_names_merges_layer_numbers() -> None:
    shapes = {f"a.{i}.b.{j}.w2": torch.Size([1]) for i in (0, 2, 5) for j in (3, 4)}
    assert summarize_names({**shapes, "a.9.c": torch.Size([7, 1])}) == "a.*.b.*.w2 [1], a.*.c [7, 1]"
