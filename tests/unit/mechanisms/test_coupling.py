"""Couplings: initialization, cost, grouped queries and errors."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch import Tensor
from torch.testing import assert_close

from qkflow.errors import UsageError
from qkflow.mechanisms import Coupling, CouplingConfig
from qkflow.mechanisms.coupling import Affine, DriftKick
from qkflow.models.sizes import parameters, size
from qkflow.ops.symplectic import naive

HEADS, WIDTH = 4, 6
DYNAMICS: list[Any] = ["hamiltonian", "euler", "affine", "uncoupled", "residual-query"]
MOVING: list[dict[str, Any]] = [
    {"dynamics": "hamiltonian"},
    {"dynamics": "hamiltonian", "steps": 3, "integrator": "leapfrog", "force": "potential"},
    {"dynamics": "hamiltonian", "steps": 2, "force": "none"},
    {"dynamics": "euler", "steps": 3},
    {"dynamics": "euler", "steps": 2, "force": "potential"},
    {"dynamics": "affine", "alternations": 2},
    {"dynamics": "uncoupled", "steps": 2},
    {"dynamics": "residual-query"},
]
PAIRING = MOVING[:-2]


def make(queries: int = HEADS, keys: int = HEADS, **config: Any) -> Coupling:
    """Return a coupling with random weights of a realistic size."""
    layer = CouplingConfig(**config)(queries, keys, WIDTH).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_((0.1 if isinstance(layer, Affine) else 0.3) * torch.randn_like(parameter))
    return layer


def points(queries: int = HEADS, keys: int = HEADS, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 5, queries, width).double(), torch.randn(2, 5, keys, width).double()


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def close(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], within: float = 1e-12) -> None:
    assert_close(actual, expected, rtol=0, atol=within)


@pytest.mark.parametrize("sharing", ["heads", "none", "layers"])
@pytest.mark.parametrize("steps", [1, 3])
def test_hamiltonian_coupling_is_a_drift_at_initialisation(sharing: Any, steps: int) -> None:
    q, k = points()
    for integrator in ("symplectic-euler", "leapfrog"):
        config = CouplingConfig(steps=steps, integrator=integrator, sharing=sharing)
        coupling: Any = config(HEADS, HEADS, WIDTH).double()
        assert coupling.dt.item() == pytest.approx(0.1)
        close(coupling(q, k), (q + steps * coupling.dt * k, k))


def test_euler_coupling_is_a_drift_at_initialisation() -> None:
    q, k = points()
    coupling: Any = CouplingConfig(dynamics="euler", steps=2)(HEADS, HEADS, WIDTH).double()
    assert coupling.dt.item() == pytest.approx(0.1)
    close(coupling(q, k), (q + 2 * coupling.dt * k, k))


@pytest.mark.parametrize("sharing", ["heads", "none"])
@pytest.mark.parametrize(
    "config",
    [{"dynamics": "uncoupled", "steps": 3}, {"dynamics": "residual-query"}]
    + [{"dynamics": "affine", "alternations": n} for n in (1, 2, 3)],
    ids=str,
)
def test_other_couplings_are_the_identity_at_initialisation(config: dict[str, Any], sharing: Any) -> None:
    q, k = points()
    for dtype in (torch.float64, torch.float32):
        layer = CouplingConfig(**config, sharing=sharing)(HEADS, HEADS, WIDTH).to(dtype)
        moved = layer(q.to(dtype), k.to(dtype))
        assert torch.equal(moved[0], q.to(dtype))
        assert torch.equal(moved[1], k.to(dtype))


@pytest.mark.parametrize("sharing", ["heads", "none"])
@pytest.mark.parametrize("scheme", ["symplectic-euler", "leapfrog", "euler"])
@pytest.mark.parametrize("force", ["mlp", "potential", "none"])
def test_drift_kick_equals_the_reference_operators(scheme: str, force: Any, sharing: Any) -> None:
    how: dict[str, Any] = {"dynamics": "euler"} if scheme == "euler" else {"integrator": scheme}
    step = {"symplectic-euler": naive.symplectic_euler, "leapfrog": naive.leapfrog, "euler": naive.euler}[scheme]
    for steps in (1, 4):
        layer, (q, k) = make(force=force, steps=steps, sharing=sharing, **how), points()
        assert isinstance(layer, DriftKick)
        acting = layer.force if layer.force is not None else torch.zeros_like
        with torch.no_grad():
            close(layer(q, k), step(q, k, acting, layer.dt, steps))


@given(alternations=st.integers(1, 3), seed=st.integers(0, 1000), sharing=st.sampled_from(["heads", "none"]))
@settings(deadline=None, max_examples=8)
def test_affine_coupling_is_invertible(alternations: int, seed: int, sharing: Any) -> None:
    torch.manual_seed(seed)
    layer, at = make(dynamics="affine", alternations=alternations, sharing=sharing), points()
    assert isinstance(layer, Affine)
    with torch.no_grad():
        moved = layer(*at)
        assert float((moved[0] - at[0]).abs().max()) > 0.01
        close(layer.inverse(*moved), at, within=1e-10)
        close(layer(*layer.inverse(*at)), at, within=1e-10)


@pytest.mark.parametrize("alternations", [1, 2, 3])
def test_affine_coupling_is_invertible_with_large_weights(alternations: int) -> None:
    config = CouplingConfig(dynamics="affine", alternations=alternations)
    layer = config(HEADS, HEADS, 64).double()
    at = points(width=64)
    assert isinstance(layer, Affine)
    with torch.no_grad():
        for network in (*layer.of_query, *layer.of_key):
            outer: Any = network.outer
            outer.copy_(torch.randn_like(outer) / 8)  # N(0, 1 / inputs)
        moved = layer(*at)
        assert all(x.isfinite().all() for x in moved)
        close(layer.inverse(*moved), at, within=1e-10)


@pytest.mark.parametrize("config", MOVING, ids=str)
def test_tokens_and_heads_are_independent(config: dict[str, Any]) -> None:
    for sharing in ("heads", "none"):
        layer, (q, k) = make(sharing=sharing, **config), points()
        moved = layer(q, k)
        q2, k2 = q.clone(), k.clone()
        q2[1, 3, 2] += 1
        k2[1, 3, 2] -= 1
        for a, b in zip(layer(q2, k2), moved, strict=True):
            changed = (a - b).abs().amax(-1) > 0
            assert not changed.index_fill(1, torch.tensor([3]), False).any()
            assert changed[1, 3].tolist() in ([False, False, True, False], [False] * 4)
            assert not changed[0].any()


@pytest.mark.parametrize("sharing", ["heads", "none"])
@pytest.mark.parametrize("config", PAIRING, ids=str)
def test_grouped_queries_move_by_the_displacement_of_their_mean(config: dict[str, Any], sharing: Any) -> None:
    layer, (q, k) = make(6, 2, sharing=sharing, **config), points(6, 2)
    pairs = make(2, 2, sharing=sharing, **config)
    pairs.load_state_dict(layer.state_dict())
    mean = torch.stack([q[:, :, :3].mean(2), q[:, :, 3:].mean(2)], 2)
    moved, key = pairs(mean, k)
    displacement = moved - mean
    close(layer(q, k), (q + displacement[:, :, [0, 0, 0, 1, 1, 1]], key))


@pytest.mark.parametrize("config", MOVING[-2:], ids=str)
def test_controls_move_grouped_queries_independently(config: dict[str, Any]) -> None:
    layer, (q, k) = make(6, 2, **config), points(6, 2)
    moved, key = layer(q, k)
    for head in range(6):
        other = k[:, :, head // 3 : head // 3 + 1]
        alone = make(1, 1, **config)
        alone.load_state_dict(layer.state_dict())
        q_moved, k_moved = alone(q[:, :, head : head + 1], other)
        close((moved[:, :, head : head + 1], key[:, :, head // 3 : head // 3 + 1]), (q_moved, k_moved))


@pytest.mark.parametrize("config", MOVING[-2:], ids=str)
def test_controls_do_not_couple_queries_and_keys(config: dict[str, Any]) -> None:
    layer, (q, k) = make(**config), points()
    moved = layer(q, k)
    assert torch.equal(layer(q, k + 1)[0], moved[0])
    assert torch.equal(layer(q + 1, k)[1], moved[1])


@pytest.mark.parametrize("config", PAIRING, ids=str)
def test_paired_dynamics_couple_queries_and_keys(config: dict[str, Any]) -> None:
    layer, (q, k) = make(**config), points()
    q.requires_grad_()
    k.requires_grad_()
    moved = layer(q, k)
    assert torch.autograd.grad(moved[0].sum(), k, retain_graph=True)[0].abs().min() > 0
    if config.get("force") != "none":
        assert torch.autograd.grad(moved[1].square().sum(), q)[0].abs().max() > 0


@pytest.mark.parametrize("force", ["mlp", "potential", "none"])
@pytest.mark.parametrize("sharing", ["heads", "none", "layers"])
def test_hamiltonian_and_euler_have_as_many_parameters(force: Any, sharing: Any) -> None:
    hamiltonian, euler = (make(dynamics=d, force=force, sharing=sharing) for d in ("hamiltonian", "euler"))
    assert count(hamiltonian) == count(euler)
    assert hamiltonian.state_dict().keys() == euler.state_dict().keys()


@pytest.mark.parametrize("steps", [2, 7])
def test_steps_add_no_parameters(steps: int) -> None:
    for dynamics in ("hamiltonian", "euler", "uncoupled"):
        assert count(make(dynamics=dynamics, steps=steps)) == count(make(dynamics=dynamics))


@pytest.mark.parametrize("dynamics", DYNAMICS)
def test_unshared_networks_multiply_parameters_by_heads(dynamics: Any) -> None:
    shared, separate = (count(make(dynamics=dynamics, sharing=sharing)) for sharing in ("heads", "none"))
    dt = dynamics not in ("affine", "residual-query")
    assert separate - dt == HEADS * (shared - dt)


def test_coupling_of_a_paper_sized_model_has_few_parameters() -> None:
    base = parameters(size("60m"))
    for spec, most in (("hamiltonian", 0.0012), ("affine", 0.0035)):
        more = parameters(size("60m", mechanism=f"standard+{spec}")) - base
        assert 0 < more / base <= most, spec


def test_uncoupled_control_has_as_many_parameters() -> None:
    with torch.device("meta"):
        hamiltonian, uncoupled = (count(CouplingConfig(dynamics=d)(8, 8, 64)) for d in ("hamiltonian", "uncoupled"))
    assert uncoupled == pytest.approx(hamiltonian, rel=0.01)


@pytest.mark.parametrize("config", MOVING, ids=str)
def test_half_precision_forward_and_backward(config: dict[str, Any]) -> None:
    layer, (q, k) = make(**config).float(), points()
    q, k = (x.float().requires_grad_() for x in (q, k))
    exact = layer(q, k)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        moved = layer(q.bfloat16(), k.bfloat16())
    assert {x.dtype for x in moved} == {torch.bfloat16}
    sum(x.float().square().sum() for x in moved).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    for a, b in zip(moved, exact, strict=True):
        assert float((a.float() - b).detach().norm() / b.detach().norm()) < 0.02


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"steps": 0}, "steps must be from 1 to 7, got 0"),
        ({"steps": 8}, "steps must be from 1 to 7, got 8"),
        ({"steps": -1}, "steps must be from 1 to 7, got -1"),
        ({"dynamics": "hamiltonan"}, "unknown dynamics 'hamiltonan': did you mean 'hamiltonian'"),
        ({"dynamics": "affin"}, "did you mean 'affine'"),
        ({"dt": math.nan}, "dt must be a finite number, got nan"),
        ({"dt": math.inf}, "dt must be a finite number, got inf"),
        ({"dt": -math.inf}, "dt must be a finite number, got -inf"),
        ({"hidden": 0}, "hidden must be at least 1, got 0"),
        ({"dynamics": "affine", "alternations": 0}, "alternations must be at least 1, got 0"),
        ({"dynamics": "affine", "steps": 3}, "affine dynamics has no option steps: expected alternations"),
        ({"dynamics": "affine", "dt": 0.2}, "affine dynamics has no option dt"),
        ({"alternations": 2}, "hamiltonian dynamics has no option alternations"),
        ({"dynamics": "euler", "integrator": "leapfrog"}, "euler dynamics has no option integrator"),
        ({"dynamics": "uncoupled", "force": "potential"}, "uncoupled dynamics has no option force"),
        ({"dynamics": "residual-query", "steps": 2}, "residual-query dynamics has no option steps"),
        ({"integrator": "leapfrogg"}, "did you mean 'leapfrog'"),
        ({"force": "potentail"}, "did you mean 'potential'"),
        ({"sharing": "layer"}, "did you mean 'layers'"),
    ],
    ids=str,
)
def test_invalid_coupling_configs_raise_in_one_line(config: dict[str, Any], message: str) -> None:
    layer = object.__new__(CouplingConfig)  # the constructor may check types first
    for field in fields(CouplingConfig):
        object.__setattr__(layer, field.name, config.get(field.name, field.default))
    with pytest.raises(UsageError, match=message) as caught:
        layer.__post_init__()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("queries", "keys"), [(4, 3), (2, 4), (4, 0)])
def test_mismatched_heads_raise(queries: int, keys: int) -> None:
    with pytest.raises(UsageError, match=f"got {keys} and {queries}"):
        CouplingConfig()(queries, keys, WIDTH)


@pytest.mark.parametrize("config", MOVING, ids=str)
@pytest.mark.parametrize(("queries", "keys", "width"), [(3, 4, WIDTH), (4, 2, WIDTH), (4, 4, WIDTH + 1)])
def test_mismatched_shapes_raise(config: dict[str, Any], queries: int, keys: int, width: int) -> None:
    with pytest.raises(
        UsageError, match=rf"expected 4 query heads and 4 key heads of width 6, got \[{queries}, {width}\] and"
    ):
        make(**config)(*points(queries, keys, width))


def test_key_width_must_equal_query_width() -> None:
    with pytest.raises((UsageError, TypeCheckError), match=r"got \[4, 6\] and \[4, 7\]|parameter 'k'"):
        make()(points()[0], points(width=7)[1])
