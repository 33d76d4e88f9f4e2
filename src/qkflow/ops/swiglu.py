r"""The hidden layer of SwiGLU: one product for gates and ups, and one pass for what follows it.

    g = W_{gate} x,   u = W_{up} x,   h = g \odot \sigma(g) \odot u                                     (1)
    \bar g = \bar h \odot u \odot \sigma(g) (1 + g (1 - \sigma(g))),   \bar u = \bar h \odot g \odot \sigma(g)   (2)

On CPUs, and where derivatives are needed, g and u are the two halves of one product with the concatenated weights, and
a C kernel (`csrc/swiglu.c`) computes (1) or (2) in one pass. The backward pass saves x, g and u.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from qkflow.ops import linear
from qkflow.ops.csrc import build
from qkflow.ops.csrc.eager import differentiable_gradients, has_kernels, n_threads


def swiglu(
    x: Float[Tensor, "... d"], gate: Float[Tensor, "hidden d"], up: Float[Tensor, "hidden d"]
) -> Float[Tensor, "... hidden"]:
    """Equation (1).

    >>> swiglu(torch.ones(1, 1), torch.zeros(1, 1), torch.ones(1, 1)).tolist()
    [[0.0]]
    """
    is_valid = x.ndim > 1 and linear.fits(x, gate, up) and len(gate) == len(up) > 0
    if torch.is_grad_enabled() and is_valid and has_kernels(x, gate, up):
        return _SwiGLU.apply(x, gate, up)
    return _swiglu(x, gate, up)


def _swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        weight = torch.cat([gate, up])
        products = linear.forward(x, weight)
        y = products.new_empty(*x.shape[:-1], len(gate))
        build.call("swiglu", "lli", (_rows(y), len(gate), n_threads(products)), (products, y))
        ctx.save_for_backward(x, gate, up, products)
        ctx.weight = weight
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gy,), (x, gate, up, products) = grads, ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative
            return differentiable_gradients(lambda *xs: (_swiglu(*xs),), (x, gate, up), ctx.needs_input_grad, grads)
        gproducts = torch.empty_like(products)
        build.call("swiglu_backward", "lli", (_rows(gy), len(gate), n_threads(products)), (gy, products, gproducts))
        gx = linear.input_gradient(gproducts, ctx.weight) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[1:]):
            return gx, None, None
        ggate, gup = linear.weight_gradient(gproducts, x).split(len(gate))
        return gx, ggate, gup


def _rows(y: Tensor) -> int:
    return y.numel() // y.shape[-1]
