r"""Rotary position: each pair of coordinates turns with the token's position, so dot products depend on distance alone.

    x_{2i} + j x_{2i+1}  ->  (x_{2i} + j x_{2i+1}) e^{j p \theta_i}        \theta_i = base^{-2i/k},  at position p

The pairs are neighbours, as in the paper (https://arxiv.org/abs/2104.09864): then a turn is one complex product, one
pass over memory, where pairing the halves, as some published weights do, takes three. `halves_to_pairs` translates.
"""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Complex, Float, Int
from torch import Tensor

Turns = Float[Tensor, "*b t 1 i 2"]
"""Cosine and sine of each angle."""


def turns(positions: Int[Tensor, "*b t"], width: int, *, base: float, dtype: torch.dtype) -> Turns:
    """The turn of every pair of `width` coordinates at every position.

    Angles are computed in at least float32: at position 10,000 a bfloat16 angle would be off by whole turns.
    """
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=wide) / width
    angles = positions[..., None].to(wide) * base**-exponents
    return torch.stack([angles.cos(), angles.sin()], -1).to(dtype).unsqueeze(-3)


def rotate(x: Float[Tensor, "b t h k"], by: Turns) -> Float[Tensor, "b t h k"]:
    """Turn every pair of coordinates of `x`.

    >>> x = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    >>> one = turns(torch.tensor([1]), 2, base=1.0, dtype=torch.float32)
    >>> [round(v, 4) for v in rotate(x, one).flatten().tolist()]
    [0.5403, 0.8415]
    """
    pairs = x.unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling() or x.dtype in (torch.bfloat16, torch.float16):
        # the compiler fuses the real form and does not know complex numbers, nor do the short formats
        (a, b), (cos, sin) = pairs.unbind(-1), by.unbind(-1)
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    # spread over the heads: then the product runs along memory instead of in strides of one head
    spread = torch.view_as_complex(by.contiguous()).expand(*by.shape[:-3], x.shape[2], -1).contiguous()
    return _as_real(torch.view_as_complex(pairs) * spread)


def _as_real(z: Complex[Tensor, "b t h i"]) -> Float[Tensor, "b t h k"]:
    return torch.view_as_real(z).flatten(-2)


def halves_to_pairs(weight: Float[Tensor, "hk *d"], heads: int) -> Float[Tensor, "hk *d"]:
    """Reorder a query or key projection (or its norm) made for paired halves, such as Llama's, for paired neighbours.

    >>> halves_to_pairs(torch.arange(4), heads=1).tolist()
    [0, 2, 1, 3]
    """
    return rearrange(weight, "(h two i) ... -> (h i two) ...", h=heads, two=2)


def pairs_to_halves(weight: Float[Tensor, "hk *d"], heads: int) -> Float[Tensor, "hk *d"]:
    """The inverse of `halves_to_pairs`."""
    return rearrange(weight, "(h i two) ... -> (h two i) ...", h=heads, two=2)
