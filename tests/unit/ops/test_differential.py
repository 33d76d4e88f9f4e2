from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from qkflow.ops.differential import differential_attention, differential_lambda, differential_map, lambda_init


def naive_differential(q: Tensor, k: Tensor, v: Tensor, lam: float, scale: float) -> tuple[Tensor, Tensor]:
    """A = softmax(q1 k1') - lambda softmax(q2 k2') and A v, causal, with loops."""
    q, k, v = q.detach(), k.detach(), v.detach()
    b, t, h, g = *q.shape[:2], q.shape[2] // 2, k.shape[2] // 2
    weights = torch.zeros(b, h, t, t, dtype=torch.float64)
    out = torch.zeros(b, t, h, v.shape[-1], dtype=torch.float64)
    for row, head, time in torch.cartesian_prod(torch.arange(b), torch.arange(h), torch.arange(t)).tolist():
        group = head // (h // g)
        for half, sign in ((0, 1.0), (1, -lam)):
            query = q[row, time, 2 * head + half]
            scores = [math.exp(float(query @ k[row, s, 2 * group + half]) * scale) for s in range(time + 1)]
            for s, score in enumerate(scores):
                weights[row, head, time, s] += sign * score / sum(scores)
        for s in range(time + 1):
            out[row, time, head] += weights[row, head, time, s] * v[row, s, group]
    return weights, out


def inputs(t: int, heads: int, groups: int) -> list[Tensor]:
    shapes = ((2, t, 2 * heads, 4), (2, t, 2 * groups, 4), (2, t, groups, 8))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("t", [1, 2, 5])
@pytest.mark.parametrize("scale", [None, 0.2])
def test_both_forms_match_the_formulas(t: int, heads: int, groups: int, scale: float | None) -> None:
    q, k, v = inputs(t, heads, groups)
    weights, out = naive_differential(q, k, v, 0.37, 4**-0.5 if scale is None else scale)
    lam = torch.tensor(0.37, dtype=torch.float64)
    assert_close(differential_map(q, k, lam, causal=True, scale=scale), weights, rtol=0, atol=1e-13)
    assert_close(differential_attention(q, k, v, lam, causal=True, scale=scale), out, rtol=0, atol=1e-13)


@pytest.mark.parametrize("t", [1, 7])
def test_the_fused_form_equals_the_map_times_the_values_with_gradients(t: int) -> None:
    q, k, v = inputs(t, 4, 2)
    lam = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(t, t) < 0.6
    mask |= torch.eye(t, dtype=torch.bool)
    actual = differential_attention(q, k, v, lam, mask=mask)
    expected = torch.einsum("bhts,bshv->bthv", differential_map(q, k, lam, mask=mask), v.repeat_interleave(2, dim=2))
    assert_close(actual, expected, rtol=0, atol=1e-13)
    weight = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad(y, (q, k, v, lam), weight) for y in (actual, expected)), strict=True):
        assert_close(a, b, rtol=0, atol=1e-12)


def test_rows_of_the_map_sum_to_one_minus_lambda() -> None:
    q, k, _ = inputs(5, 2, 2)
    weights = differential_map(q, k, torch.tensor(0.3, dtype=torch.float64), causal=True)
    assert_close(weights.sum(-1), torch.full_like(weights.sum(-1), 0.7))


def test_with_lambda_zero_it_is_the_first_map() -> None:
    q, k, v = inputs(5, 2, 2)
    none = torch.tensor(0.0, dtype=torch.float64)
    changed = k.detach().clone()
    changed[:, :, 1::2] += 1
    assert_close(
        differential_attention(q, k, v, none, causal=True), differential_attention(q, changed, v, none, causal=True)
    )


def test_lambda_matches_the_formula() -> None:
    q1, k1, q2, k2 = torch.randn(4, 6, dtype=torch.float64)
    expected = math.exp(sum((q1 * k1).tolist())) - math.exp(sum((q2 * k2).tolist())) + 0.25
    assert float(differential_lambda(q1, k1, q2, k2, 0.25)) == pytest.approx(expected, abs=1e-13)


@pytest.mark.parametrize("layer", [0, 1, 5, 30])
def test_initial_lambda_increases_with_depth(layer: int) -> None:
    assert lambda_init(layer) == pytest.approx(0.8 - 0.6 * math.exp(-0.3 * layer), abs=1e-15)
    assert lambda_init(layer) < lambda_init(layer + 1) < 0.8
