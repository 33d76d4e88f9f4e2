from __future__ import annotations

import cmath

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from qkflow.ops.rotary import apply_rotary, halves_to_pairs, pairs_to_halves, rotary_factors

BASE = 10000.0


def rotated(x: Tensor, offset: int | Tensor = 0, *, heads: int | None = None, base: float = BASE) -> Tensor:
    factors = rotary_factors(offset, x.shape[1], heads=heads or x.shape[2], width=x.shape[-1], base=base, like=x)
    return apply_rotary(x, factors)


def random(b: int = 2, t: int = 5, h: int = 3, k: int = 8) -> Tensor:
    return torch.randn(b, t, h, k, dtype=torch.float64)


def naive_rotary(x: Tensor, first: list[int], base: float) -> Tensor:
    """The formula with Python's complex numbers, one pair at a time; row b starts at position first[b]."""
    out = x.clone()
    for b, t, h, i in torch.cartesian_prod(*map(torch.arange, (*x.shape[:3], x.shape[3] // 2))).tolist():
        angle = (first[b] + t) * base ** (-2 * i / x.shape[3])
        z = complex(x[b, t, h, 2 * i], x[b, t, h, 2 * i + 1]) * cmath.exp(1j * angle)
        out[b, t, h, 2 * i], out[b, t, h, 2 * i + 1] = z.real, z.imag
    return out


@pytest.mark.parametrize("base", [BASE, 500.0])
@pytest.mark.parametrize("offset", [0, 7, 4096])
@pytest.mark.parametrize("k", [2, 6, 8])
def test_rotations_match_the_formula(k: int, offset: int, base: float) -> None:
    x = random(k=k)
    assert_close(rotated(x, offset, base=base), naive_rotary(x, [offset, offset], base), rtol=0, atol=1e-11)


def test_rows_may_have_different_offsets() -> None:
    x = random()
    assert_close(rotated(x, torch.tensor([3, 11])), naive_rotary(x, [3, 11], BASE), rtol=0, atol=1e-12)


@given(st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 5000))
@settings(deadline=None, max_examples=25)
def test_dot_products_depend_only_on_distance(a: int, b: int, shift: int) -> None:
    generator = torch.Generator().manual_seed(a)
    q, k = (torch.randn(1, 1, 1, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    score = (rotated(q, a) * rotated(k, b)).sum()
    shifted_score = (rotated(q, a + shift) * rotated(k, b + shift)).sum()
    assert_close(shifted_score, score, rtol=0, atol=1e-10)


def test_rotations_keep_the_length_of_pairs() -> None:
    x = random()
    assert_close(rotated(x, 9).unflatten(-1, (-1, 2)).norm(dim=-1), x.unflatten(-1, (-1, 2)).norm(dim=-1))


def test_position_zero_is_the_identity() -> None:
    x = random(t=1)
    assert torch.equal(rotated(x), x)


@pytest.mark.parametrize("offset", [3, torch.tensor([3, 8])])
def test_factors_may_have_more_heads(offset: int | Tensor) -> None:
    x = random(h=2)
    assert torch.equal(rotated(x, offset, heads=6), rotated(x, offset))


def test_cached_factors_are_correct_for_every_dtype() -> None:
    """Tables are cached between calls; a cached table must match the request."""
    x = random()
    expected = naive_rotary(x, [5, 5], BASE)
    for _ in range(2):
        for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
            with mode():
                assert_close(rotated(x, 5), expected, rtol=0, atol=1e-12)
                assert_close(rotated(x.float(), 5), expected.float(), rtol=0, atol=1e-5)
                assert_close(rotated(x[..., :4], 5), naive_rotary(x[..., :4], [5, 5], BASE), rtol=0, atol=1e-12)
                assert_close(rotated(x[:, :2], 5), expected[:, :2], rtol=0, atol=1e-12)
        leaf = x.clone().requires_grad_()
        rotated(leaf, 5).sum().backward()
        assert leaf.grad is not None


def test_complex_numbers_and_cosines_give_the_same_values_and_gradients() -> None:
    x = random().requires_grad_()
    factors = rotary_factors(4, 5, heads=3, width=8, base=BASE, like=x)
    assert factors.is_complex()
    complex_way, real_way = apply_rotary(x, factors), apply_rotary(x, torch.view_as_real(factors))
    assert_close(real_way, complex_way, rtol=0, atol=1e-14)
    weight = torch.randn_like(x)
    gradients = [torch.autograd.grad(y, x, weight)[0] for y in (complex_way, real_way)]
    assert_close(gradients[1], gradients[0], rtol=0, atol=1e-14)


@pytest.mark.parametrize("offset", [0, 10_000])
def test_bfloat16_uses_float32_angles(offset: int) -> None:
    x = random().bfloat16()
    actual = rotated(x, offset)
    assert actual.dtype == torch.bfloat16
    assert_close(actual.double(), naive_rotary(x.double(), [offset] * 2, BASE), rtol=0, atol=0.05)


@pytest.mark.parametrize(
    "x",
    [random().transpose(1, 2), random(k=10)[..., 1:9], random(h=6)[:, :, ::2], random(b=1)[:, :1].expand(2, 5, 3, 8)],
    ids=["transposed", "odd offset", "every other head", "expanded"],
)
def test_non_contiguous_inputs(x: Tensor) -> None:
    assert torch.equal(rotated(x, 2), rotated(x.contiguous(), 2))


def test_halves_become_pairs_and_back() -> None:
    weight = torch.randn(3 * 8, 5)
    pairs = halves_to_pairs(weight, heads=3)
    assert torch.equal(pairs_to_halves(pairs, heads=3), weight)
    assert torch.equal(halves_to_pairs(pairs_to_halves(weight, heads=3), heads=3), weight)
    head = pairs[8:16]
    assert torch.equal(head[0::2], weight[8:12])
    assert torch.equal(head[1::2], weight[12:16])


def test_rotating_pairs_equals_rotating_reordered_halves() -> None:
    """As in Llama: x cos + (-second half, first half) sin."""
    x = random(h=1)
    angles = torch.arange(5.0, dtype=torch.float64)[:, None] * BASE ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    cos, sin = (torch.cat([f(angles)] * 2, -1)[None, :, None] for f in (torch.cos, torch.sin))
    first, second = x.chunk(2, -1)
    halves = x * cos + torch.cat([-second, first], -1) * sin
    order = halves_to_pairs(torch.arange(8), heads=1)
    assert_close(rotated(x[..., order]), halves[..., order], rtol=0, atol=1e-12)
