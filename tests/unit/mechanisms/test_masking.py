"""Bidirectional and cross attention, against PyTorch's, and where they are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.mechanisms import mechanism, mechanisms
from qkflow.models import Decoder, DecoderConfig
from qkflow.ops.attention import use_backend

WIDTH, HEADS = 16, 4
LAYOUT = Layout.padded([2, 5], 5, side="left")
DELTAS = ("deltanet", "gated-deltanet", "qdelta", "comba", "kda", "eda")
GROUPS = ("kuramoto", "group")


def make(spec: str) -> Any:
    return mechanism(spec)(WIDTH, HEADS, layer=1, layers=2).double()


def stream(b: int, t: int) -> Tensor:
    return torch.randn(b, t, WIDTH, dtype=torch.float64)


def close(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual, expected, rtol=0, atol=1e-12)


def torch_attention(layer: Any) -> nn.MultiheadAttention:
    """PyTorch's attention with the weights of `layer`."""
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
    projections = layer.query, layer.key, layer.value
    with torch.no_grad():
        for projection in (*projections, layer.output):
            projection.bias.normal_()
        attention.in_proj_weight.copy_(torch.cat([projection.weight for projection in projections]))
        attention.in_proj_bias.copy_(torch.cat([projection.bias for projection in projections]))
        attention.out_proj.load_state_dict(layer.output.state_dict())
    return attention


@pytest.mark.parametrize("is_cross", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("layout", [None, LAYOUT])
def test_standard_attention_equals_multihead_attention(is_cross: bool, backend: str, layout: Layout | None) -> None:
    layer = make("standard:causal=False,rotary_base=None,bias=True")
    expected_layer = torch_attention(layer)
    x, memory = stream(2, 3 if is_cross else 5).requires_grad_(), stream(2, 5).requires_grad_()
    keys, ignore = memory if is_cross else x, None if layout is None else ~layout.valid
    expected, expected_map = expected_layer(x, keys, keys, key_padding_mask=ignore, average_attn_weights=False)
    arguments: Any = {"memory": memory, "memory_layout": layout} if is_cross else {"layout": layout}
    with use_backend(backend):
        y, _ = layer(x, **arguments)
    is_token = torch.ones(2, x.shape[1], dtype=torch.bool) if is_cross or layout is None else layout.valid
    close(y[is_token], expected[is_token])
    map = layer.weights(x, **arguments)
    if not is_cross or layout is None:
        close(map.transpose(1, 2)[is_token], expected_map.transpose(1, 2)[is_token])
    leaves, cotangent = (x, memory) if is_cross else (x,), torch.randn_like(y) * is_token[..., None]
    gradients = (torch.autograd.grad(z, leaves, cotangent) for z in (y, expected))
    for pair in zip(*gradients, strict=True):
        close(*pair)


@pytest.mark.parametrize("spec", ["standard:key_heads=2,qk_norm=True", "differential", "nonlinear-query"])
def test_cross_attention_is_its_map_times_the_values_of_the_memory(spec: str) -> None:
    """Padding of either side, whatever its content, changes nothing; rows of the memory belong to sequences."""
    layer, x, memory = make(spec), stream(2, 3), stream(2, 5)
    z = torch.einsum("bhts,bshv->bthv", layer.weights(x, memory=memory), layer.values(memory))
    y, state = layer(x, memory=memory)
    close(y, layer.read(z, x))
    assert state.length.tolist() == [0, 0]

    padded = torch.cat([memory.new_full((2, 2, WIDTH), torch.nan), memory], 1)
    packed, rows = x.flatten(0, 1)[None], Layout.packed([0, 3, 6])
    arguments: Any = {"memory": padded, "memory_layout": Layout.padded([5, 5], 7, side="left"), "layout": rows}
    close(layer(packed, **arguments)[0][0], y.flatten(0, 1))
    map = layer.weights(packed, **arguments)
    close(map[0].unflatten(1, (2, 3)).transpose(0, 1)[..., :5], layer.weights(x, memory=memory))


@pytest.mark.parametrize("spec", ["standard:bias=True", "differential:bias=True"])
def test_of_an_empty_memory_there_is_nothing_but_the_bias_of_the_output(spec: str) -> None:
    layer, x, memory = make(spec), stream(2, 3), stream(2, 4)
    torch.nn.init.normal_(layer.value.bias)
    arguments: Any = {"memory": memory, "memory_layout": Layout.padded([0, 4], 4)}
    y = layer(x, **arguments)[0]
    assert torch.equal(y[0], layer.output.bias.expand(3, -1))
    assert not layer.weights(x, **arguments)[0].any()
    close(y[1], layer(x[1:], memory=memory[1:])[0][0])


def test_every_token_sees_the_whole_memory() -> None:
    layer, x, memory = make("standard"), stream(1, 2), stream(1, 4)
    permuted = layer(x.flip(1), memory=memory.flip(1))[0]
    close(permuted.flip(1), layer(x, memory=memory)[0])


@pytest.mark.parametrize("spec", [f"{name}:causal=False" for name in GROUPS])
@pytest.mark.parametrize("layout", [None, Layout.packed([0, 1, 2]), Layout.padded([1, 0], 1)])
def test_a_lone_token_does_not_move(spec: str, layout: Layout | None) -> None:
    layer = make(spec)
    x = (stream(1, 1) if layout is None else stream(*layout.valid.shape)).requires_grad_()
    y, _ = layer(x, layout=layout)
    assert not y.any()
    assert not layer.weights(x, layout=layout).any()
    gradients = torch.autograd.grad(y.sum(), [x, *layer.parameters()], materialize_grads=True)
    assert not any(gradient.any() for gradient in gradients)


def test_phases_move_towards_all_others() -> None:
    """The map of a bidirectional torus has a zero diagonal and rows that sum to one."""
    map = make("kuramoto:causal=False").weights(stream(2, 5))
    close(map.sum(-1), torch.ones_like(map[..., 0]))
    assert not map.diagonal(dim1=-2, dim2=-1).any()
    assert (map + torch.eye(5) > 0).all()


@pytest.mark.parametrize("spec", [f"{name}:causal=False" for name in ("standard", "differential", "coupled", *GROUPS)])
def test_a_bidirectional_layer_takes_no_state(spec: str) -> None:
    layer, x = make(spec), stream(1, 3)
    _, state = layer(x)
    with pytest.raises(UsageError, match="earlier tokens would see the new ones"):
        layer(x, state)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        *((f"{name}:causal=False", "writes its memory token by token") for name in DELTAS),
        *((f"{name}:causal=False,frustrated=True", "the value of the next token") for name in GROUPS),
        ("kuramoto:causal=False,window=3", "combined with window, which looks back in time"),
        ("standard:causal=False,window=3,conv=2", "combined with window, conv, which look back in time"),
        ("coupled:causal=False,key_shift=True", "combined with key_shift, which looks back in time"),
        ("standard:head_width=0", "head_width must be at least 1, got 0"),
        ("standard:dropout=1", "dropout must be at least 0 and below 1, got 1"),
    ],
)
def test_an_option_is_refused_with_the_reason(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        mechanism(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("coupled", "across two sequences there are no pairs"),
        ("differential+affine", "across two sequences there are no pairs"),
        *((name, "reads and writes the tokens of one sequence in turn") for name in DELTAS),
        *((name, "synchronize with each other in one stream") for name in GROUPS),
        ("standard:window=3", "a memory cannot be combined with window, which looks back in time"),
    ],
)
def test_a_memory_is_refused_with_the_reason(spec: str, message: str) -> None:
    layer, x = make(spec), stream(1, 2)
    with pytest.raises(UsageError, match=message):
        layer(x, memory=x, memory_layout=Layout.padded([1], 2))


def test_every_mechanism_is_tested_for_a_memory() -> None:
    assert {*DELTAS, *GROUPS, "standard", "differential", "coupled", "nonlinear-query"} == {*mechanisms()}


def test_a_memory_must_fit() -> None:
    layer, x = make("standard"), stream(2, 3)
    _, state = layer(x)
    with pytest.raises(UsageError, match="nothing to continue"):
        layer(x, state, memory=x)
    with pytest.raises(UsageError, match="the batch has 2 sequences, the memory 1"):
        layer(x, memory=x[:1])
    with pytest.raises(UsageError, match="a memory_layout without a memory"):
        layer(x, memory_layout=LAYOUT)


def test_a_decoder_is_causal() -> None:
    with pytest.raises(UsageError, match="use causal=True"):
        Decoder(DecoderConfig(width=16, layers=1, heads=4, hidden=16, mechanism="standard:causal=False"))


@pytest.mark.parametrize("spec", ["standard", "differential", "coupled"])
@torch.no_grad()
def test_dropout_keeps_the_mean_of_the_attended_values(spec: str) -> None:
    """In training mode only; the same seed drops the same weights."""
    layer = mechanism(f"{spec}:dropout=0.25")(8, 2, layer=0, layers=1)
    layer.read = lambda z, x: z.flatten(2)
    x = torch.randn(1, 4, 8)
    expected = layer.eval()(x)[0]
    layer.config, config = replace(layer.config, dropout=0.0), layer.config
    assert torch.equal(layer(x)[0], expected)
    layer.config = config
    rows = layer.train()(x.expand(20000, -1, -1))[0]
    assert rows.std(0).max() > 0.1
    assert_close(rows.mean(0), expected[0], rtol=0, atol=6 * float(rows.std(0).max()) / 20000**0.5)
    outputs = []
    for _ in range(2):
        torch.manual_seed(1)
        outputs.append(layer(x)[0])
    assert torch.equal(*outputs)


def test_head_width_is_independent_of_the_width() -> None:
    layer = make("standard:head_width=6,key_heads=2")
    assert [*layer.query.weight.shape, *layer.value.weight.shape, *layer.output.weight.shape] == [
        24,
        16,
        12,
        16,
        16,
        24,
    ]
    assert mechanism("standard:head_width=6")(20, 3, layer=0, layers=1)(torch.randn(1, 2, 20))[0].shape == (1, 2, 20)
