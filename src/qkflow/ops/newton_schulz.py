r"""The Newton-Schulz iteration, which orthogonalizes matrices for Muon (`training/muon.py`).

    X = M / |M|,   then five times   A = X X^T,   B = b A + c A^2,   X = a X + B X                       (1)

It keeps the singular vectors of M and takes the singular values close to 1. On x86 processors a C kernel
(`csrc/newton_schulz.c`) computes only half of A and B, which are symmetric.
"""

from __future__ import annotations

import ctypes
import platform

import torch
from jaxtyping import Float
from torch import Tensor

from qkflow.errors import UsageError
from qkflow.ops.csrc import build
from qkflow.ops.csrc.eager import has_kernels

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
_MAX_SIDE = 512
"""Largest number of rows or columns, whichever are fewer, for which the kernel was measured to be faster."""
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


def newton_schulz(matrices: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m n"]:
    """Matrices with the same singular vectors, and singular values close to 1; computed in float32.

    >>> singular = torch.linalg.svdvals(newton_schulz(torch.diag(torch.tensor([3.0, 0.5]))))
    >>> bool(((singular > 0.6) & (singular < 1.3)).all())
    True
    """
    if matrices.ndim < 2 or not matrices.is_floating_point():
        raise UsageError(f"expected floating-point matrices [..., m, n], got {matrices.dtype} {list(matrices.shape)}")
    x = matrices.float().reshape(matrices.shape[:-2].numel(), *matrices.shape[-2:])
    has_kernel = _IS_X86 and 0 < min(x.shape[1:]) <= _MAX_SIDE and not x.requires_grad and has_kernels(x)
    return (by_kernel(x) if has_kernel else _torch(x)).view(matrices.shape).to(matrices.dtype)


def _torch(x: Float[Tensor, "batch m n"]) -> Float[Tensor, "batch m n"]:
    a, b, c = COEFFICIENTS
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).contiguous()


def by_kernel(x: Float[Tensor, "batch m n"]) -> Float[Tensor, "batch m n"]:
    """The iteration by the C kernel, in the precision of `x`."""
    if x.ndim != 3:
        raise UsageError(f"the C kernel of Newton-Schulz takes a batch of matrices, got {list(x.shape)}")
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    coefficients = (ctypes.c_double * 3)(*COEFFICIENTS)
    if build.call("newton_schulz", "liiiip", (*x.shape, STEPS, torch.get_num_threads(), coefficients), (x, y)):
        raise MemoryError("the C kernel of Newton-Schulz could not allocate its buffers")
    return y
