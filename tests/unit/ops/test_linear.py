from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from qkflow.ops import linear as module
from qkflow.ops.csrc import build
from qkflow.ops.linear import forward, input_gradient, linear, weight_gradient
from qkflow.ops.newton_schulz import _torch, by_kernel

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
needs_kernels = pytest.mark.skipif(build.load_error() is not None, reason="no C kernels")


@pytest.fixture(params=[pytest.param(True, marks=needs_kernels), False])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Products by the kernels for any number of rows, or by PyTorch."""
    monkeypatch.setattr(module, "_is_amd_with_mkl", lambda: request.param)
    monkeypatch.setattr(module, "_MIN_ROWS", 1)
    return request.param


def inputs(n: int, i: int, o: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x, weight, gy = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((n, i), (o, i), (n, o)))
    return x.to(dtype), (weight / i**0.5).to(dtype), (gy / max(n, 1) ** 0.5).to(dtype)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (67, 33, 20), (300, 64, 132), (70, 132, 64), (1100, 16, 257)])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_products_match_float64(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    x, weight, gy = inputs(*shape, dtype)
    tolerance = {"rtol": TOLERANCES[dtype], "atol": 5 * TOLERANCES[dtype]}
    assert_close(forward(x, weight).double(), x.double() @ weight.double().T, **tolerance)
    assert_close(input_gradient(gy, weight).double(), gy.double() @ weight.double(), **tolerance)
    assert_close(weight_gradient(gy, x).double(), gy.double().T @ x.double(), **tolerance)
    added = input_gradient(gy, weight, add_to=x.clone())
    assert_close(added.double(), x.double() + gy.double() @ weight.double(), **tolerance)


@pytest.mark.usefixtures("kernel")
def test_gradients_of_strided_inputs() -> None:
    x, weight, _ = inputs(12, 6, 5, torch.float64)
    x, weight = x.view(3, 4, 6).requires_grad_(), weight.requires_grad_()
    view, gy = x.transpose(0, 1)[:, ::2], torch.randn(2, 4, 5, dtype=torch.float64).transpose(0, 1)
    actual, expected = (torch.autograd.grad(y, (x, weight), gy) for y in (linear(view, weight), view @ weight.T))
    for a, b in zip(actual, expected, strict=True):
        assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("kernel")
def test_no_rows_give_zero_gradients() -> None:
    x, weight = torch.zeros(2, 0, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    y = linear(x, weight)
    y.sum().backward()
    assert y.shape == (2, 0, 4)
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.usefixtures("kernel")
def test_second_derivatives() -> None:
    x, weight, _ = inputs(3, 4, 2, torch.float64)
    leaves = x.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(linear, leaves)
    assert torch.autograd.gradgradcheck(lambda x, weight: linear(x, weight) ** 2, leaves)


@needs_kernels
def test_results_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_is_amd_with_mkl", lambda: True)
    monkeypatch.setattr(module, "_SINGLE_THREAD", 0)
    x, weight, gy = inputs(1100, 40, 100, torch.float32)
    results = []
    for n_threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=n_threads: n)
        results.append((forward(x, weight), input_gradient(gy, weight), weight_gradient(gy, x)))
    assert all(map(torch.equal, *results))


@needs_kernels
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (2, 70, 33), (2, 33, 70), (0, 3, 4), (1, 130, 130)])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_newton_schulz_matches_pytorch(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    tolerance = TOLERANCES[dtype]
    assert_close(by_kernel(x).double(), _torch(x.double()), rtol=tolerance, atol=tolerance)
