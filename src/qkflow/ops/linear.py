r"""Products with the weight of a linear layer, and their gradients.

    Y = X W^T,     \bar X = \bar Y W,     \bar W = \bar Y^T X                                            (1)

On AMD processors with AVX-512, C kernels (`csrc/linear.c`) were measured to be faster than PyTorch's library, MKL, for
products of many rows with a small weight. They are used there, and PyTorch everywhere else. The choice depends on the
machine and on the sizes only, so that results are reproducible.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from qkflow.ops.csrc import build
from qkflow.ops.csrc.eager import has_kernels

_MIN_ROWS = 64
_MAX_WEIGHT = 1 << 19
"""Elements of a weight that stays in the cache."""
_SINGLE_THREAD = 1 << 20
"""Number of multiplications up to which one thread is faster."""


def linear(x: Float[Tensor, "... i"], weight: Float[Tensor, "o i"]) -> Float[Tensor, "... o"]:
    """`torch.nn.functional.linear` without a bias.

    >>> linear(torch.ones(1, 2), torch.ones(3, 2)).tolist()
    [[2.0, 2.0, 2.0]]
    """
    if torch.is_grad_enabled() and has_kernels(x, weight) and fits(x, weight) and is_kernel_faster(x, weight):
        return _Linear.apply(x, weight)
    return F.linear(x, weight)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return forward(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gy,), (x, weight) = grads, ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        if torch.is_grad_enabled():  # for a second derivative
            return gy @ weight, gy.flatten(0, -2).T @ x.flatten(0, -2)
        gx = input_gradient(gy, weight) if needs_x else None
        return gx, weight_gradient(gy, x) if needs_weight else None


def fits(x: Tensor, *weights: Tensor) -> bool:
    """Whether every weight is a matrix for inputs of this width. If not, PyTorch's own operators report it."""
    return x.ndim > 0 and all(weight.ndim == 2 and weight.shape[1] == x.shape[-1] for weight in weights)


# ---- the products of (1), by the kernels where they are faster; no autograd


def forward(x: Float[Tensor, "... i"], weight: Float[Tensor, "o i"]) -> Float[Tensor, "... o"]:
    """The product of x and the transposed weight."""
    if not is_kernel_faster(x, weight):
        return F.linear(x, weight)
    y = x.new_empty(*x.shape[:-1], len(weight))
    _call("linear", "", (), y, weight, (x, weight, y))
    return y


def input_gradient(
    gy: Float[Tensor, "... o"], weight: Float[Tensor, "o i"], add_to: Float[Tensor, "... i"] | None = None
) -> Float[Tensor, "... i"]:
    """The gradient of x, added in place to `add_to` if given."""
    if not is_kernel_faster(gy, weight):
        if add_to is None:
            return gy @ weight
        add_to.flatten(0, -2).addmm_(gy.flatten(0, -2), weight)
        return add_to
    gx = gy.new_empty(*gy.shape[:-1], weight.shape[1]) if add_to is None else add_to
    _call("linear_input_backward", "i", (add_to is not None,), gy, weight, (gy, weight, gx))
    return gx


def weight_gradient(gy: Float[Tensor, "... o"], x: Float[Tensor, "... i"]) -> Float[Tensor, "o i"]:
    """The gradient of the weight."""
    gweight = x.new_empty(gy.shape[-1], x.shape[-1])
    if not is_kernel_faster(x, gweight):
        return gy.flatten(0, -2).T @ x.flatten(0, -2)
    _call("linear_weight_backward", "", (), gy, gweight, (gy, x, gweight))
    return gweight


def is_kernel_faster(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels are faster than PyTorch for x, or the gradient of its product, and a weight of this shape."""
    n = x.numel() // max(x.shape[-1], 1)
    return n >= _MIN_ROWS and 0 < weight.numel() <= _MAX_WEIGHT and _is_amd_with_mkl() and x.is_cpu


@cache
def _is_amd_with_mkl() -> bool:
    try:
        is_amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        is_amd = False
    return is_amd and torch.backends.mkl.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _call(
    name: str, letters: str, scalars: tuple[int, ...], y: Tensor, weight: Tensor, tensors: tuple[Tensor, ...]
) -> None:
    outputs, inputs = weight.shape
    n = y.numel() // y.shape[-1]
    threads = 1 if n * weight.numel() <= _SINGLE_THREAD else torch.get_num_threads()
    if build.call(name, f"lll{letters}i", (n, inputs, outputs, *scalars, threads), tensors):
        raise MemoryError("the C kernel of linear layers could not allocate its buffers")
