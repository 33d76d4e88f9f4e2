"""Delta-rule mechanisms: the published equations, differences between them, and errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.mechanisms import DeltaMechanism, DeltaNet, GatedDeltaNet, QDelta, mechanism
from qkflow.mechanisms.delta_family import Comba, EraseThenDelta, KDADecay
from qkflow.mechanisms.delta_rule import Decay
from qkflow.ops.delta_rule import delta_rule
from qkflow.probes import diagnostics
from qkflow.state import RecurrentState

NAMES = ["deltanet", "gated-deltanet", "qdelta", "kda", "eda", "comba"]
WIDTH, HEADS = 24, 2


def make(spec: str, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """Return a layer with perturbed parameters."""
    torch.manual_seed(seed)
    layer = mechanism(spec)(WIDTH, HEADS, layer=1, layers=2).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def stream(b: int = 2, t: int = 7, *, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(b, t, WIDTH, dtype=dtype)


def close(actual: Any, expected: Any, within: float = 1e-11) -> None:
    assert_close(actual, expected, rtol=0, atol=within)


def as_published(layer: Any, x: Tensor) -> Tensor:
    """The layer written out from the paper, token by token; it uses only the weights of the module."""
    b, t, _ = x.shape
    h = layer.beta.out_features

    def stream_of(linear: Any, taps: Tensor | None) -> Tensor:
        y = F.linear(x, linear.weight)
        if taps is not None:
            behind = F.pad(y.transpose(1, 2), (taps.shape[1] - 1, 0))
            y = F.conv1d(behind, taps[:, None], groups=len(taps)).transpose(1, 2)
        return F.silu(y).reshape(b, t, h, -1)

    def unit(y: Tensor) -> Tensor:
        return y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    q, k = stream_of(layer.query, layer.query_conv), stream_of(layer.key, layer.key_conv)
    v = stream_of(layer.value, layer.value_conv)
    if layer.coupling is not None:
        q, k = layer.coupling(q, k)
    q, k = unit(q), unit(k)
    own = None if layer.own is None else unit(stream_of(layer.own, layer.own_conv))
    beta = torch.sigmoid(F.linear(x, layer.beta.weight))
    alpha, lam = torch.ones_like(k), torch.zeros_like(beta)
    if isinstance(layer.decay, KDADecay):
        rate = F.linear(F.linear(x, layer.decay.down.weight), layer.decay.up.weight) + layer.decay.dt_bias
        alpha = torch.exp(-layer.decay.A_log.exp()[:, None] * torch.log1p(rate.exp()).view(b, t, h, -1))
    elif layer.decay is not None:
        rate = F.linear(x, layer.decay.rate.weight) + layer.decay.dt_bias
        alpha = torch.exp(-layer.decay.A_log.exp() * torch.log1p(rate.exp()))[..., None].expand_as(k)
    if getattr(layer, "lam", None) is not None:
        lam = torch.sigmoid(F.linear(x, layer.lam.weight) - 0.9)
    elif getattr(layer.config, "lam", None) is not None:
        lam = torch.full_like(beta, layer.config.lam)
    x_erase, read = k + lam[..., None] * (q if own is None else own), q
    S, outputs = x.new_zeros(b, h, v.shape[-1], k.shape[-1]), []
    for i in range(t):
        ki, vi, bi = k[:, i], v[:, i], beta[:, i, :, None, None]
        S = S * alpha[:, i, :, None, :]
        if isinstance(layer, EraseThenDelta):
            assert own is not None
            gamma, e = torch.sigmoid(F.linear(x, layer.gamma.weight))[:, i, :, None, None], own[:, i]
            S = S @ (torch.eye(k.shape[-1], dtype=x.dtype) - gamma * e[..., :, None] * e[..., None, :])
            x_erase = k
        if isinstance(layer, Comba):
            x_erase = torch.sigmoid(layer.feedback)[:, None] * k
            read = q - layer.correction[:, None] * x_erase
        transition = torch.eye(k.shape[-1], dtype=x.dtype) - bi * x_erase[:, i, :, :, None] * ki[..., None, :]
        S = S @ transition + bi * vi[..., :, None] * ki[..., None, :]
        outputs.append((S @ read[:, i, :, :, None])[..., 0] / math.sqrt(k.shape[-1]))
    z = torch.stack(outputs, 1)
    z = layer.head_norm * z / (z.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    if layer.gate is not None:
        z = z * F.silu(F.linear(x, layer.gate.weight)).view_as(z)
    return F.linear(z.flatten(2), layer.output.weight)


@pytest.mark.parametrize(
    "spec",
    [
        *NAMES,
        "qdelta:lam=0.5,decay=False",
        "qdelta:erase=own",
        "qdelta+hamiltonian:erase=own,lam=1.0,conv=1",
        "kda+affine:value_expansion=1",
        "eda+euler:conv=2",
        "qdelta:conv=1,gate=False",
        "gated-deltanet:conv=3,value_expansion=1",
        "qdelta+hamiltonian:key_width=10",
        "qdelta:heads=1,key_width=130",  # values of width 260 are split by the operator
    ],
)
def test_values_and_gradients_match_the_published_equations(spec: str) -> None:
    layer, x = make(spec), stream().requires_grad_()
    actual, expected = layer(x)[0], as_published(layer, x)
    close(actual, expected)
    leaves, weight = [x, *layer.parameters()], torch.randn_like(expected)
    close(*(torch.autograd.grad(y, leaves, weight) for y in (actual, expected)), within=1e-10)


def test_qdelta_without_lambda_or_decay_equals_its_special_cases() -> None:
    x = stream()
    for spec, plain in (("qdelta:lam=0", "gated-deltanet"), ("qdelta:lam=0,decay=False", "deltanet")):
        other = make(plain)
        layer = make(spec, seed=1)
        layer.load_state_dict(other.state_dict())
        assert torch.equal(layer(x)[0], other(x)[0])
        assert layer.inputs(x).erase is None


def test_learned_lambda_differs_between_tokens() -> None:
    lam = make("qdelta").gates(stream())["lam"]
    assert lam.shape == (2, 7, HEADS)
    assert bool(((lam > 0) & (lam < 1)).all())
    assert lam.unique().numel() == lam.numel()
    assert make("qdelta:lam=0.25").gates(stream())["lam"].unique().tolist() == [0.25]
    centre = make("qdelta:lam_bias=0.5").gates(torch.zeros(1, 1, WIDTH, dtype=torch.float64))["lam"]
    close(centre, torch.full_like(centre, 0.5).sigmoid())


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_those_of_the_delta_rule(name: str) -> None:
    layer, x = make(name), stream()
    inputs = layer.inputs(x)
    assert (inputs.log_alpha is None, inputs.erase is None) == (name == "deltanet", name not in ("qdelta", "comba"))
    last = slice(layer.steps - 1, None, layer.steps)  # the step that writes
    for unit in (inputs.k, inputs.k[:, last]) if name == "comba" else (inputs.k, inputs.q[:, last]):
        assert 0.99 < float(unit.detach().norm(dim=-1).min()) <= float(unit.detach().norm(dim=-1).max()) < 1
    close(layer.read(delta_rule(*inputs)[0][:, last], x), layer(x)[0])
    close(layer.values(x), inputs.v[:, last], within=0)


# Shapes and initialization.


@pytest.mark.parametrize(
    ("width", "heads", "key_width"),
    [(1024, 6, 128), (2048, 6, 256), (128, 4, 24), (256, 4, 48), (32, 4, 8), (12, 12, 8)],
)
def test_default_key_width_is_three_quarters_of_the_width(width: int, heads: int, key_width: int) -> None:
    with torch.device("meta"):
        layer = QDelta(width, heads)
    assert (layer.key_width, layer.value_width, layer.heads) == (key_width, 2 * key_width, heads)
    assert layer.output.weight.shape == (width, heads * 2 * key_width)


def test_heads_and_widths_are_configurable() -> None:
    layer = make("gated-deltanet:heads=3,key_width=5,value_expansion=3")
    assert layer.weights(stream(1, 4)).shape == (1, 3, 4, 4)
    assert layer(stream(1, 4))[1].matrix.shape == (1, 3, 15, 5)


def test_decay_and_convolutions_are_initialised_as_published() -> None:
    torch.manual_seed(0)
    layer = QDelta(64, 32)
    assert layer.decay is not None
    assert layer.query_conv is not None
    A, dt = layer.decay.A_log.exp(), F.softplus(layer.decay.dt_bias)
    assert 0 < float(A.min().detach()) < 4 < 12 < float(A.max().detach()) <= 16
    assert 0.00099 < float(dt.min().detach()) < 0.004 < 0.03 < float(dt.max().detach()) < 0.101
    assert layer.query_conv.shape == (32 * 8, 4)
    assert 0.48 < float(layer.query_conv.abs().max().detach()) <= 0.5
    assert sum(p.numel() for p in layer.parameters()) == layer.cost(1).parameters


def test_the_decay_of_each_channel_is_initialised_as_published() -> None:
    torch.manual_seed(0)
    layer = make("kda:key_width=64")
    torch.manual_seed(0)
    decay = KDADecay(64, 32, 16)
    A, dt = decay.A_log.exp(), F.softplus(decay.dt_bias)
    assert 1 <= float(A.min().detach()) < 4 < 12 < float(A.max().detach()) <= 16
    assert 0.00099 < float(dt.min().detach()) < 0.002 < 0.08 < float(dt.max().detach()) < 0.101
    assert (decay.down.out_features, decay.A_log.shape, decay.dt_bias.shape) == (16, (32,), (32 * 16,))
    assert layer.inputs(stream()).log_alpha.shape == (2, 7, HEADS, 64)


def test_erase_then_delta_without_erasing_is_gated_deltanet() -> None:
    layer, other, x = make("eda"), make("gated-deltanet"), stream()
    shared = {name: x for name, x in layer.state_dict().items() if name in other.state_dict()}
    other.load_state_dict(shared)
    layer.gates = lambda x: {**other.gates(x), "gamma": torch.zeros_like(other.gates(x)["beta"])}
    close(layer(x)[0], other(x)[0])


def test_comba_starts_with_the_published_constants() -> None:
    layer = mechanism("comba:correction=0.02")(WIDTH, HEADS, layer=0, layers=1)
    assert layer.feedback.tolist() == [1.0] * HEADS
    assert layer.correction.tolist() == pytest.approx([0.02] * HEADS)
    assert mechanism("comba")(WIDTH, HEADS, layer=0, layers=1).correction.tolist() == [1.0] * HEADS


def test_extreme_decay_is_accurate() -> None:
    decay = Decay(1, 1).double()
    with torch.no_grad():
        decay.rate.weight.fill_(1)
        decay.dt_bias.zero_()
        decay.A_log.zero_()
    x = torch.tensor([-40.0, -1.0, 0.0, 21.0, 30.0], dtype=torch.float64).view(1, -1, 1).requires_grad_()
    actual = decay(x)
    assert_close(actual, -torch.log1p(x.exp()), rtol=1e-15, atol=0)
    assert_close(torch.autograd.grad(actual.sum(), x)[0], -x.sigmoid(), rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("qdelta:heads=0", "heads must be at least 1, got 0"),
        ("qdelta:key_width=0", "key_width must be at least 1, got 0"),
        ("deltanet:value_expansion=0", "value_expansion must be at least 1, got 0"),
        ("qdelta:conv=0", "conv must be from 1 .* to 64, got 0"),
        ("qdelta:conv=65", "to 64, got 65"),
        ("qdelta:key_width=257", "at most 256, got 257 for 2 heads at width 24: use more heads"),
        ("qdelta:lam=1.5", "lam must be from 0 to 1, or None to be learned, got 1.5"),
        ("qdelta:lam=0.5,lam_bias=0", "lam_bias applies to a learned lam only"),
        ("qdelta:lam_bias=1e999", "lam_bias must be a finite number"),
        ("qdelta:erase=value", "'erase' 'value' of 'qdelta': Known: own, query"),
        ("qdelta:erase=own,lam=0", "erase='own' has no effect with lam=0"),
        ("comba:correction=1e999", "correction must be a finite number"),
        ("gated-deltanet:lam=0.5", "lam"),
        ("deltanet:decay=True", "decay"),
    ],
)
def test_invalid_configs_raise_in_one_line(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        mechanism(spec)(WIDTH, HEADS, layer=0, layers=1)
    assert "\n" not in str(refused.value)


def test_too_wide_heads_raise() -> None:
    with torch.device("meta"), pytest.raises(UsageError, match="got 768 for 1 heads at width 1024"):
        GatedDeltaNet(1024, 1)
    with pytest.raises(UsageError, match="heads must be at least 1, got 0"):
        DeltaNet(8, 0)


# State.


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_state_size_is_constant(name: str, dtype: torch.dtype) -> None:
    layer = make(name, dtype=dtype)
    with torch.no_grad():
        _, short_state = layer(stream(1, 1, dtype=dtype))
        _, long_state = layer(stream(1, 30, dtype=dtype), short_state)
    assert short_state.nbytes == long_state.nbytes == layer.cost(31).state_bytes == layer.cost(1).state_bytes
    assert long_state.length.tolist() == [31]
    assert long_state.matrix.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert {tail.dtype for tail in long_state.conv_state} == {dtype}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("standard", "QDelta got a KVCache, expected a RecurrentState"),
        ("qdelta:heads=3,key_width=8", r"expected a state of shape \[2, 16, 8\] .* got \[3, 16, 8\]"),
        ("qdelta:erase=own", "expected a state with 3 convolutions, got 4"),
        (
            "qdelta:conv=2",
            "convolutions of 4 tokens, got .* with 2",
        ),
        (
            "qdelta:conv=1",
            "convolutions of 4 tokens, got .* with 1",
        ),
    ],
)
def test_states_of_other_mechanisms_raise(other: str, message: str) -> None:
    _, state = make(other)(stream())
    with pytest.raises(UsageError, match=message):
        make("qdelta")(stream(), state)


def test_wrong_row_count_and_empty_input_raise() -> None:
    layer = make("qdelta")
    _, state = layer(stream(2))
    with pytest.raises(UsageError, match=r"the state holds 2 rows, the input 3: select\(\) the rows first"):
        layer(stream(3), state)
    with pytest.raises(UsageError, match="no tokens"):
        layer(stream(2, 0))


@pytest.mark.parametrize("side", ["left", "right"])
def test_nan_at_padding_has_no_effect(side: Any) -> None:
    layer, layout = make("qdelta"), Layout.padded([2, 5], 6, side=side)
    x = stream(2, 6).masked_fill(~layout.valid[..., None], torch.nan).requires_grad_()
    y, state = layer(x, layout=layout)
    grads = torch.autograd.grad(y.sum(), [x, *layer.parameters()])
    assert bool(y.isfinite().all())
    assert bool(state.matrix.isfinite().all())
    assert all(bool(grad.isfinite().all()) for grad in grads)
    assert not bool(grads[0][~layout.valid].any())


def test_rows_without_tokens_keep_their_state() -> None:
    layer = make("qdelta")
    _, before = layer(stream(2, 5))
    _, after = layer(stream(2, 3), before, Layout.padded([0, 3], 3))
    assert after.length.tolist() == [5, 8]
    assert torch.equal(after.matrix[0], before.matrix[0])
    assert all(torch.equal(new[0], old[0]) for new, old in zip(after.conv_state, before.conv_state, strict=True))
    assert not torch.equal(after.matrix[1], before.matrix[1])


# Maps.


def test_map_is_the_jacobian_of_outputs_with_respect_to_values() -> None:
    layer, x = make("qdelta"), stream(1, 5)
    inputs = layer.inputs(x)
    jacobian = torch.autograd.functional.jacobian(lambda v: delta_rule(*inputs[:2], v, *inputs[3:])[0], inputs.v)
    influence = jacobian[
        0, :, :, 0, 0, :, :, 0
    ]  # influence of the first coordinate of each value on the first output, [t h s h]
    for head in range(HEADS):
        close(layer.weights(x)[0, head], influence[:, head, :, head])


def test_map_with_a_state_has_no_extra_columns() -> None:
    layer, x = make("qdelta"), stream(2, 9)
    _, state = layer(x[:, :5])
    recorded = layer.weights(x[:, 5:], state)
    assert recorded.shape == (2, HEADS, 4, 4)
    close(recorded, layer.weights(x)[:, :, 5:, 5:])


def test_map_of_a_long_sequence() -> None:
    layer, x = make("gated-deltanet", dtype=torch.float32), stream(1, 300, dtype=torch.float32)
    with torch.no_grad():
        recorded = layer.weights(x)
        assert recorded.shape == (1, HEADS, 300, 300)
        z = torch.einsum("bhts,bshv->bthv", recorded, layer.values(x))
        close(layer.read(z, x), layer(x)[0], within=1e-4)


def test_circuits_include_convolutions_but_not_gates() -> None:
    result = make("qdelta+hamiltonian:force=none").circuits()
    assert result.qk == ("query.weight", "key.weight", "query_conv", "key_conv", "coupling.dt")
    assert result.ov == ("value.weight", "value_conv", "output.weight")
    assert make("deltanet:conv=1").circuits().qk == ("query.weight", "key.weight")
    own = make("qdelta:erase=own").circuits()
    assert own.qk == ("query.weight", "key.weight", "own.weight", "query_conv", "key_conv", "own_conv")


@pytest.mark.parametrize(
    ("name", "series"),
    [
        ("deltanet", ["beta"]),
        ("gated-deltanet", ["beta", "alpha"]),
        ("kda", ["beta", "alpha"]),
        ("comba", ["beta", "alpha"]),
        ("qdelta", ["beta", "alpha", "lambda"]),
        ("eda", ["beta", "alpha", "gamma"]),
    ],
)
def test_diagnostics_contain_the_gates_of_each_head(name: str, series: list[str]) -> None:
    layer, x = make(name), stream()
    (gates,) = diagnostics(layer, x)
    assert gates.x == ("head 1", "head 2")
    assert [name.partition(",")[0] for name in gates.series] == series
    own = layer.gates(x)
    assert gates.values[0] == pytest.approx(own["beta"].mean((0, 1)).tolist())
    if "alpha" in series:
        alpha = own["log_alpha"].exp().view(2, 7, HEADS, -1)
        assert gates.values[1] == pytest.approx(alpha.mean((0, 1, 3)).tolist())


def test_coupling_diagnostics_use_convolved_pairs() -> None:
    layer, x = make("qdelta+hamiltonian"), stream()
    titles = [figure.title for figure in diagnostics(layer, x)]
    assert "dependence between queries and keys" in titles
    assert titles[-1] == "gates of each head"
    q, k = layer.pairs(x)
    moved = layer.coupling(q, k)
    for actual, expected in zip(layer.inputs(x)[:2], moved, strict=True):
        close(actual, expected / (expected.square().sum(-1, keepdim=True) + 1e-6).sqrt())


def test_all_delta_rule_mechanisms_share_a_base_class() -> None:
    for name in NAMES:
        layer = make(name)
        assert isinstance(layer, DeltaMechanism)
        assert isinstance(layer(stream())[1], RecurrentState)
