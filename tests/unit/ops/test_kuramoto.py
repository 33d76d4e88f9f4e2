"""Phases on circles: the update is Kuramoto's, descends an energy, and is invariant to full rotations."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

from qkflow.errors import NotFiniteError, UsageError
from qkflow.ops import kuramoto
from qkflow.ops.kuramoto import cpu

TURN = 2 * math.pi
ANGLES = st.floats(-20, 20)


@pytest.fixture(params=["native", "torch"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The C kernels, if they can be built, and the PyTorch operations."""
    if request.param == "torch":
        monkeypatch.setattr(cpu, "supports", lambda *tensors: False)
    return request.param


def phases(*shape: int) -> Tensor:
    return (3 * torch.randn(*shape, dtype=torch.float64)).requires_grad_()


def weights(b: int, h: int, t: int) -> Tensor:
    """Return a general map: not causal, not symmetric, rows do not sum to one."""
    return torch.rand(b, h, t, t, dtype=torch.float64, requires_grad=True)


def same(actual: Tensor, expected: Tensor, *leaves: Tensor) -> None:
    """Compare values, and gradients of a random weighted sum, to 1e-12."""
    assert_close(actual, expected, rtol=0, atol=1e-12)
    if leaves:
        weight = torch.randn_like(expected)
        grads = [torch.autograd.grad(y, leaves, weight, retain_graph=True) for y in (actual, expected)]
        assert_close(*grads, rtol=0, atol=1e-12)


def test_the_coupling_is_the_sum_of_sines() -> None:
    theta, map = phases(2, 3, 2, 2).detach(), weights(2, 2, 3).detach()
    actual = kuramoto.coupling(theta, map)
    for b, t, h, j in product(range(2), range(3), range(2), range(2)):
        sines = [
            float(map[b, h, t, u]) * math.sin(float(theta[b, u, h, j]) - float(theta[b, t, h, j])) for u in range(3)
        ]
        assert float(actual[b, t, h, j]) == pytest.approx(sum(sines), abs=1e-12)


def test_the_tangent_to_the_circular_mean_is_the_coupling(form: str) -> None:
    theta, map = phases(2, 5, 3, 4), weights(2, 3, 5)
    points = kuramoto.points(theta)
    mean = torch.einsum("bhtu,buhjc->bthjc", map, points)
    same(kuramoto.tangent(points, mean), kuramoto.coupling(theta, map), theta, map)


def test_rotated_harmonics_give_sines_with_a_lag(form: str) -> None:
    theta, map, lag = phases(2, 4, 1, 3), weights(2, 1, 4), phases(3)
    difference = theta[:, None] - theta[:, :, None]
    for m, points in enumerate(kuramoto.harmonics(kuramoto.points(theta), 3), 1):
        mean = torch.einsum("bhtu,buhjc->bthjc", map, points)
        actual = kuramoto.tangent(points, kuramoto.rotate_points(mean, kuramoto.points(lag).expand_as(mean)))
        expected = torch.einsum("bhtu,btuhj->bthj", map, (m * difference + lag).sin())
        same(actual, expected, theta, map, lag)


@pytest.mark.parametrize("lagging", [False, True])
def test_phase_increments_are_sines_with_a_lag(lagging: bool, form: str) -> None:
    theta, map, step, lag = phases(2, 4, 2, 3), weights(2, 2, 4), phases(2, 3), phases(2, 3)
    points, difference = kuramoto.points(theta), theta[:, None] - theta[:, :, None]
    mean = torch.einsum("bhtu,buhjc->bthjc", map, points)
    tangential, radial = (step * lag.cos(), step * lag.sin()) if lagging else (step, None)
    expected = step * torch.einsum("bhtu,btuhj->bthj", map, (difference + (lag if lagging else 0)).sin())
    same(
        kuramoto.phase_increment(theta, points, mean, tangential, radial), expected, theta, map, step, *[lag] * lagging
    )
    with torch.no_grad():
        same(kuramoto.phase_increment(theta, points, mean, tangential, radial), expected)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("drifting", ["not", "alike", "each row"])
def test_shifted_points_are_those_of_the_previous_token(drifting: str, count: int, form: str) -> None:
    theta, firsts = phases(2, 5, 2, 3), [phases(2, 1, 2, 3, 2), phases(2, 1, 2, 3, 2)]
    points = kuramoto.points(theta)
    drift = {"not": None, "alike": phases(5, 2, 3), "each row": phases(2, 5, 2, 3)}[drifting]
    drift = None if drift is None else kuramoto.points(drift.detach())
    keys = points if drift is None else torch.view_as_real(torch.view_as_complex(points) * torch.view_as_complex(drift))
    wants = [torch.cat([first, x[:, :-1]], 1) for first, x in zip(firsts, (keys, points), strict=True)]
    gots = kuramoto.shift_points(theta, points, drift, tuple(firsts[:count]))
    assert len(gots) == count
    for actual, expected, first in zip(gots, wants, firsts, strict=False):
        same(actual, expected, theta, first)
    together = [torch.cat([x.flatten() for x in each[:count]]) for each in (gots, wants)]
    same(*together, theta, *firsts[:count])
    nothing = kuramoto.shift_points(theta, points, drift, (None,) * count)
    assert not any(bool(x[:, 0].any()) for x in nothing)
    assert all(torch.equal(x[:, 1:], y[:, 1:]) for x, y in zip(nothing, gots, strict=True))


def test_points_and_harmonics_are_cosines_and_sines(form: str) -> None:
    theta = phases(3, 4)
    same(kuramoto.points(theta), torch.stack([theta.cos(), theta.sin()], -1), theta)
    for m, points in enumerate(kuramoto.harmonics(kuramoto.points(theta), 4), 1):
        same(points, kuramoto.points(m * theta), theta)
    with torch.no_grad():
        same(kuramoto.points(theta), torch.stack([theta.cos(), theta.sin()], -1))


@pytest.mark.parametrize("widest", [4.0, 1e3, 1.9e4, 2.1e4, 1e7, 1e30])
def test_points_are_accurate_for_large_angles(widest: float, form: str) -> None:
    theta = (widest * (2 * torch.rand(5000) - 1)).requires_grad_()
    far = theta.detach().double()
    truth, points = torch.stack([far.cos(), far.sin()], -1), kuramoto.points(theta)
    assert float((points.detach() - truth).abs().max()) < 3e-7
    (slope,) = torch.autograd.grad(points[:, 1].sum(), theta)
    assert float((slope - truth[:, 0]).abs().max()) < 3e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_points_are_rounded_once(dtype: torch.dtype) -> None:
    theta = (30 * torch.randn(100)).to(dtype)
    assert kuramoto.points(theta).dtype == dtype
    assert_close(kuramoto.points(theta), kuramoto.points(theta.double()).to(dtype), rtol=0, atol=4e-3)


def test_points_of_non_contiguous_angles(form: str) -> None:
    theta = phases(4, 6)
    views: list[Callable[[Tensor], Tensor]] = [lambda x: x.mT, lambda x: x[:, ::2], lambda x: x[:1].expand(3, 6)]
    for view in views:
        actual = kuramoto.points(view(theta))
        same(actual, torch.stack([view(theta).cos(), view(theta).sin()], -1), theta)
        mean = actual.flip(0)
        same(kuramoto.tangent(actual, mean), actual[..., 0] * mean[..., 1] - actual[..., 1] * mean[..., 0], theta)
    assert kuramoto.points(theta[:0]).shape == (0, 6, 2)


@given(theta=st.lists(ANGLES, min_size=1, max_size=5), turns=st.integers(-51, 51))
@settings(deadline=None, max_examples=25)
def test_full_turns_change_nothing(theta: list[float], turns: int) -> None:
    phase = torch.tensor(theta, dtype=torch.float64)
    same(kuramoto.points(phase + TURN * turns), kuramoto.points(phase))


def test_a_common_rotation_changes_neither_coupling_nor_energy() -> None:
    theta, map, drift = phases(2, 4, 2, 3), weights(2, 2, 4), phases(2, 3)
    same(kuramoto.coupling(theta + drift, map), kuramoto.coupling(theta, map), theta, map)
    same(kuramoto.energy(theta + drift, map), kuramoto.energy(theta, map), theta, map)


def test_the_coupling_descends_the_energy_of_its_row_for_any_map() -> None:
    theta, map = phases(2, 4, 2, 3), weights(2, 2, 4)
    energy, pull = kuramoto.energy(theta, map), kuramoto.coupling(theta, map)
    for b, t, h in product(range(2), range(4), range(2)):
        (slope,) = torch.autograd.grad(energy[b, t, h], theta, retain_graph=True)
        same(-slope[b, t, h], pull[b, t, h])


def test_a_symmetric_coupling_descends_half_of_the_whole_energy() -> None:
    theta, map = phases(2, 4, 2, 3), weights(2, 2, 4)
    map = (map + map.mT).detach()
    (slope,) = torch.autograd.grad(kuramoto.energy(theta, map).sum() / 2, theta)
    same(-slope, kuramoto.coupling(theta, map))


def test_a_causal_coupling_descends_no_energy_at_all() -> None:
    """The derivative of a gradient is symmetric."""
    theta, map = phases(1, 4, 1, 1), weights(1, 1, 4).detach()

    def skew(map: Tensor) -> float:
        slopes = torch.autograd.functional.jacobian(lambda x: kuramoto.coupling(x, map).flatten(), theta).view(4, 4)
        return float((slopes - slopes.mT).abs().max())  # type: ignore[union-attr]

    assert skew(map + map.mT) < 1e-12
    assert skew(map.tril()) > 0.1


@given(theta=st.lists(st.floats(-4, 4), min_size=1, max_size=12), step=st.floats(0, 1))
@settings(deadline=None, max_examples=25)
def test_uniform_coupling_never_lowers_the_order_parameter(theta: list[float], step: float) -> None:
    phase = torch.tensor(theta, dtype=torch.float64).view(1, -1, 1, 1)
    uniform = torch.full((1, 1, len(theta), len(theta)), 1 / len(theta), dtype=torch.float64)
    for _ in range(4):
        before = kuramoto.order_parameter(phase[:, :, 0])
        phase = phase + step * kuramoto.coupling(phase, uniform)
        assert float(kuramoto.order_parameter(phase[:, :, 0]) - before) > -1e-12


def test_a_too_large_step_can_lower_the_order_parameter() -> None:
    """The test above would fail for larger steps: near synchrony, steps above 2 overshoot and diverge."""
    theta = torch.tensor([-0.3, 0.3], dtype=torch.float64).view(1, 2, 1, 1)
    uniform = torch.full((1, 1, 2, 2), 0.5, dtype=torch.float64)
    after = theta + 3 * kuramoto.coupling(theta, uniform)
    assert float(kuramoto.order_parameter(after[:, :, 0])) < float(kuramoto.order_parameter(theta[:, :, 0]))


def test_the_order_parameter_is_the_length_of_the_mean_point() -> None:
    theta = phases(2, 5, 3)
    expected = torch.polar(torch.ones_like(theta), theta).mean(-2).abs()
    same(kuramoto.order_parameter(theta), expected, theta)


def test_first_and_second_derivatives_match_finite_differences(form: str) -> None:
    theta, points, mean = phases(3), phases(3, 2), phases(3, 2)
    for check in (gradcheck, gradgradcheck):
        assert check(kuramoto.points, theta)
        assert check(kuramoto.tangent, (points, mean))
        assert check(kuramoto.rotate_points, (points, mean))
        assert check(lambda x, m: kuramoto.tangent(kuramoto.points(x), m), (theta, mean))


def pulled(theta: Tensor, mean: Tensor, tangential: Tensor, radial: Tensor | None = None) -> Tensor:
    return kuramoto.phase_increment(theta, kuramoto.points(theta), mean, tangential, radial)


def delayed(theta: Tensor, drift: Tensor, first: Tensor) -> tuple[Tensor, ...]:
    return kuramoto.shift_points(theta, kuramoto.points(theta), drift, (first, first))


def test_derivatives_of_increments_and_shifts_match_finite_differences(form: str) -> None:
    theta, mean, tangential, radial = phases(2, 1, 2), phases(2, 1, 2, 2), phases(1, 2), phases(1, 2)
    late, drift, first = phases(1, 3, 1, 1), phases(3, 1, 1, 2).detach(), phases(1, 1, 1, 1, 2)
    for check in (gradcheck, gradgradcheck):
        assert check(pulled, (theta, mean, tangential, radial))
        assert check(pulled, (theta, mean, tangential))
        assert check(lambda x, f: delayed(x, drift, f), (late, first))
    for fixed in ((theta, mean, tangential.detach(), radial), (theta.detach(), mean, tangential, None)):
        assert gradgradcheck(pulled, fixed)


def test_gradients_with_create_graph_are_the_same(form: str) -> None:
    """Higher derivatives use PyTorch operations, because the kernels have none."""
    theta, mean, tangential, radial = phases(2, 1, 2), phases(2, 1, 2, 2), phases(1, 2), phases(1, 2)
    late, drift, first = phases(1, 3, 1, 1), kuramoto.points(phases(3, 1, 1).detach()), phases(1, 1, 1, 1, 2)
    for y, leaves in (
        (kuramoto.points(theta), (theta,)),
        (pulled(theta, mean, tangential, radial), (theta, mean, tangential, radial)),
        (torch.cat(delayed(late, drift, first)), (late, first)),
    ):
        weight = torch.randn_like(y)
        plain = torch.autograd.grad(y, leaves, weight, retain_graph=True)
        assert_close(torch.autograd.grad(y, leaves, weight, create_graph=True), plain, rtol=0, atol=1e-12)


def test_weights_may_be_broadcast_over_coordinates(form: str) -> None:
    theta, mean, *weighed = phases(2, 3, 4, 5), phases(2, 3, 4, 5, 2), phases(4, 1), phases(4, 1)
    spread = [x.expand(4, 5).contiguous() for x in weighed]
    assert_close(pulled(theta, mean, *weighed), pulled(theta, mean, *spread), rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_angles_raise(bad: float, dtype: torch.dtype, mode: Callable[[], Any], form: str) -> None:
    theta = torch.zeros(2000, dtype=dtype)
    theta[1234] = bad
    with mode(), pytest.raises(NotFiniteError, match="phases must be finite") as raised:
        kuramoto.points(theta)
    assert isinstance(raised.value, UsageError)
    assert "\n" not in str(raised.value)
