"""Circuits are found where they are known, and named by hand where they are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from qkflow.circuits import circuit_groups, find_circuits, split_fused
from qkflow.circuits.patterns import folded
from qkflow.errors import UsageError
from qkflow.mechanisms import mechanisms
from qkflow.models import Decoder, DecoderConfig

COUPLED = ("differential+affine", "standard+hamiltonian:sharing=layers", "qdelta+affine:sharing=layers")


class Own(nn.Module):
    """Layers whose fused matrix is called as no one else's."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"mix": nn.Linear(4, 12), "back": nn.Linear(4, 4)}) for _ in range(layers)
        )


def names(model: nn.Module, circuit: str, **by_hand: Any) -> set[str]:
    return {part.name for part in getattr(find_circuits(model, **by_hand), circuit)}


@pytest.mark.parametrize("spec", [*sorted(mechanisms()), *COUPLED])
def test_every_mechanisms_parameters_are_in_one_group_each_as_its_circuits_say(spec: str) -> None:
    model = Decoder(DecoderConfig(width=24, layers=2, heads=2, hidden=16, vocabulary=11, mechanism=spec))
    groups = circuit_groups(model, 0.1, r=3.0)
    listed = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(listed) == sorted(map(id, model.parameters()))
    for circuit in ("qk", "ov"):
        said = {
            id(block.mechanism.get_parameter(name))
            for block in model.blocks
            for name in getattr(block.mechanism.circuits(), circuit)
        }
        group = next(group for group in groups if group["circuit"] == circuit)
        assert {id(parameter) for parameter in group["params"]} == said


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
def test_torchs_attention_is_known_fused_or_not(options: dict[str, Any], qk: set[str], ov: set[str]) -> None:
    layer = nn.MultiheadAttention(8, 2, **options)
    assert names(layer, "qk") == qk
    assert names(layer, "ov") == ov
    assert find_circuits(layer).rest == ()


def test_a_whole_transformer_of_torchs_is_known() -> None:
    model = nn.Transformer(8, 2, 1, 1, dim_feedforward=16, dropout=0.0, batch_first=True)
    found = find_circuits(model)
    assert {part.name.rsplit(".", 1)[0] for part in found.qk} == {
        "encoder.layers.0.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.multihead_attn",
    }
    assert all("linear" in name or "norm" in name for name in found.rest)


def test_a_model_without_known_circuits_is_told_its_names_and_how_to_name_them_by_hand() -> None:
    with pytest.raises(UsageError, match="no circuits are known in Own: name their parameters by hand") as caught:
        circuit_groups(Own(12), 0.1)
    assert "layers.{0..11}.mix.weight [12, 4], layers.{0..11}.mix.bias [12], layers.{0..11}.back.weight" in str(
        caught.value
    )
    assert "qk=['*.query.weight'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_by_hand_patterns_and_slices_name_the_circuits_of_every_layer() -> None:
    model = Own()
    by_hand: dict[str, Any] = {
        "qk": ["*.mix.*[0:0:8]"],
        "ov": ["*.mix.weight[0:8:12]", "*.mix.bias[0:8:12]", "*.back.*"],
    }
    for _ in range(2):  # a split model answers to the same names
        groups = circuit_groups(model, 0.1, r=4.0, **by_hand)
        assert [(group["circuit"], len(group["params"])) for group in groups] == [("qk", 4), ("ov", 8)]
        assert {parameter.shape[0] for parameter in groups[0]["params"]} == {8}
    assert [len(group["params"]) for group in circuit_groups(model, 0.1)] == [4, 4, 4]  # and remembers its own slices


def test_what_slices_leave_of_a_parameter_is_of_the_rest() -> None:
    model = Own(1)
    groups = circuit_groups(model, 0.1, qk=["*.mix.weight[0:2:5]"])
    assert [(group["circuit"], sorted(len(p) for p in group["params"])) for group in groups] == [
        ("qk", [3]),
        ("rest", [4, 4, 9, 12]),
    ]


def test_what_is_named_by_hand_is_the_whole_circuit() -> None:
    model = Decoder(DecoderConfig(width=8, layers=1, heads=2, hidden=8, vocabulary=5, mechanism="standard+affine"))
    assert len(names(model, "qk")) > 2
    by_hand = ["*.query.weight", "*.key.weight"]
    assert names(model, "qk", qk=by_hand) == {"blocks.0.mechanism.query.weight", "blocks.0.mechanism.key.weight"}
    assert names(model, "ov", qk=by_hand) == names(model, "ov")
    assert names(model, "ov", qk=["*.value.weight"]) == {"blocks.0.mechanism.output.weight"}


@pytest.mark.parametrize(
    ("by_hand", "says"),
    [
        ({"qk": ["mixx.*"]}, r"'mixx\.\*' names no parameter: .* There are layers\.0\.mix\.weight \[12, 4\]"),
        ({"qk": ["*.mix.weight[0:64]"]}, r"names no parameter: .* name\[0:0:64\] \(dimension:start:stop\)"),
        ({"qk": ["*.mix.weight[0:8:13]"]}, r"mix\.weight\[0:8:13\] is no slice of a parameter of shape \[12, 4\]"),
        ({"qk": ["*.mix.bias[1:0:2]"]}, r"mix\.bias\[1:0:2\] is no slice"),
        ({"qk": ["*.mix.weight[0:4:4]"]}, "start below stop"),
        ({"qk": ["*.mix.weight"], "ov": ["*.weight"]}, r"layers\.0\.mix\.weight would be in both circuits"),
        ({"qk": ["*.mix.weight[0:0:8]"], "ov": ["*.mix.weight[0:7:12]"]}, "would be in both circuits"),
        ({"qk": ["*.mix.weight[0:0:8]", "*.mix.weight[1:0:2]"]}, r"slices of layers\.0\.mix\.weight overlap"),
    ],
)
def test_names_that_cannot_be_are_refused_in_one_line(by_hand: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        find_circuits(Own(1), **by_hand)
    assert "\n" not in str(caught.value)


def test_other_slices_than_those_a_model_was_split_at_are_refused() -> None:
    model = Own(1)
    split_fused(model, qk=["*.mix.weight[0:0:8]"])
    with pytest.raises(
        UsageError, match=r"layers\.0\.mix\.weight is split along dimension 0 at other rows than \[0:0:6\]"
    ):
        find_circuits(model, qk=["*.mix.weight[0:0:6]"])


def test_a_matrix_that_looks_and_passes_on_is_refused() -> None:
    layer = nn.MultiheadAttention(4, 1, bias=False, kdim=5, vdim=5)
    layer.v_proj_weight = layer.k_proj_weight
    with pytest.raises(UsageError, match="k_proj_weight would be in both circuits"):
        find_circuits(layer)
    assert names(layer, "ov", qk=["q_proj_weight", "k_proj_weight"]) == {"out_proj.weight"}


def test_numbers_in_names_fold_only_where_they_count() -> None:
    shapes = {f"a.{i}.b.{j}.w2": torch.Size([1]) for i in (0, 2, 5) for j in (3, 4)}
    assert folded({**shapes, "a.9.c": torch.Size([7, 1])}) == "a.{0,2,5}.b.{3..4}.w2 [1], a.9.c [7, 1]"
