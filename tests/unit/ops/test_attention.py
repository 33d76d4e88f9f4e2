from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from qkflow.ops.attention import attention, attention_map, causal_mask


def inputs(t: int, s: int, *, heads: int = 4, groups: int = 4, width: int = 8, values: int = 8) -> list[Tensor]:
    q = torch.randn(2, t, heads, width, dtype=torch.float64)
    k = torch.randn(2, s, groups, width, dtype=torch.float64)
    v = torch.randn(2, s, groups, values, dtype=torch.float64)
    return [x.requires_grad_() for x in (q, k, v)]


def naive_map(q: Tensor, k: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Equation (1) with loops over Python numbers; `visible[b][t][s]` is the mask."""
    q, k = q.detach(), k.detach()
    out = torch.zeros(q.shape[0], q.shape[2], q.shape[1], k.shape[1], dtype=torch.float64)
    for b, h, t in torch.cartesian_prod(*map(torch.arange, (q.shape[0], q.shape[2], q.shape[1]))).tolist():
        group = h // (q.shape[2] // k.shape[2])
        raw = {s: float(q[b, t, h] @ k[b, s, group]) * scale for s in range(k.shape[1]) if visible[b, t, s]}
        total = sum(math.exp(value) for value in raw.values())
        for s, value in raw.items():
            out[b, h, t, s] = math.exp(value) / total
    return out


def gather(weights: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhts,bshv->bthv", weights, v.repeat_interleave(weights.shape[1] // v.shape[2], dim=2))


def agree(actual: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    assert_close(actual, expected, rtol=0, atol=1e-12)
    weight = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad(actual, inputs, weight), torch.autograd.grad(expected, inputs, weight), strict=True
    ):
        assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("t", [1, 2, 5])
def test_the_map_matches_the_formula(t: int, groups: int) -> None:
    q, k, _ = inputs(t, t, groups=groups)
    causal = torch.ones(t, t, dtype=torch.bool).tril().expand(2, t, t)
    assert_close(attention_map(q, k, causal=True), naive_map(q, k, causal, 8**-0.5), rtol=0, atol=1e-14)
    assert_close(attention_map(q, k), naive_map(q, k, torch.ones_like(causal), 8**-0.5), rtol=0, atol=1e-14)
    assert_close(attention_map(q, k, causal=True, scale=0.3), naive_map(q, k, causal, 0.3), rtol=0, atol=1e-14)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("t", [1, 2, 7, 33])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.2])
def test_the_fused_form_equals_the_naive_form(t: int, groups: int, causal: bool, scale: float | None) -> None:
    args = inputs(t, t, groups=groups)
    q, k, v = args
    expected = gather(attention_map(q, k, causal=causal, scale=scale), v)
    agree(attention(q, k, v, causal=causal, scale=scale), expected, args)


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize(("t", "s"), [(1, 1), (1, 9), (5, 9), (9, 5)])
@pytest.mark.parametrize("rows", [False, True])
def test_both_forms_agree_under_any_mask(t: int, s: int, groups: int, rows: bool) -> None:
    args = inputs(t, s, groups=groups)
    q, k, v = args
    mask = torch.rand((2, 1, t, s) if rows else (t, s)) < 0.5
    mask[..., 0] = True
    weights = attention_map(q, k, mask=mask)
    assert bool((weights[(~mask).expand_as(weights)] == 0).all())
    agree(attention(q, k, v, mask=mask), gather(weights, v), args)


def test_values_may_be_wider_than_keys() -> None:
    args = inputs(5, 5, values=11)
    q, k, v = args
    agree(attention(q, k, v, causal=True), gather(attention_map(q, k, causal=True), v), args)


def test_large_scores_stay_finite() -> None:
    q, k, v = (1e3 * x.detach() for x in inputs(6, 6))
    assert attention_map(q, k, causal=True).isfinite().all()
    assert attention(q, k, v, causal=True).isfinite().all()


positions = st.lists(st.integers(-1, 8), min_size=1, max_size=7)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=5), positions, st.none() | st.integers(1, 5))
@settings(deadline=None, max_examples=25)
def test_the_causal_mask_matches_its_definition(queries: list[int], keys: list[int], window: int | None) -> None:
    mask = causal_mask(torch.tensor(queries), torch.tensor(keys), window)
    assert mask.shape == (len(queries), len(keys))
    for query, row in zip(queries, mask.tolist(), strict=True):
        expected = [0 <= key <= query and (window is None or query - key < window) for key in keys]
        assert row == (expected if any(expected) else [True] * len(keys))


def test_rows_with_different_positions_get_separate_masks() -> None:
    queries, keys = torch.tensor([[2, 3], [0, 1]]), torch.tensor([[0, 1, 2, 3], [0, 1, -1, -1]])
    mask = causal_mask(queries, keys)
    assert mask.shape == (2, 1, 2, 4)
    assert mask[0, 0].int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert mask[1, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0]]
    shared = causal_mask(torch.tensor([1]), keys)
    assert torch.equal(shared, causal_mask(torch.tensor([[1], [1]]), keys))
