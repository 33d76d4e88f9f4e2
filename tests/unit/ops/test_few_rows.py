"""The native layers for a few rows equal the modules that they replace."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from jaxtyping import TypeCheckError
from torch import Tensor, nn
from torch.testing import assert_close

from qkflow.errors import UsageError
from qkflow.mechanisms.base import is_plain_linear
from qkflow.ops import few_rows
from qkflow.ops.csrc import build
from qkflow.ops.kuramoto import points
from qkflow.ops.norm import rms_norm

build.load()
pytestmark = pytest.mark.skipif(not build.is_loaded(), reason="no C kernels")


def swiglu(u: Tensor, gate: Tensor, up: Tensor, output: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(u, gate)) * F.linear(u, up), output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("width", "hidden"), [(128, 33), (30, 70), (5, 3)])
def test_feed_forward_branch(dtype: torch.dtype, rows: int, width: int, hidden: int) -> None:
    torch.manual_seed(0)
    x, norm = torch.randn(rows, 1, width, dtype=dtype), torch.randn(width, dtype=dtype)
    output = torch.randn(width, hidden, dtype=dtype) / hidden**0.5
    tolerance = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 1e-5}
    for inputs, u, weight in (
        (width, x, None),
        (2 * width, points(x).flatten(2), None),
        (width, rms_norm(x, norm), norm),
    ):
        gate, up = (torch.randn(hidden, inputs, dtype=dtype) / inputs**0.5 for _ in range(2))
        y = few_rows.add_swiglu(x, weight, 1e-5, gate, up, output)
        assert_close(y, x + swiglu(u, gate, up, output), **tolerance)


def test_norm() -> None:
    x, weight = torch.randn(2, 1, 37, dtype=torch.float64), torch.randn(37, dtype=torch.float64)
    assert_close(few_rows.norm(x, weight, 1e-3), F.rms_norm(x, (37,), weight, 1e-3))


def test_phases_must_be_finite() -> None:
    gate, output = torch.zeros(2, 6), torch.zeros(3, 2)
    with pytest.raises(ValueError, match="finite"):
        few_rows.add_swiglu(torch.full((1, 1, 3), torch.nan), None, 0.0, gate, gate, output)


REFUSALS = UsageError, TypeCheckError  # the tests check types at run time


def test_operands_that_do_not_fit_are_refused() -> None:
    x, weight, gate, output = torch.zeros(2, 1, 3), torch.zeros(3), torch.zeros(4, 3), torch.zeros(3, 4)
    for wrong in (torch.zeros(2, 2, 3), torch.zeros(2, 1, 4), torch.zeros(2, 3)):
        with pytest.raises(REFUSALS):
            few_rows.norm(wrong, weight, 1e-5)
        with pytest.raises(REFUSALS):
            few_rows.add_swiglu(wrong, weight, 1e-5, gate, gate, output)
    for operands in ((weight[:2], gate, gate, output), (weight, gate, gate[:3], output), (None, gate, gate, gate)):
        norm, *matrices = operands
        with pytest.raises(REFUSALS, match=r"do not fit|Type-check"):
            few_rows.add_swiglu(x, norm, 1e-5, *matrices)


def test_supports_one_token_without_gradients() -> None:
    x, weight, supported = torch.zeros(2, 1, 4), torch.zeros(4, 4), []
    assert not few_rows.supports(x, weight)
    with torch.no_grad():
        assert few_rows.supports(x, weight)
        assert not few_rows.supports(torch.zeros(2, 3, 4), weight)
        assert not few_rows.supports(torch.zeros(few_rows.MAX_ROWS + 1, 1, 4), weight)
        assert not few_rows.supports(x, None)
        assert not few_rows.supports(x, weight.double())
        assert not few_rows.supports(x, weight.t()[1:])
        assert not few_rows.supports(x.bfloat16(), weight.bfloat16())
        with torch.autocast("cpu"):
            assert not few_rows.supports(x, weight)
        torch.vmap(lambda row: supported.append(few_rows.supports(row, weight)) or row)(x[None])
        assert supported == [False]


def test_plain_weight_is_that_of_a_linear_layer_without_hooks() -> None:
    linear = nn.Linear(3, 2, bias=False)
    assert few_rows.plain_weight(linear) is linear.weight
    assert few_rows.plain_weight(nn.Linear(3, 2)) is None
    assert few_rows.plain_weight(nn.Identity()) is None
    handle = linear.register_forward_hook(lambda *_: None)
    assert few_rows.plain_weight(linear) is None
    handle.remove()
    assert few_rows.plain_weight(linear) is linear.weight
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert few_rows.plain_weight(linear) is None
        assert not is_plain_linear(linear)
    finally:
        handle.remove()
    assert is_plain_linear(linear)
