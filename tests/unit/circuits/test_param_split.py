"""A split fused matrix computes, saves, loads and copies like the whole one."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from qkflow.circuits import circuit_groups, split_fused
from qkflow.errors import UsageError


def attention(**options: object) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, batch_first=True, **options)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    return layer


def inputs() -> Tensor:
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


def run(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x, x, x)[0]


def test_split_outputs_and_gradients_are_bit_identical() -> None:
    whole, split = attention(), attention()
    split_fused(split)
    x = inputs()
    y, z = run(whole, x), run(split, x)
    assert torch.equal(y, z)
    y.square().sum().backward()
    z.square().sum().backward()
    pieces = [split.get_parameter(f"in_proj_weight_{name}").grad for name in ("query", "key", "value")]
    assert whole.in_proj_weight.grad is not None
    assert torch.equal(whole.in_proj_weight.grad, torch.cat([grad for grad in pieces if grad is not None]))


def test_state_dict_is_unchanged_and_loads_both_ways() -> None:
    whole, split = attention(), attention(add_bias_kv=False)
    split_fused(split)
    with torch.no_grad():
        split.get_parameter("in_proj_weight_key").mul_(2)
    assert list(split.state_dict()) == list(whole.state_dict())
    whole.load_state_dict(split.state_dict())
    assert torch.equal(run(whole, inputs()), run(split, inputs()))
    other = attention()
    split.load_state_dict(other.state_dict())
    assert torch.equal(run(other, inputs()), run(split, inputs()))
    split.load_state_dict(whole.state_dict(), assign=True)
    assert torch.equal(run(whole, inputs()), run(split, inputs()))


def test_state_dict_errors_use_the_original_names() -> None:
    split = attention()
    split_fused(split)
    state = attention().state_dict()
    bias = state.pop("in_proj_bias")
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "in_proj_bias"\.'):
        split.load_state_dict(state)
    with pytest.raises(RuntimeError, match="size mismatch for in_proj_bias"):
        split.load_state_dict({**state, "in_proj_bias": bias[:5]})
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"in_proj_more"'):
        split.load_state_dict({**state, "in_proj_bias": bias, "in_proj_more": bias})


def test_copies_and_pickles_are_independent() -> None:
    split = attention()
    split_fused(split)
    saved = io.BytesIO()
    torch.save(split, saved)
    saved.seek(0)
    for copied in (copy.deepcopy(split), torch.load(saved, weights_only=False)):
        assert torch.equal(run(copied, inputs()), run(split, inputs()))
        with torch.no_grad():
            copied.get_parameter("in_proj_weight_query").zero_()
        assert not torch.equal(run(copied, inputs()), run(split, inputs()))
        assert isinstance(copied, nn.MultiheadAttention)


def test_splitting_twice_has_no_further_effect() -> None:
    split = attention()
    split_fused(split)
    before = dict(split.named_parameters())
    split_fused(split)
    assert list(before) == [name for name, _ in split.named_parameters()]
    assert all(before[name] is parameter for name, parameter in split.named_parameters())


def test_torch_fast_path_reads_current_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    fast_path, calls = torch._transformer_encoder_layer_fwd, []
    monkeypatch.setattr(
        torch, "_transformer_encoder_layer_fwd", lambda *args: calls.append(len(args)) or fast_path(*args)
    )

    def layer() -> nn.TransformerEncoderLayer:
        torch.manual_seed(0)
        return nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.0, batch_first=True)

    whole, split = layer().eval(), layer().eval()
    optimizer = torch.optim.SGD(circuit_groups(split, 0.5, r=2.0))
    plain = torch.optim.SGD(whole.parameters(), lr=0.5)
    x = inputs()
    with torch.no_grad():
        assert torch.equal(whole(x), split(x))
    for model, learner in ((whole, plain), (split, optimizer)):
        model(x).square().sum().backward()
        learner.step()
    fresh = layer().eval()
    fresh.load_state_dict(split.state_dict())
    calls.clear()
    with torch.no_grad():
        assert torch.equal(fresh(x), split(x))
        assert not torch.equal(whole(x), split(x))
    assert len(calls) == 4


def test_frozen_and_single_circuit_parameters_stay_whole() -> None:
    layer = attention()
    layer.in_proj_weight.requires_grad_(False)
    split_fused(layer)
    assert "in_proj_weight" in dict(layer.named_parameters())
    assert "in_proj_bias_key" in dict(layer.named_parameters())
    linear = nn.Linear(4, 6)
    split_fused(linear, qk=["weight[0:0:2]", "weight[0:2:6]"])
    assert [name for name, _ in linear.named_parameters()] == ["weight", "bias"]


def test_shared_fused_matrix_stays_shared() -> None:
    model = nn.ModuleList([attention(), attention()])
    model[1].in_proj_weight = model[0].in_proj_weight
    keys = list(model.state_dict())
    split_fused(model)
    assert model[0].in_proj_weight_key is model[1].in_proj_weight_key
    assert list(model.state_dict()) == keys
    grouped = [id(parameter) for group in circuit_groups(model, 0.1, r=2.0) for parameter in group["params"]]
    assert sorted(grouped) == sorted(map(id, model.parameters()))


def test_module_with_two_names_is_split_once() -> None:
    layer = attention(bias=False)
    model = nn.ModuleDict({"first": layer, "second": layer})
    for patterns in ([], ["*.in_proj_weight[0:0:16]"], ["second.in_proj_weight[0:0:16]"]):
        groups = circuit_groups(model, 0.1, r=2.0, qk=patterns)
        assert [(group["circuit"], len(group["params"])) for group in groups] == [("qk", 2), ("ov", 2)]


def test_interleaved_pieces_keep_their_order() -> None:
    layer = nn.Linear(3, 12)
    weight = layer.weight.detach().clone()
    split_fused(layer, qk=[f"weight[0:{4 * head}:{4 * head + 2}]" for head in range(3)], ov=["weight[0:3:4]"])
    assert torch.equal(layer.weight, weight)


def test_gradients_are_split_too() -> None:
    layer = attention(bias=False)
    run(layer, inputs()).sum().backward()
    grad = layer.in_proj_weight.grad
    split_fused(layer)
    assert grad is not None
    assert torch.equal(grad[8:16], layer.get_parameter("in_proj_weight_key").grad)  # pyright: ignore[reportArgumentType]


class SpecialParameter(nn.Parameter):
    """A parameter subclass of another library."""


def test_parameter_subclass_raises() -> None:
    layer = attention(bias=False)
    layer.in_proj_weight = SpecialParameter(layer.in_proj_weight.detach())
    with pytest.raises(UsageError, match="in_proj_weight is a SpecialParameter and cannot be split"):
        split_fused(layer)


@pytest.mark.compiled
def test_split_layer_compiles_to_one_graph() -> None:
    layer = attention()
    split_fused(layer)
    x = inputs()
    compiled = torch.compile(lambda x: layer(x, x, x, need_weights=False)[0], backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), run(layer, x))
    with torch.no_grad():
        layer.get_parameter("in_proj_weight_value").mul_(-1)
    torch.testing.assert_close(compiled(x), run(layer, x))
