from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.testing import assert_close

from qkflow.ops.csrc import build
from qkflow.ops.norm import add_rms_norm, rms_norm


def inputs(*shape: int, dtype: torch.dtype = torch.float64, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    x, weight = torch.randn(*shape, dtype=dtype) + shift, torch.randn(shape[-1], dtype=dtype)
    return x.requires_grad_(), weight.requires_grad_()


def gradients(y: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return torch.autograd.grad(y, inputs, weight.to(y.dtype))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.sampled_from([0.0, 30.0]), st.sampled_from([1e-5, 0.5]))
@settings(deadline=None, max_examples=25)
def test_values_and_gradients_match_pytorch(shape: list[int], shift: float, eps: float) -> None:
    x, weight = inputs(*shape, shift=shift)
    actual, expected = rms_norm(x, weight, eps), F.rms_norm(x, x.shape[-1:], weight, eps)
    assert_close(actual, expected, rtol=0, atol=1e-13)
    for a, b in zip(gradients(actual, x, weight), gradients(expected, x, weight), strict=True):
        assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_gradients_match_finite_differences() -> None:
    assert torch.autograd.gradcheck(rms_norm, inputs(2, 3, 5))


@pytest.mark.parametrize("grad", [True, False])
def test_the_default_eps_is_1e_5_also_without_gradients(grad: bool) -> None:
    x, weight = inputs(3, 4)
    with torch.set_grad_enabled(grad):
        assert_close(rms_norm(1e-3 * x, weight), F.rms_norm(1e-3 * x, (4,), weight, 1e-5), rtol=1e-12, atol=0)


def test_zeros_give_zeros_and_finite_gradients() -> None:
    x, weight = torch.zeros(2, 4, requires_grad=True), torch.ones(4, requires_grad=True)
    y = rms_norm(x, weight)
    assert torch.equal(y, torch.zeros(2, 4))
    assert all(g.isfinite().all() for g in gradients(y, x, weight))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_are_summed_in_float32(dtype: torch.dtype, grad: bool) -> None:
    x, weight = inputs(3, 512, dtype=dtype, shift=200.0)
    with torch.set_grad_enabled(grad):
        actual = rms_norm(x, weight)
        expected = F.rms_norm(x.double(), (512,), weight.double(), 1e-5)
    assert actual.dtype == dtype
    assert_close(actual.double(), expected, rtol=1e-2, atol=1e-3)
    if grad:
        for a, b in zip(gradients(actual, x, weight), gradients(expected, x, weight), strict=True):
            assert a.dtype == dtype
            assert_close(a.double(), b.double(), rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("grad", [True, False])
def test_autocast_keeps_the_input_dtype(grad: bool) -> None:
    x, weight = inputs(3, 8, dtype=torch.bfloat16)[0], torch.randn(8, requires_grad=True)
    with torch.set_grad_enabled(grad):
        actual = rms_norm(x, weight)
        assert actual.dtype == torch.bfloat16
        assert_close(actual.double(), F.rms_norm(x.double(), (8,), weight.double(), 1e-5), rtol=1e-2, atol=1e-2)
    if grad:
        assert [g.dtype for g in gradients(actual, x, weight)] == [torch.bfloat16, torch.float32]


def test_non_contiguous_inputs() -> None:
    x, weight = inputs(3, 4, 5)
    for view in (x.transpose(0, 1), x.permute(2, 0, 1)[:5].permute(1, 2, 0), x[:, ::2], x[:1].expand(3, 4, 5)):
        actual, expected = rms_norm(view, weight), F.rms_norm(view, (5,), weight, 1e-5)
        assert_close(actual, expected, rtol=0, atol=1e-13)
        for a, b in zip(gradients(actual, x, weight), gradients(expected, x, weight), strict=True):
            assert_close(a, b, rtol=0, atol=1e-12)
    strided = torch.randn(4, 3, dtype=torch.float64).t()
    flat, weight = inputs(3, 4)
    actual = torch.autograd.grad(rms_norm(flat, weight), flat, strided)[0]
    assert_close(
        actual, torch.autograd.grad(F.rms_norm(flat, (4,), weight, 1e-5), flat, strided)[0], rtol=0, atol=1e-12
    )


def test_inputs_are_not_modified() -> None:
    x, weight = inputs(3, 4)
    before = x.detach().clone(), weight.detach().clone()
    rms_norm(x, weight).sum().backward()
    with torch.no_grad():
        rms_norm(x, weight)
    assert torch.equal(x, before[0])
    assert torch.equal(weight, before[1])


def test_second_derivatives_are_right() -> None:
    """Gradient penalties need second derivatives."""
    x, weight = inputs(3, 5)
    u, v = torch.randn(2, 3, 5, dtype=torch.float64)

    def curvature(y: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad((y * u).sum(), x, create_graph=True)
        return torch.autograd.grad((gradient * v).sum(), x)[0]

    expected = curvature(F.rms_norm(x, (5,), weight, 1e-5))
    assert_close(curvature(rms_norm(x, weight)), expected, rtol=0, atol=1e-10)
    assert torch.autograd.gradgradcheck(lambda x, weight: rms_norm(x, weight).square(), (x, weight))
    assert torch.autograd.gradgradcheck(rms_norm, (x[0], weight))  # a single vector
    assert torch.autograd.gradgradcheck(lambda x, weight: rms_norm(x[::2], weight).square(), (x, weight))  # a copy


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 70, 33), (130, 128), (2, 0, 4)])
def test_the_norm_of_a_residual_sum(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    (x, weight), branch = inputs(*shape, dtype=dtype), inputs(*shape, dtype=dtype)[0]
    leaves = x, branch, weight
    doubles = [tensor.detach().double().requires_grad_() for tensor in leaves]
    expected_sum = doubles[0] + doubles[1]
    expected = expected_sum, F.rms_norm(expected_sum, shape[-1:], doubles[2], 1e-5)
    actual, tolerance = add_rms_norm(*leaves), 1e-10 if dtype == torch.float64 else 1e-5
    grads = [torch.randn(shape, dtype=dtype) for _ in range(2)]
    actual_gradients = torch.autograd.grad(actual, leaves, grads)
    expected_gradients = torch.autograd.grad(expected, doubles, [grad.double() for grad in grads])
    for a, b in zip((*actual, *actual_gradients), (*expected, *expected_gradients), strict=True):
        assert_close(a.double(), b, rtol=tolerance, atol=10 * tolerance)


def test_second_derivatives_of_the_norm_of_a_residual_sum() -> None:
    (x, weight), branch = inputs(2, 5), inputs(2, 5)[0]

    def total(x: Tensor, branch: Tensor, weight: Tensor) -> Tensor:
        x_sum, y = add_rms_norm(x, branch, weight)
        return (x_sum * y.square()).sum()

    assert torch.autograd.gradgradcheck(total, (x, branch, weight))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_forward_mode_uses_pytorch() -> None:
    x, weight = (tensor.detach() for tensor in inputs(3, 4))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        actual = forward_ad.unpack_dual(add_rms_norm(dual, dual, weight)[1])
        s = 2 * dual
        expected = forward_ad.unpack_dual(s * (s.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight)
        assert_close(actual.primal, expected.primal, rtol=0, atol=1e-12)
        assert_close(actual.tangent, expected.tangent, rtol=0, atol=1e-12)


@pytest.mark.skipif(build.load_error() is not None, reason="no C kernels")
def test_gradients_do_not_depend_on_the_number_of_threads() -> None:
    x, grad, weight = torch.randn(300, 33), torch.randn(300, 33), torch.randn(33)
    inverse, results = torch.rand(300), []
    for n_threads in (1, 2):
        results.append((torch.empty(300, 33), torch.empty(33)))
        build.call("rms_norm_backward", "lli", (300, 33, n_threads), (grad, None, x, weight, inverse, *results[-1]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
