"""Attention with a coupling: order of operations, grouped queries, and the drift folded into the projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from qkflow.mechanisms import CoupledAttention, CouplingConfig, StandardAttention, mechanism
from qkflow.ops.norm import rms_norm
from qkflow.ops.rotary import apply_rotary, rotary_factors

WIDTH, HEADS = 32, 8
K = WIDTH // HEADS
COUPLINGS = [
    "hamiltonian",
    "hamiltonian:steps=3,integrator=leapfrog",
    "hamiltonian:force=potential,steps=2",
    "hamiltonian:force=none",
    "hamiltonian:sharing=none",
    "euler:steps=2",
    "affine:alternations=2",
    "uncoupled",
    "residual-query",
]
FOLDING = COUPLINGS[:5]
BASES = ["standard", "differential"]


def make(base: str, coupling: str, options: str = "", *, dtype: torch.dtype = torch.float64) -> Any:
    """A layer with perturbed coupling parameters."""
    dynamics, _, coupling_options = coupling.partition(":")
    spec = f"{base}+{dynamics}:" + ",".join(filter(None, [coupling_options, options]))
    layer = mechanism(spec)(WIDTH, HEADS, layer=1, layers=2).to(dtype)
    with torch.no_grad():
        for parameter in layer.coupling.parameters():  # type: ignore[union-attr]
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def stream(b: int = 2, t: int = 6, *, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(b, t, WIDTH, dtype=dtype)


def close(actual: Any, expected: Any, within: float = 1e-12) -> None:
    assert_close(actual, expected, rtol=0, atol=within)


class Constant(nn.Linear):
    """A projection with a constant output."""

    def __init__(self, output: Tensor) -> None:
        super().__init__(1, 1, bias=False)
        self.output = output

    def forward(self, x: Tensor) -> Tensor:
        return self.output.flatten(2)


class Own(nn.Linear):
    """A custom projection, such as an adapter."""

    times: float = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.times * super().forward(x)


def owned(layer: Any, *names: str, times: float = 1.0) -> Any:
    for name in names:
        old = getattr(layer, name)
        new = Own(old.in_features, old.out_features, bias=False)
        new.weight, new.times = old.weight, times
        setattr(layer, name, new)
    return layer


def without(layer: Any, base: str, options: str, q: Tensor, k: Tensor) -> Any:
    """The mechanism without a coupling, given queries and keys instead of projecting them."""
    plain: Any = mechanism(f"{base}:{options}")(WIDTH, HEADS, layer=1, layers=2).double()
    plain.load_state_dict({n: w for n, w in layer.state_dict().items() if not n.startswith("coupling.")})
    plain.query, plain.key = Constant(q), Constant(k)
    return plain


def groups(base: str, keys: int) -> list[list[int]]:
    """The query heads of each key head; the maps of a differential head are heads 2i and 2i + 1."""
    if base == "standard":
        r = HEADS // keys
        return [list(range(g * r, (g + 1) * r)) for g in range(keys)]
    r = HEADS // 2 // keys
    return [[2 * i + m for i in range(g * r, (g + 1) * r)] for g in range(keys) for m in (0, 1)]


def reference_coupling(layer: Any, x: Tensor, query_groups: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Coupled queries and keys, computed group by group with the shared network."""
    q, k = (x @ w.weight.T for w in (layer.query, layer.key))
    q, k = q.unflatten(2, (HEADS, K)), k.unflatten(2, (len(query_groups), K))
    coupling = layer.coupling.config(1, 1, K).double()
    coupling.load_state_dict(layer.coupling.state_dict())
    q_after, k_after = q.clone(), k.clone()
    for key, heads in enumerate(query_groups):
        mean = sum(q[:, :, h] for h in heads)[:, :, None] / len(heads)  # type: ignore[index]
        to, k_after[:, :, [key]] = coupling(mean, k[:, :, [key]])
        for h in heads:
            alone = coupling(q[:, :, [h]], k[:, :, [key]])[0]
            q_after[:, :, [h]] = q[:, :, [h]] + (to - mean) if coupling.is_paired else alone
    return q_after, k_after


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize(
    ("coupling", "options"),
    [
        *((coupling, "qk_norm=True") for coupling in COUPLINGS if "sharing" not in coupling),
        ("hamiltonian", ""),
        ("hamiltonian", "window=3,rotary_base=None"),
    ],
)
@pytest.mark.parametrize("base", BASES)
def test_coupling_moves_queries_and_keys_before_norm_and_position(
    base: str, coupling: str, options: str, mode: Callable[[], Any]
) -> None:
    layer, x = make(base, coupling, options), stream()
    with mode():
        moved = reference_coupling(layer, x, groups(base, HEADS if base == "standard" else HEADS // 2))
        plain = without(layer, base, options, *moved)
        close(layer(x)[0], plain(x)[0])
        close(layer.weights(x), plain.weights(x))
        close(layer.values(x), plain.values(x))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("keys", [1, 2])
@pytest.mark.parametrize("coupling", ["hamiltonian", "affine", "uncoupled"])
@pytest.mark.parametrize("base", BASES)
def test_grouped_queries_move_by_the_displacement_of_their_mean(
    base: str, coupling: str, keys: int, mode: Callable[[], Any]
) -> None:
    options = f"key_heads={keys}"
    layer, x = make(base, coupling, options), stream()
    with mode():
        plain = without(layer, base, options, *reference_coupling(layer, x, groups(base, keys)))
        close(layer(x)[0], plain(x)[0])


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("base", BASES)
def test_folded_drift_has_the_same_values_and_gradients(base: str, coupling: str) -> None:
    layer, x = make(base, coupling, "qk_norm=True"), stream().requires_grad_()
    folded = layer(x)[0]
    with torch.no_grad():
        close(layer(x)[0], folded.detach())
    weight, leaves = torch.randn_like(folded), [x, *layer.parameters()]
    actual = torch.autograd.grad(folded, leaves, weight)
    plain = owned(layer, "query", "key")(x)[0]
    close(plain, folded)
    close(actual, torch.autograd.grad(plain, leaves, weight), within=1e-11)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("which", ["query", "key"])
@pytest.mark.parametrize("coupling", FOLDING)
def test_replaced_projections_are_called(coupling: str, which: str, mode: Callable[[], Any]) -> None:
    layer, x = make("standard", coupling), stream()
    other = make("standard", coupling)
    other.load_state_dict(layer.state_dict())
    with torch.no_grad():
        getattr(other, which).weight.mul_(2)
    with mode():
        close(owned(layer, which, times=2.0)(x)[0], other(x)[0])


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("which", ["query", "key"])
@pytest.mark.parametrize("coupling", FOLDING)
def test_biases_on_projections_are_applied(coupling: str, which: str, mode: Callable[[], Any]) -> None:
    layer, x = make("standard", coupling), stream()
    getattr(layer, which).bias = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
    with mode():
        actual = layer(x)[0]
        q, k = layer.query(x).view(2, 6, HEADS, K), layer.key(x).view(2, 6, HEADS, K)
        moved = layer.coupling(q, k)
        delattr(layer, which)
        setattr(layer, which, nn.Linear(WIDTH, WIDTH, bias=False).double())
        close(actual, without(layer, "standard", "", *moved)(x)[0])


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("which", ["query", "key"])
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_forward_hooks_on_projections_run(coupling: str, which: str, mode: Callable[[], Any]) -> None:
    layer, x = make("standard", coupling), stream()
    twice = make("standard", coupling)
    twice.load_state_dict(layer.state_dict())
    with torch.no_grad():
        getattr(twice, which).weight.mul_(2)
    recorded: list[torch.Size] = []

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        recorded.append(output.shape)
        return 2 * output

    getattr(layer, which).register_forward_hook(hook)
    with mode():
        close(layer(x)[0], twice(x)[0])
    assert recorded == [x.shape]


def test_pre_forward_and_backward_hooks_on_projections_run() -> None:
    layer, x = make("standard", "hamiltonian"), stream()
    recorded: list[str] = []
    layer.query.register_forward_pre_hook(lambda module, args: recorded.append("query"))
    layer.key.register_full_backward_hook(lambda module, into, out: recorded.append("key"))
    layer(x.requires_grad_())[0].sum().backward()
    assert sorted(recorded) == ["key", "query"]


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("base", BASES)
def test_cached_keys_do_not_change(base: str, coupling: str) -> None:
    layer, x = make(base, coupling, "key_heads=2,qk_norm=True"), stream(2, 9)
    with torch.no_grad():
        _, state = layer(x[:, :4])
        before = state.tensors[0].clone()
        for token in x[:, 4:].split(1, 1):
            _, state = layer(token, state)
        _, whole = layer(x)
    close(state.tensors[0][:, :4], before, within=0)
    close(state.tensors[0], whole.tensors[0])


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_cached_keys_are_coupled_normalised_and_rotated(coupling: str) -> None:
    layer, x = make("standard", coupling, "qk_norm=True"), stream()
    with torch.no_grad():
        layer.key_norm.uniform_(0.5, 2)
        q, k = layer.query(x).view(2, 6, HEADS, K), layer.key(x).view(2, 6, HEADS, K)
        k = rms_norm(layer.coupling(q, k)[1], layer.key_norm)
        factors = rotary_factors(0, 6, heads=HEADS, width=K, base=10000.0, like=k)
        close(layer(x)[1].tensors[0], apply_rotary(k, factors))


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("base", BASES)
def test_coupling_parameters_belong_to_the_qk_circuit(base: str, coupling: str) -> None:
    layer = make(base, coupling, "qk_norm=True")
    circuits = layer.circuits()
    names = {name for name, _ in layer.named_parameters()}
    assert {name for name in names if name.startswith("coupling.")} <= set(circuits.qk)
    assert set(circuits.qk) | set(circuits.ov) == names
    assert not set(circuits.qk) & set(circuits.ov)
    assert len(circuits.qk) == len(set(circuits.qk))


@pytest.mark.parametrize("coupling", [*COUPLINGS, "hamiltonian:steps=7,integrator=leapfrog"])
@pytest.mark.parametrize(("base", "options"), [("standard", ""), ("differential", "key_heads=2")])
def test_half_precision_is_close_to_single_precision(base: str, coupling: str, options: str) -> None:
    layer, x = make(base, coupling, options, dtype=torch.float32), stream(dtype=torch.float32)
    exact, leaves = layer(x)[0], [*layer.parameters()]
    expected = torch.autograd.grad(exact.square().sum(), leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)[0]
        with torch.no_grad():
            state, steps = None, []
            for token in x.split(1, 1):
                step, state = layer(token, state)
                steps.append(step)
    actual = torch.autograd.grad(y.float().square().sum(), leaves)
    for out in (y.detach(), torch.cat(steps, 1)):
        assert float((out - exact.detach()).norm() / exact.detach().norm()) < 0.05
    total = torch.cat([w.flatten() for w in expected])
    assert float((torch.cat([g.flatten() for g in actual]) - total).norm() / total.norm()) < 0.1


def test_coupled_attention_is_standard_attention_with_a_hamiltonian_coupling() -> None:
    coupled, x = CoupledAttention(WIDTH, HEADS).double(), stream()
    other = mechanism("standard+hamiltonian")(WIDTH, HEADS, layer=0, layers=1).double()
    assert coupled.config.coupling == CouplingConfig()
    other.load_state_dict(coupled.state_dict())
    assert torch.equal(coupled(x)[0], other(x)[0])


@pytest.mark.parametrize("coupling", ["affine", "uncoupled", "residual-query"])
def test_identity_coupling_does_not_change_the_output(coupling: str) -> None:
    plain, x = StandardAttention(WIDTH, HEADS).double(), stream()
    layer = mechanism(f"standard+{coupling}")(WIDTH, HEADS, layer=0, layers=1).double()
    layer.load_state_dict({**layer.state_dict(), **plain.state_dict()})
    assert torch.equal(layer(x)[0], plain(x)[0])


def test_qk_norm_before_the_coupling_is_not_after_it() -> None:
    """Before: the coupling moves queries and keys of unit size. After: the scored ones have it."""
    layers = {
        place: mechanism(f"coupled:qk_norm={place},rotary_base=None")(WIDTH, HEADS, layer=0, layers=1).double()
        for place in ("before", "after", "True")
    }
    x = stream()
    for layer in layers.values():
        layer.load_state_dict(layers["before"].state_dict())
        torch.nn.init.normal_(layer.coupling.force.outer_bias)
    before, after, default = layers.values()
    default.load_state_dict(after.state_dict())
    assert torch.equal(after(x)[0], default(x)[0])
    q, k = before.pairs(x)
    assert_close(q.square().mean(-1), torch.ones_like(q[..., 0]), rtol=0, atol=1e-3)
    expected_q, expected_k = before.coupling(q, k)
    inputs = before._attention_inputs(x, None, None)
    assert_close((inputs.q, inputs.k), (expected_q, expected_k), rtol=0, atol=1e-12)
    inputs = after._attention_inputs(x, None, None)
    assert_close(inputs.k.square().mean(-1), torch.ones_like(inputs.k[..., 0]), rtol=0, atol=1e-3)
