r"""Root-mean-square normalization with a custom backward pass.

    y = w \odot x / r          r = \sqrt{mean(x^2) + \epsilon}                                           (1)
    \bar x = (w \odot \bar y - \hat x \, mean(\hat x \odot w \odot \bar y)) / r,   \hat x = x / r         (2)

PyTorch's CPU form is a chain of elementwise kernels, each of which passes over memory. PyTorch does have a fused
backward kernel for layer norm. With a mean of 0 it computes (2) minus the term mean(w \odot \bar y) / r, which is added
here.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkflow.ops import few_rows


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = _inverse_root(x, eps)
        ctx.save_for_backward(x, weight, inverse)
        ctx.eps = eps
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, inverse = ctx.saved_tensors
        (grad,), size = grads, x.shape[-1]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # for a second derivative
            inverse = _inverse_root(x, ctx.eps)
            x_hat, grad_hat = x * inverse, weight * grad
            grad_x = (grad_hat - x_hat * (x_hat * grad_hat).mean(-1, keepdim=True)) * inverse  # (2)
            return grad_x, (grad * x_hat).flatten(0, -2).sum(0), None
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, [size], torch.zeros_like(inverse), inverse, weight, None, [True, True, False]
        )
        return grad_x.add_((grad @ weight).unsqueeze(-1).mul_(inverse).div_(size)), grad_weight, None


def _inverse_root(x: Float[Tensor, "... d"], eps: float) -> Float[Tensor, "... 1"]:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(norm.new_full((), eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()


def rms_norm(x: Float[Tensor, "... d"], weight: Float[Tensor, " d"], eps: float = 1e-5) -> Float[Tensor, "... d"]:
    """Equation (1) over the last dimension.

    >>> rms_norm(torch.tensor([[1.0, 7.0]]), torch.ones(2), eps=0.0).tolist()
    [[0.20000000298023224, 1.399999976158142]]
    """
    if x.dtype in (torch.bfloat16, torch.float16):  # sum squares in float32
        return rms_norm(x.float(), weight.float(), eps).to(x.dtype)
    if not torch.is_grad_enabled():
        if few_rows.supports(x, weight) and weight.shape == x.shape[-1:]:
            return few_rows.norm(x, weight, eps)
        return (x * _inverse_root(x, eps)).mul_(weight)
    return _RMSNorm.apply(x, weight, eps)
