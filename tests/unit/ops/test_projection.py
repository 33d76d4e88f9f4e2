from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from qkflow.ops.projection import project_heads
from qkflow.ops.rotary import rotary_factors

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
WIDTHS = 8, 8, 10
HEADS = 4, 2, 2


def inputs(t: int, dtype: torch.dtype = torch.float64, *, width: int = 24) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    shapes = (2, t, width), *((n * k, width) for n, k in zip(HEADS, WIDTHS, strict=True))
    return tuple(
        (torch.randn(shape, generator=g, dtype=torch.float64) / 5).to(dtype).requires_grad_() for shape in shapes
    )


def reference(x: Tensor, weights: tuple[Tensor, ...], offset: int | Tensor | None) -> tuple[Tensor, ...]:
    """Rotate as complex numbers."""
    y = [(x @ weight.T).unflatten(-1, (-1, width)) for weight, width in zip(weights, WIDTHS, strict=True)]
    if offset is not None:
        positions = torch.arange(x.shape[1]) + (offset if isinstance(offset, int) else offset[:, None])
        angles = positions[..., None] * 100.0 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
        turn = torch.polar(torch.ones_like(angles), angles).unsqueeze(-2)
        for i in range(2):
            y[i] = torch.view_as_real(torch.view_as_complex(y[i].unflatten(-1, (-1, 2))) * turn).flatten(-2)
    return tuple(y)


def values_and_gradients(outputs: tuple[Tensor, ...], leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=g, dtype=torch.float64).to(y.dtype) for y in outputs]
    return *outputs, *torch.autograd.grad(outputs, leaves, weights)


@pytest.mark.parametrize("offset", [None, 0, 3, torch.tensor([3, 9])])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("t", [0, 1, 37])
def test_values_and_gradients_match_the_formula(dtype: torch.dtype, t: int, offset: int | Tensor | None) -> None:
    leaves = x, *weights = inputs(t, dtype)
    doubles = tuple(tensor.detach().double().requires_grad_() for tensor in leaves)
    factors = None if offset is None else rotary_factors(offset, t, heads=4, width=8, base=100.0, like=x)
    actual = values_and_gradients(project_heads(x, weights, WIDTHS, factors), leaves)
    expected = values_and_gradients(reference(doubles[0], doubles[1:], offset), doubles)
    for a, b in zip(actual, expected, strict=True):
        assert_close(a.double(), b, rtol=TOLERANCES[dtype], atol=10 * TOLERANCES[dtype])


def test_strided_inputs_and_gradients() -> None:
    x, *weights = inputs(6)
    view, leaves = x.transpose(0, 1)[::2], (x, *weights)
    factors = rotary_factors(0, 2, heads=4, width=8, base=100.0, like=x)
    outputs = project_heads(view, weights, WIDTHS, factors), reference(view, tuple(weights), 0)
    grads = [
        torch.randn(2, 3, heads, width).double().transpose(0, 1) for heads, width in zip(HEADS, WIDTHS, strict=True)
    ]
    actual, expected = (torch.autograd.grad(y, leaves, grads) for y in outputs)
    for a, b in zip(actual, expected, strict=True):
        assert_close(a, b, rtol=0, atol=1e-12)


def test_second_derivatives() -> None:
    x, *weights = inputs(2, width=6)
    factors = rotary_factors(0, 2, heads=4, width=8, base=100.0, like=x)

    def total(x: Tensor, weight: Tensor) -> Tensor:
        return sum((y**3).sum() for y in project_heads(x, (weight, *weights[1:]), WIDTHS, factors))  # pyright: ignore

    assert torch.autograd.gradgradcheck(total, (x, weights[0]))


@pytest.mark.parametrize("trained", [(0,), (1,), (3,), (0, 2)])
def test_second_derivatives_with_frozen_inputs(trained: tuple[int, ...]) -> None:
    leaves = [x if i in trained else x.detach() for i, x in enumerate(inputs(2, width=6))]
    factors = rotary_factors(0, 2, heads=4, width=8, base=100.0, like=leaves[0])

    def total(x: Tensor, *weights: Tensor) -> Tensor:
        return sum((y**3).sum() for y in project_heads(x, weights, WIDTHS, factors))  # pyright: ignore

    assert torch.autograd.gradgradcheck(total, leaves)


def test_frozen_weights_get_no_gradient() -> None:
    x, query, key, value = inputs(3)
    sum(y.sum() for y in project_heads(x.detach(), (query, key.detach(), value), WIDTHS)).backward()  # pyright: ignore
    assert query.grad is not None
    assert value.grad is not None
    assert key.grad is None
