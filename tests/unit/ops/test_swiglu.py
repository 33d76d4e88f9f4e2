from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.testing import assert_close

from qkflow.mechanisms import StandardAttention
from qkflow.models import Block, SwiGLU
from qkflow.ops.csrc import build
from qkflow.ops.swiglu import swiglu

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}


def reference(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(x @ gate.T) * (x @ up.T)


def inputs(rows: int, width: int, hidden: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    shapes = (2, rows, width), (hidden, width), (hidden, width)
    return tuple(
        (torch.randn(shape, generator=g, dtype=torch.float64) / shape[-1] ** 0.5).to(dtype).requires_grad_()
        for shape in shapes
    )


def value_and_gradients(y: Tensor, leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.dtype)
    return y, *torch.autograd.grad(y, leaves, weight)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (70, 33, 20), (40, 64, 132)])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_values_and_gradients_match_the_formula(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    leaves = inputs(*shape, dtype=dtype)
    doubles = tuple(x.detach().double().requires_grad_() for x in leaves)
    expected = value_and_gradients(reference(*doubles), doubles)
    for a, b in zip(value_and_gradients(swiglu(*leaves), leaves), expected, strict=True):
        assert a.dtype == dtype
        assert_close(a.double(), b, rtol=TOLERANCES[dtype], atol=10 * TOLERANCES[dtype])


def test_strided_inputs() -> None:
    x, gate, up = inputs(6, 5, 4)
    view = x.transpose(0, 1)[::2]
    leaves = (x, gate, up)
    actual, expected = swiglu(view, gate, up), reference(view, gate, up)
    for a, b in zip(value_and_gradients(actual, leaves), value_and_gradients(expected, leaves), strict=True):
        assert_close(a, b, rtol=0, atol=1e-12)


def test_no_tokens_give_zero_gradients() -> None:
    leaves = inputs(0, 4, 6)
    y, gx, ggate, gup = value_and_gradients(swiglu(*leaves), leaves)
    assert y.shape == (2, 0, 6)
    assert gx.shape == (2, 0, 4)
    assert not ggate.any()
    assert not gup.any()


def test_frozen_weights_get_no_gradient() -> None:
    x, gate, up = inputs(3, 4, 5)
    swiglu(x, gate.detach(), up).sum().backward()
    assert x.grad is not None
    assert up.grad is not None
    assert gate.grad is None


def test_second_derivatives() -> None:
    assert torch.autograd.gradcheck(swiglu, inputs(2, 3, 2))
    assert torch.autograd.gradgradcheck(swiglu, inputs(2, 3, 2))


@pytest.mark.parametrize("frozen", range(3))
def test_second_derivatives_with_a_frozen_input(frozen: int) -> None:
    leaves = [x.detach() if i == frozen else x for i, x in enumerate(inputs(2, 3, 2))]
    assert torch.autograd.gradgradcheck(swiglu, leaves)


def test_a_single_vector() -> None:
    x, gate, up = inputs(3, 4, 5)
    leaves = x, gate, up
    actual, expected = (value_and_gradients(f(x[0, 0], gate, up), leaves) for f in (swiglu, reference))
    for a, b in zip(actual, expected, strict=True):
        assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_forward_mode_uses_pytorch() -> None:
    x, gate, up = (tensor.detach() for tensor in inputs(3, 4, 5))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        actual, expected = (forward_ad.unpack_dual(f(dual, gate, up)) for f in (swiglu, reference))
        assert_close(actual.primal, expected.primal, rtol=0, atol=1e-12)
        assert_close(actual.tangent, expected.tangent, rtol=0, atol=1e-12)


def test_vmap_uses_pytorch() -> None:
    x, gate, up = inputs(3, 4, 5)
    assert_close(torch.vmap(lambda x: swiglu(x, gate, up))(x), reference(x, gate, up), rtol=0, atol=1e-12)


def test_large_gates_do_not_overflow() -> None:
    x = torch.tensor([[200.0], [-200.0]], requires_grad=True)
    y, gx, *_ = value_and_gradients(swiglu(x, torch.ones(1, 1), torch.ones(1, 1)), (x,))
    assert_close(y, torch.tensor([[40000.0], [0.0]]))
    assert gx.isfinite().all()


@pytest.mark.skipif(build.load_error() is not None, reason="no C kernels")
def test_results_do_not_depend_on_the_number_of_threads() -> None:
    both = torch.randn(800, 128)
    results = [torch.empty(800, 64) for _ in range(2)]
    for n_threads, y in enumerate(results, 1):
        build.call("swiglu", "lli", (800, 64, n_threads), (both, y))
    assert torch.equal(*results)


def test_hooks_on_the_linear_layers_run() -> None:
    layer, seen = SwiGLU(4, 6), []
    layer.gate.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    layer(torch.randn(2, 3, 4))
    assert seen == [(2, 3, 6)]


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")  # torch.compile emits warnings
def test_compiled_blocks_match_eager_ones() -> None:
    """Projections, norms and SwiGLU, with enough tokens for the C kernels of products."""
    torch.compiler.reset()
    block = Block(StandardAttention(16, 2), 16, 20).double()
    x = torch.randn(2, 40, 16, dtype=torch.float64, requires_grad=True)
    leaves = (x, *block.parameters())
    compiled = torch.compile(lambda x: block(x)[0], fullgraph=True)
    for a, b in zip(value_and_gradients(compiled(x), leaves), value_and_gradients(block(x)[0], leaves), strict=True):
        assert_close(a, b, rtol=0, atol=1e-11)
