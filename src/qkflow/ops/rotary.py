r"""Rotary position: each pair of coordinates turns with the token's position, so dot products depend on distance alone.

    x_{2i} + j x_{2i+1}  ->  (x_{2i} + j x_{2i+1}) e^{j p \theta_i}        \theta_i = base^{-2i/k},  at position p

The pairs are neighbours, as in the paper (https://arxiv.org/abs/2104.09864): then a turn is one complex product, one
pass over memory, where pairing the halves, as some published weights do, takes three. `halves_to_pairs` translates.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from einops import rearrange
from jaxtyping import Complex, Float, Int, Shaped
from torch import Tensor

Turns = Complex[Tensor, "*b t heads i"] | Float[Tensor, "*b t heads i 2"]
"""e^{j angle}, the same for every head: as a complex number, or as cosine and sine where torch cannot use one."""

_BLOCK = 256
"""Positions whose turns are made together."""


def turns(
    offset: int | Int[Tensor, " b"], t: int, *, heads: int, width: int, base: float, like: Float[Tensor, "..."]
) -> Turns:
    """The turns of `width` coordinates at the `t` positions from `offset` on, in the precision and place of `like`.

    Spread over the heads, so that the product runs along memory instead of in strides of one head. The layers of a
    model ask for the same turns one after the other, and in decoding for the next position soon after: where all rows
    begin alike, turns are made once for a block of positions, and kept.
    """
    if isinstance(offset, int) and type(like) is Tensor and not torch.compiler.is_compiling():
        mode = torch.is_inference_mode_enabled()  # a tensor made in this mode may not be used outside
        first = offset % _BLOCK
        begin, count = (offset - first, _BLOCK) if first + t <= _BLOCK else (offset, t)
        made = _turns_from(begin, count, heads, width, base, like.dtype, like.device, mode)
        return made[offset - begin : offset - begin + t]
    positions = torch.arange(t, device=like.device)
    positions = positions + (offset if isinstance(offset, int) else offset[:, None])
    return _turns(positions, heads, width, base, like.dtype)


@lru_cache(maxsize=4)
def _turns_from(
    offset: int, t: int, heads: int, width: int, base: float, dtype: torch.dtype, device: torch.device, mode: bool
) -> Turns:
    return _turns(torch.arange(offset, offset + t, device=device), heads, width, base, dtype)


def _turns(positions: Int[Tensor, "*b t"], heads: int, width: int, base: float, dtype: torch.dtype) -> Turns:
    wide = torch.promote_types(dtype, torch.float32)  # at position 10,000 a bfloat16 angle would be off by whole turns
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=wide) / width
    angles = positions[..., None, None].to(wide) * base**-exponents
    each = torch.stack([angles.cos(), angles.sin()], -1).to(dtype)
    spread = each.expand(*positions.shape, heads, -1, -1).contiguous()
    # the compiler fuses the real form and does not know complex numbers, nor do the short formats
    real = torch.compiler.is_compiling() or dtype in (torch.bfloat16, torch.float16)
    return spread if real else torch.view_as_complex(spread)


def rotate(x: Float[Tensor, "b t h k"], by: Turns) -> Float[Tensor, "b t h k"]:
    """Turn every pair of coordinates of `x`; `by` may have more heads than `x` has.

    >>> x = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    >>> [round(v, 4) for v in rotate(x, turns(1, 1, heads=1, width=2, base=1.0, like=x)).flatten().tolist()]
    [0.5403, 0.8415]
    """
    b, t, h, k = x.shape
    pairs = x.contiguous().view(b, t, h, k // 2, 2)
    if by.is_complex():
        by = by if by.shape[-2] == h else by[..., :h, :]
        return torch.view_as_real(torch.view_as_complex(pairs) * by).view(b, t, h, k)
    (even, odd), (cos, sin) = pairs.unbind(-1), by[..., :h, :, :].unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).view(b, t, h, k)


def halves_to_pairs(weight: Shaped[Tensor, "hk *d"], heads: int) -> Shaped[Tensor, "hk *d"]:
    """Reorder a query or key projection (or its norm) made for paired halves, such as Llama's, for paired neighbours.

    >>> halves_to_pairs(torch.arange(4), heads=1).tolist()
    [0, 2, 1, 3]
    """
    return rearrange(weight, "(h two i) ... -> (h i two) ...", h=heads, two=2)


def pairs_to_halves(weight: Shaped[Tensor, "hk *d"], heads: int) -> Shaped[Tensor, "hk *d"]:
    """The inverse of `halves_to_pairs`."""
    return rearrange(weight, "(h i two) ... -> (h two i) ...", h=heads, two=2)
