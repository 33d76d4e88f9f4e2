"""Properties of integrators and couplings: symplecticity, volume, order, reversibility, energy and inverse."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.functional import jacobian
from torch.testing import assert_close

from qkflow.errors import UsageError
from qkflow.ops.symplectic import naive
from qkflow.ops.symplectic.naive import euler, leapfrog, symplectic_euler

WIDTH, HIDDEN = 3, 5
Scheme = Callable[..., tuple[Tensor, Tensor]]
KEEPING: list[Scheme] = [symplectic_euler, leapfrog]
SCHEMES: list[Scheme] = [euler, symplectic_euler, leapfrog]
several = settings(deadline=None, max_examples=20)
seeds, steps_of, dts = st.integers(0, 10**6), st.integers(1, 7), st.sampled_from([0.05, 0.1, 0.3, -0.2])
correlations = st.sampled_from([0.0, 0.95])


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pair(*shape: int, seed: int, rho: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return queries and keys; with `rho` they have a common direction."""
    q, k, common = noise(3, *shape, WIDTH, seed=seed)
    common = common.reshape(-1, WIDTH)[0]
    return rho * common + (1 - rho) * q, rho * common + (1 - rho) * k


def perceptron(seed: int, *each: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, b, c, d = (seed + i * 10**7 for i in range(4))
    inner, outer = noise(*each, HIDDEN, WIDTH, seed=a), noise(*each, WIDTH, HIDDEN, seed=c)
    return inner / WIDTH**0.5, noise(*each, HIDDEN, seed=b), outer / HIDDEN**0.5, noise(*each, WIDTH, seed=d)


def well(seed: int, *each: int) -> tuple[Tensor, Tensor, Tensor]:
    a, b, c = (seed + i * 10**7 for i in range(3))
    amplitude = (0.5 * noise(*each, HIDDEN, seed=c)).exp()
    return noise(*each, HIDDEN, WIDTH, seed=a) / WIDTH**0.5, noise(*each, HIDDEN, seed=b), amplitude


def mlp(seed: int) -> naive.Force:
    weights = perceptron(seed)
    return lambda q: naive.mlp_force(q, *weights)


def potential(seed: int) -> naive.Force:
    weights = well(seed)
    return lambda q: naive.potential_force(q, *weights)


def matrix(scheme: Scheme, force: naive.Force, dt: float, steps: int, *, seed: int, rho: float) -> Tensor:
    """The Jacobian of (q, k) -> (q', k') at a random point."""
    at = torch.cat(pair(seed=seed, rho=rho))
    return jacobian(lambda x: torch.cat(scheme(*x.chunk(2), force, dt, steps)), at)


def broken_form(j: Tensor) -> float:
    zero, one = torch.zeros(WIDTH, WIDTH, dtype=j.dtype), torch.eye(WIDTH, dtype=j.dtype)
    omega = torch.cat([torch.cat([zero, one], 1), torch.cat([-one, zero], 1)])
    return float((j.T @ omega @ j - omega).abs().max())


@pytest.mark.parametrize("scheme", KEEPING)
@given(seed=seeds, steps=steps_of, dt=dts, rho=correlations)
@several
def test_gradient_forces_give_symplectic_maps(scheme: Scheme, seed: int, steps: int, dt: float, rho: float) -> None:
    assert broken_form(matrix(scheme, potential(seed), dt, steps, seed=seed, rho=rho)) < 1e-12


@pytest.mark.parametrize("force", [mlp, potential])
@pytest.mark.parametrize("scheme", KEEPING)
@given(seed=seeds, steps=steps_of, dt=dts, rho=correlations)
@several
def test_every_force_preserves_volume(
    scheme: Scheme, force: Callable[[int], naive.Force], seed: int, steps: int, dt: float, rho: float
) -> None:
    assert abs(matrix(scheme, force(seed), dt, steps, seed=seed, rho=rho).det() - 1) < 1e-12


@pytest.mark.parametrize("scheme", KEEPING)
@pytest.mark.parametrize("seed", range(5))
def test_an_mlp_force_is_not_symplectic(scheme: Scheme, seed: int) -> None:
    assert broken_form(matrix(scheme, mlp(seed), 0.1, 1, seed=seed, rho=0.0)) > 1e-3


@pytest.mark.parametrize("force", [mlp, potential])
@pytest.mark.parametrize("seed", range(5))
def test_euler_preserves_neither_volume_nor_the_symplectic_form(force: Callable[[int], naive.Force], seed: int) -> None:
    j = matrix(euler, force(seed), 0.1, 3, seed=seed, rho=0.0)
    assert abs(j.det() - 1) > 1e-4
    assert broken_form(j) > 1e-4


def oscillator() -> tuple[naive.Force, Tensor]:
    """A force whose exact solution is a rotation, and that solution at time 1."""
    q, k = pair(16, seed=7)
    c, s = math.cos(1.0), math.sin(1.0)
    return (lambda q: -q), torch.cat([c * q + s * k, c * k - s * q], -1)


def confined() -> tuple[naive.Force, Tensor]:
    """A potential, and its solution at time 1 with many small steps."""
    return potential(3), torch.cat(leapfrog(*pair(16, seed=7), potential(3), 1 / 2048, 2048), -1)


@pytest.mark.parametrize("motion", [oscillator, confined])
@pytest.mark.parametrize(("scheme", "order"), [(euler, 1), (symplectic_euler, 1), (leapfrog, 2)])
def test_integrators_have_their_stated_order(
    scheme: Scheme, order: int, motion: Callable[[], tuple[naive.Force, Tensor]]
) -> None:
    force, expected = motion()
    counts = torch.tensor([8, 16, 32, 64])
    errors = [(torch.cat(scheme(*pair(16, seed=7), force, 1 / n, n), -1) - expected).norm() for n in counts.tolist()]
    x, y = -counts.double().log(), torch.stack(errors).log()
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    assert float(slope) == pytest.approx(order, abs=0.05)


@pytest.mark.parametrize("force", [mlp, potential])
@given(seed=seeds, steps=steps_of, dt=dts, rho=correlations)
@several
def test_leapfrog_is_reversible(
    force: Callable[[int], naive.Force], seed: int, steps: int, dt: float, rho: float
) -> None:
    q, k = pair(4, seed=seed, rho=rho)
    moved = leapfrog(q, k, force(seed), dt, steps)
    back = leapfrog(moved[0], -moved[1], force(seed), dt, steps)
    assert_close((back[0], -back[1]), (q, k), rtol=0, atol=1e-12)


@pytest.mark.parametrize("force", [mlp, potential])
@pytest.mark.parametrize("scheme", [euler, symplectic_euler])
def test_the_other_integrators_are_not_reversible(scheme: Scheme, force: Callable[[int], naive.Force]) -> None:
    q, k = pair(4, seed=0)
    moved = scheme(q, k, force(0), 0.1)
    back = scheme(moved[0], -moved[1], force(0), 0.1)
    assert max(float((back[0] - q).norm()), float((back[1] + k).norm())) > 1e-3


@pytest.mark.parametrize("force", [mlp, potential])
@pytest.mark.parametrize("scheme", SCHEMES)
@given(seed=seeds, steps=steps_of, dt=dts)
@several
def test_several_steps_equal_repeated_single_steps(
    scheme: Scheme, force: Callable[[int], naive.Force], seed: int, steps: int, dt: float
) -> None:
    moved = q, k = pair(4, seed=seed)
    for _ in range(steps):
        moved = scheme(*moved, force(seed), dt)
    assert_close(scheme(q, k, force(seed), dt, steps), moved, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("steps", range(1, 8))
def test_a_step_evaluates_the_force_only_once(scheme: Scheme, steps: int) -> None:
    force = Mock(side_effect=torch.neg)
    scheme(*pair(seed=0), force, 0.1, steps)
    assert force.call_count == steps


@pytest.mark.parametrize("force", [mlp, potential])
def test_one_step_matches_its_formula(force: Callable[[int], naive.Force]) -> None:
    (q, k), f, d = pair(4, seed=1), force(1), 0.3
    assert_close(euler(q, k, f, d), (q + d * k, k + d * f(q)))
    assert_close(symplectic_euler(q, k, f, d), (q + d * k, k + d * f(q + d * k)))
    half = q + d / 2 * k
    kicked = k + d * f(half)
    assert_close(leapfrog(q, k, f, torch.tensor(d, dtype=q.dtype)), (half + d / 2 * kicked, kicked))


def growth(scheme: Scheme) -> tuple[float, float]:
    """Return the largest energy error of the second half of 1,000 steps, relative to the first half and to the start.

    Both are medians over 32 random weights and points.
    """
    (w, b, a), moved = well(11, 32), pair(32, seed=12)
    energies = [naive.energy(*moved, w, b, a)]
    for _ in range(200):
        moved = scheme(*moved, lambda q: naive.potential_force(q, w, b, a), 0.2, 5)
        energies.append(naive.energy(*moved, w, b, a))
    error = (torch.stack(energies) - energies[0]).abs()
    ratio = error[101:].amax(0) / error[:101].amax(0)
    return float(ratio.median()), float((error.amax(0) / energies[0]).median())


def test_energy_errors_stay_bounded_for_leapfrog_and_grow_for_euler() -> None:
    ratio, largest = growth(leapfrog)
    assert ratio < 1.2
    assert largest < 0.05
    ratio, largest = growth(euler)
    assert ratio > 1.5
    assert largest > 2


@given(seed=seeds, rho=correlations)
@several
def test_the_potential_force_is_the_negative_gradient(seed: int, rho: float) -> None:
    q = pair(6, seed=seed, rho=rho)[0].requires_grad_()
    (slope,) = torch.autograd.grad(naive.potential(q, *well(seed)).sum(), q)
    assert_close(naive.potential_force(q, *well(seed)), -slope, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("far", [19.0, 21.0, 25.0, 40.0, 1000.0])
def test_the_potential_force_is_accurate_at_large_distances(far: float) -> None:
    q, one = torch.tensor([far], dtype=torch.float64, requires_grad=True), torch.ones(1, dtype=torch.float64)
    (slope,) = torch.autograd.grad(naive.potential(q, one[None], 0 * one, one), q)
    assert_close(naive.potential_force(q, one[None], 0 * one, one), -slope, rtol=0, atol=1e-12)


@given(seed=seeds)
@several
def test_potential_and_energy_match_their_formulas_and_confine(seed: int) -> None:
    (w, b, a), q, k = well(seed), *noise(2, WIDTH, seed=seed)
    z = w @ q
    assert_close(naive.potential(q, w, b, a), (a * ((1 + (z + b).exp()).log() + (1 + (b - z).exp()).log())).sum())
    assert_close(naive.energy(q, k, w, b, a), k @ k / 2 + naive.potential(q, w, b, a))
    directions = torch.nn.functional.normalize(noise(50, WIDTH, seed=seed), dim=-1)
    far = torch.tensor([0.0, 1, 2, 4, 8, 1000, 2000], dtype=q.dtype)
    v = naive.potential(far[:, None, None] * directions, w, b, a)
    assert (v.diff(dim=0) > 0).all()
    assert_close((v[-1] - v[-2]) / 1000, (a * (directions @ w.T).abs()).sum(-1), rtol=0.01, atol=0.01)


def test_weights_per_head_apply_to_each_head() -> None:
    q, k = pair(2, 5, 4, seed=0)
    net, hole = perceptron(1, 4), well(2, 4)
    of_net, of_hole = naive.mlp_force(q, *net), naive.potential_force(q, *hole)
    total = naive.energy(q, k, *hole)
    for head in range(4):
        one, two = [w[head] for w in net], [w[head] for w in hole]
        assert_close(of_net[:, :, head], naive.mlp_force(q[:, :, head], *one))
        assert_close(of_hole[:, :, head], naive.potential_force(q[:, :, head], *two))
        assert_close(total[:, :, head], naive.energy(q[:, :, head], k[:, :, head], *two))


def shift(seed: int) -> naive.Shift:
    scales, shifts = perceptron(seed), perceptron(seed + 1)
    return lambda x: (0.1 * naive.mlp_force(x, *scales), naive.mlp_force(x, *shifts))


def affine_layers(count: int, seed: int) -> list[tuple[naive.Shift, naive.Shift]]:
    return [(shift(seed + 10 * i), shift(seed + 10 * i + 5)) for i in range(count)]


@given(seed=seeds, count=st.integers(1, 3), rho=correlations)
@several
def test_an_affine_coupling_is_invertible(seed: int, count: int, rho: float) -> None:
    layers, at = affine_layers(count, seed), pair(4, seed=seed, rho=rho)
    moved = naive.affine_coupling(*at, layers)
    assert max(float((a - b).abs().max()) for a, b in zip(at, moved, strict=True)) > 0.01
    assert_close(naive.affine_coupling_inverse(*moved, layers), at, rtol=0, atol=1e-10)
    back = naive.affine_coupling_inverse(*at, layers)
    assert_close(naive.affine_coupling(*back, layers), at, rtol=0, atol=1e-10)


def test_an_affine_coupling_moves_the_query_first() -> None:
    (q, k), [(of_query, of_key)] = pair(4, seed=3), affine_layers(1, 3)
    moved = q * of_query(k)[0].exp() + of_query(k)[1]
    assert_close(
        naive.affine_coupling(q, k, [(of_query, of_key)]), (moved, k * of_key(moved)[0].exp() + of_key(moved)[1])
    )


@pytest.mark.parametrize("move", [naive.affine_coupling, naive.affine_coupling_inverse])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_zero_affine_coupling_is_the_identity(move: Any, count: int) -> None:
    def nothing(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(x), torch.zeros_like(x)

    at = pair(50, seed=count)
    assert all(map(torch.equal, move(*at, [(nothing, nothing)] * count), at))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("steps", [0, -1])
def test_less_than_one_step_raises(scheme: Scheme, steps: int) -> None:
    with pytest.raises(UsageError, match=f"steps must be at least 1, got {steps}"):
        scheme(*pair(seed=0), lambda q: -q, 0.1, steps)


@pytest.mark.parametrize("shape", [(4, WIDTH + 1), (5, WIDTH), (WIDTH,)])
def test_queries_and_keys_of_different_shapes_raise(shape: tuple[int, ...]) -> None:
    for move in (*(partial(scheme, force=torch.neg, dt=0.1) for scheme in SCHEMES), naive.affine_coupling):
        with pytest.raises(UsageError, match=rf"got \[4, {WIDTH}\] and \[{shape[0]}"):
            move(torch.zeros(4, WIDTH), torch.zeros(shape), *([[]] if move is naive.affine_coupling else []))
