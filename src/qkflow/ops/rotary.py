r"""Rotary position embedding: pairs of coordinates rotate with the position, so dot products depend on distance only.

    x_{2i} + j x_{2i+1}  ->  (x_{2i} + j x_{2i+1}) e^{j p \theta_i}        \theta_i = base^{-2i/k},  at position p

Adjacent coordinates form a pair, as in the paper (https://arxiv.org/abs/2104.09864), so a rotation is one complex
product. Some published weights pair the two halves instead; `halves_to_pairs` converts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Complex, Float, Int, Shaped
from torch import Tensor

from qkflow.ops.csrc import build
from qkflow.ops.csrc.eager import has_kernels, n_threads

Factors = Complex[Tensor, "*b t heads i"] | Float[Tensor, "*b t heads i 2"]
"""e^{j p theta_i}, the same for every head: complex, or cosine and sine where PyTorch cannot use complex numbers."""

_BLOCK = 256
"""Number of positions computed and cached together."""


def rotary_factors(
    offset: int | Int[Tensor, " b"], t: int, *, heads: int, width: int, base: float, like: Float[Tensor, "..."]
) -> Factors:
    """The factors of `t` positions from `offset` on, in the dtype and on the device of `like`.

    They are expanded over the heads, so that the product reads contiguous memory. All layers of a model need the same
    factors, and decoding the next position soon after: if all rows share an offset, blocks of positions are cached.
    """
    if isinstance(offset, int) and type(like) is Tensor and not torch.compiler.is_compiling():
        mode = torch.is_inference_mode_enabled()  # a tensor created in this mode cannot be used outside it
        remainder = offset % _BLOCK
        start, count = (offset - remainder, _BLOCK) if remainder + t <= _BLOCK else (offset, t)
        factors = _cached_factors(start, count, heads, width, base, like.dtype, like.device, mode)
        return factors[offset - start : offset - start + t]
    positions = torch.arange(t, device=like.device)
    positions = positions + (offset if isinstance(offset, int) else offset[:, None])
    return _factors(positions, heads, width, base, like.dtype)


@lru_cache(maxsize=4)
def _cached_factors(
    start: int, t: int, heads: int, width: int, base: float, dtype: torch.dtype, device: torch.device, mode: bool
) -> Factors:
    return _factors(torch.arange(start, start + t, device=device), heads, width, base, dtype)


def _factors(positions: Int[Tensor, "*b t"], heads: int, width: int, base: float, dtype: torch.dtype) -> Factors:
    angle_dtype = torch.promote_types(dtype, torch.float32)  # large angles have no precision left in bfloat16
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=angle_dtype) / width
    angles = positions[..., None, None].to(angle_dtype) * base**-exponents
    cos_sin = torch.stack([angles.cos(), angles.sin()], -1).to(dtype)
    cos_sin = cos_sin.expand(*positions.shape, heads, -1, -1).contiguous()
    # torch.compile does not support complex numbers, and they have no 16-bit floating-point dtypes
    is_real = torch.compiler.is_compiling() or dtype in (torch.bfloat16, torch.float16)
    return cos_sin if is_real else torch.view_as_complex(cos_sin)


def apply_rotary(x: Float[Tensor, "b t h k"], factors: Factors) -> Float[Tensor, "b t h k"]:
    """Rotate every pair of coordinates of `x`; `factors` may have more heads than `x`.

    >>> x = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    >>> factors = rotary_factors(1, 1, heads=1, width=2, base=1.0, like=x)
    >>> [round(v, 4) for v in apply_rotary(x, factors).flatten().tolist()]
    [0.5403, 0.8415]
    """
    cos_sin = real_factors(factors) if torch.is_grad_enabled() else None
    if cos_sin is not None and has_kernels(x, cos_sin) and can_rotate(x.shape, cos_sin):
        return _Rotary.apply(x, cos_sin, False)  # pyright: ignore[reportReturnType]
    return _apply(x, factors)


def real_factors(factors: Factors) -> Float[Tensor, "*b t heads i 2"] | None:
    """Complex factors as cosines and sines; None if they are not complex."""
    return torch.view_as_real(factors) if factors.is_complex() and not factors.is_conj() else None


def can_rotate(shape: Sequence[int], cos_sin: Tensor) -> bool:
    """Whether the C kernel can rotate a tensor of this shape: the factors cover it, and those of a head are adjacent.

    If not, PyTorch's own operators compute it or report what does not fit.
    """
    if len(shape) != 4 or cos_sin.ndim not in (4, 5):
        return False
    b, t, h, k = shape
    rows = cos_sin.shape[0] if cos_sin.ndim == 5 else b
    return (
        (rows, cos_sin.shape[-4], 2 * cos_sin.shape[-2]) == (b, t, k)
        and cos_sin.shape[-3] >= h
        and (k == 0 or cos_sin.stride()[-2:] == (2, 1))
    )


def rotate_by_kernel(x: Tensor, cos_sin: Tensor, out: Tensor, *, inverse: bool) -> Tensor:
    """Rotate a contiguous `x`, or rotate it back, by the C kernel; `out` may be `x`. The factors are real."""
    b, t, h, k = x.shape
    by_row = cos_sin.stride(0) if cos_sin.ndim == 5 else 0
    scalars = b, t, h, k, by_row, cos_sin.stride(-4), inverse, n_threads(x), cos_sin.data_ptr()
    build.call("rotary", "lllllliip", scalars, (x, out))
    return out


class _Rotary(torch.autograd.Function):
    """The C kernel. The derivative is the inverse rotation of the gradient, and so on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos_sin: Tensor, inverse: bool) -> Tensor:
        ctx.save_for_backward(cos_sin)
        ctx.inverse = inverse
        return rotate_by_kernel(x, cos_sin, torch.empty_like(x, memory_format=torch.contiguous_format), inverse=inverse)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (cos_sin,) = ctx.saved_tensors
        return _Rotary.apply(grads[0], cos_sin, not ctx.inverse), None, None


def _apply(x: Float[Tensor, "b t h k"], factors: Factors) -> Float[Tensor, "b t h k"]:
    b, t, h, k = x.shape
    x = x.contiguous()
    if factors.is_complex():
        pairs = (x.clone() if x.storage_offset() % 2 else x).view(b, t, h, k // 2, 2)  # complex numbers are aligned
        factors = factors if factors.shape[-2] == h else factors[..., :h, :]
        return torch.view_as_real(torch.view_as_complex(pairs) * factors).view(b, t, h, k)
    (even, odd), (cos, sin) = x.view(b, t, h, k // 2, 2).unbind(-1), factors[..., :h, :, :].unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).view(b, t, h, k)


def halves_to_pairs(weight: Shaped[Tensor, "hk *d"], heads: int) -> Shaped[Tensor, "hk *d"]:
    """Reorder a query or key projection (or its norm) that pairs halves, as in Llama, to pair adjacent coordinates.

    >>> halves_to_pairs(torch.arange(4), heads=1).tolist()
    [0, 2, 1, 3]
    """
    return rearrange(weight, "(h two i) ... -> (h i two) ...", h=heads, two=2)


def pairs_to_halves(weight: Shaped[Tensor, "hk *d"], heads: int) -> Shaped[Tensor, "hk *d"]:
    """The inverse of `halves_to_pairs`."""
    return rearrange(weight, "(h i two) ... -> (h two i) ...", h=heads, two=2)
