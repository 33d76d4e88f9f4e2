r"""Root-mean-square normalization with a custom backward pass.

    y = w \odot x / r          r = \sqrt{mean(x^2) + \epsilon}                                           (1)
    \bar x = (w \odot \bar y - \hat x \, mean(\hat x \odot w \odot \bar y)) / r,   \hat x = x / r         (2)

On CPUs a C kernel (`csrc/rms_norm.c`) computes (1) or (2) in one pass, with the residual addition before the norm if
there is one. PyTorch's form is a chain of elementwise kernels, each of which passes over memory. PyTorch does have a
fused backward kernel for layer norm. With a mean of 0 it computes (2) minus the term mean(w \odot \bar y) / r, which is
added here where there is no C kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkflow.ops import few_rows
from qkflow.ops.csrc import build
from qkflow.ops.csrc.eager import has_kernels, is_transformed, n_threads


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
            return *_backward(grad, x, weight, _inverse_root(x, ctx.eps)), None
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, [size], torch.zeros_like(inverse), inverse, weight, None, [True, True, False]
        )
        return grad_x.add_((grad @ weight).unsqueeze(-1).mul_(inverse).div_(size)), grad_weight, None


class _AddRMSNorm(torch.autograd.Function):
    """The C kernel: s = x + branch and the norm of s, or only the norm of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> Any:
        x_sum, y, inverse = _kernel_forward(x, branch, weight, eps, save=True)
        ctx.save_for_backward(x_sum, weight, inverse)
        ctx.eps, ctx.has_branch = eps, branch is not None
        return y if branch is None else (x_sum, y)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, inverse = ctx.saved_tensors
        grad, grad_sum = grads[-1], grads[0] if ctx.has_branch else None
        if torch.is_grad_enabled():  # for a second derivative
            grad_x, grad_weight = _backward(grad, x, weight, _inverse_root(x, ctx.eps))
            grad_x = grad_x if grad_sum is None else grad_x + grad_sum
        else:
            grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
            scalars = inverse.numel(), len(weight), n_threads(x)
            tensors = grad, grad_sum, x, weight, inverse, grad_x, grad_weight
            if build.call("rms_norm_backward", "lli", scalars, tensors):
                raise MemoryError("the C kernel of RMS norm could not allocate its buffers")
        return grad_x, (grad_x if ctx.has_branch else None), grad_weight, None


def _kernel_forward(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, *, save: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The sum, its norm and, to `save`, 1 / r of every row."""
    x = x.contiguous()
    x_sum, y = x if branch is None else torch.empty_like(x), torch.empty_like(x)
    rows = x.numel() // x.shape[-1]
    inverse = x.new_empty(rows) if save else None
    tensors = x, branch, weight, None if branch is None else x_sum, y, inverse
    build.call("rms_norm", "lldi", (rows, x.shape[-1], eps, n_threads(x)), tensors)
    return x_sum, y, inverse


def _backward(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Equation (2)."""
    x_hat, grad_hat = x * inverse, weight * grad
    grad_x = (grad_hat - x_hat * (x_hat * grad_hat).mean(-1, keepdim=True)) * inverse
    return grad_x, (grad * x_hat).reshape(-1, x.shape[-1]).sum(0)


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
    if not torch.is_grad_enabled() and few_rows.supports(x, weight) and weight.shape == x.shape[-1:]:
        return few_rows.norm(x, weight, eps)
    if x.shape[-1:] == weight.shape != (0,) and has_kernels(x, weight):
        if torch.is_grad_enabled():
            return _AddRMSNorm.apply(x.contiguous(), None, weight, eps)  # a copy inside would cut the second derivative
        return _kernel_forward(x, None, weight, eps, save=False)[1]
    if not torch.is_grad_enabled():
        return (x * _inverse_root(x, eps)).mul_(weight)
    if not torch.compiler.is_compiling() and is_transformed():
        return x * _inverse_root(x, eps) * weight
    return _RMSNorm.apply(x, weight, eps)


def add_rms_norm(
    x: Float[Tensor, "... d"], branch: Float[Tensor, "... d"], weight: Float[Tensor, " d"], eps: float = 1e-5
) -> tuple[Float[Tensor, "... d"], Float[Tensor, "... d"]]:
    """The residual sum x + branch, and its norm.

    >>> [y.tolist() for y in add_rms_norm(torch.zeros(1, 2), torch.tensor([[1.0, 7.0]]), torch.ones(2), eps=0.0)]
    [[[1.0, 7.0]], [[0.20000000298023224, 1.399999976158142]]]
    """
    is_valid = x.shape == branch.shape and x.shape[-1:] == weight.shape != (0,)
    if torch.is_grad_enabled() and is_valid and has_kernels(x, branch, weight):
        return _AddRMSNorm.apply(x, branch, weight, eps)
    x = x + branch
    return x, rms_norm(x, weight, eps)
