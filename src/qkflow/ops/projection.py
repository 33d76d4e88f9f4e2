r"""Several products of one input, such as queries, keys and values, with a single sum of its gradients.

    y_i = W_i x,     \bar x = \sum_i W_i^T \bar y_i,     \bar W_i = \bar y_i x^T                        (1)

The first of them may be rotated by their positions (`rotary.py`). Autograd would compute every term of \bar x and then
add them; here each product adds to the result, and the rotation is done in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from qkflow.ops import linear
from qkflow.ops.csrc.eager import differentiable_gradients, has_kernels
from qkflow.ops.rotary import Factors, apply_rotary, can_rotate, real_factors, rotate_by_kernel


def project_heads(
    x: Float[Tensor, "b t d"],
    weights: Sequence[Float[Tensor, "_ d"]],
    widths: Sequence[int],
    factors: Factors | None = None,
    n_rotated: int = 2,
) -> tuple[Float[Tensor, "b t _ _"], ...]:
    """The products of `x` with each weight, `[b, t, heads, width]`; with `factors` the first `n_rotated` are rotated.

    >>> q, k = project_heads(torch.ones(1, 2, 4), [torch.ones(6, 4), torch.ones(3, 4)], [3, 3])
    >>> q.shape, k.shape
    (torch.Size([1, 2, 2, 3]), torch.Size([1, 2, 1, 3]))
    """
    n_rotated = 0 if factors is None else n_rotated
    if torch.is_grad_enabled() and linear.fits(x, *weights) and has_kernels(x, *weights):
        cos_sin = None if factors is None else real_factors(factors)
        shapes = [(*x.shape[:-1], len(weight) // width, width) for weight, width in zip(weights, widths, strict=True)]
        if factors is None or (cos_sin is not None and all(can_rotate(shape, cos_sin) for shape in shapes[:n_rotated])):
            return _Projections.apply(x, cos_sin, n_rotated, tuple(widths), *weights)
    return _project(x, weights, widths, factors, n_rotated)


def _project(
    x: Tensor, weights: Sequence[Tensor], widths: Sequence[int], factors: Factors | None, n_rotated: int
) -> tuple[Tensor, ...]:
    outputs = [F.linear(x, weight).unflatten(-1, (-1, width)) for weight, width in zip(weights, widths, strict=True)]
    return tuple(y if factors is None or i >= n_rotated else apply_rotary(y, factors) for i, y in enumerate(outputs))


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos_sin: Tensor | None, n_rotated: int, widths: tuple[int, ...], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        outputs = tuple(
            linear.forward(x, weight).unflatten(-1, (-1, width)) for weight, width in zip(weights, widths, strict=True)
        )
        if cos_sin is not None:
            for y in outputs[:n_rotated]:
                rotate_by_kernel(y, cos_sin, y, inverse=False)
        ctx.save_for_backward(x, cos_sin, *weights)
        ctx.settings = n_rotated, widths
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x, cos_sin, *weights), (n_rotated, widths) = ctx.saved_tensors, ctx.settings
        if torch.is_grad_enabled():  # for a second derivative
            factors = None if cos_sin is None else torch.view_as_complex(cos_sin)
            is_needed = ctx.needs_input_grad[0], *ctx.needs_input_grad[4:]
            gx, *gweights = differentiable_gradients(
                lambda x, *weights: _project(x, weights, widths, factors, n_rotated), (x, *weights), is_needed, grads
            )
            return gx, None, None, None, *gweights
        gx, gweights = None, []
        for i, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
            if i < n_rotated:
                out = torch.empty_like(grad, memory_format=torch.contiguous_format)
                grad = rotate_by_kernel(grad, cos_sin, out, inverse=True)
            gy = grad.flatten(-2)
            if ctx.needs_input_grad[0]:
                gx = linear.input_gradient(gy, weight, add_to=gx)
            gweights.append(linear.weight_gradient(gy, x) if ctx.needs_input_grad[4 + i] else None)
        return gx, None, None, None, *gweights
