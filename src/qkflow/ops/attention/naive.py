r"""Scaled dot-product attention, fused and as a map.

    A_{ts} = softmax_s(q_t \cdot k_s / \sqrt{k})  over the s that t may see          (1)
    o_t    = \sum_s A_{ts} v_s                                                       (2)

| symbol   | here     | shape       |
|----------|----------|-------------|
| q_t      | `q`      | `[b t h k]` |
| k_s, v_s | `k`, `v` | `[b s g k]`, `[b s g v]`; g divides h, and head i reads group i // (h / g) |
| A        |          | `[b h t s]` |

What t may see is given by `causal` (s <= t, for q and k of the same length) or by a `mask` that is true where it may.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import einsum, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

Queries = Float[Tensor, "b t h k"]
Keys = Float[Tensor, "b s g k"]
Mask = Bool[Tensor, "t s"] | Bool[Tensor, "b 1 t s"]


def attention(
    q: Queries,
    k: Keys,
    v: Float[Tensor, "b s g v"],
    *,
    causal: bool = False,
    mask: Mask | None = None,
    scale: float | None = None,
) -> Float[Tensor, "b t h v"]:
    """Equations (1) and (2) through torch's fused kernel: no t x s matrix in memory.

    >>> x = torch.eye(2, dtype=torch.float64).view(1, 2, 1, 2)
    >>> attention(x, x, x, causal=True, scale=1.0)[0, :, 0].round(decimals=2).tolist()
    [[1.0, 0.0], [0.27, 0.73]]
    """
    if q.shape[1] == 1:  # said as a branch: an expression is no plain bool where the compiler keeps lengths open
        causal = False
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=k.shape[2] != q.shape[2],
    )
    return out.transpose(1, 2)


def attention_map(
    q: Queries, k: Keys, *, causal: bool = False, mask: Mask | None = None, scale: float | None = None
) -> Float[Tensor, "b h t s"]:
    """Equation (1) alone, for those who want to look at it.

    >>> x = torch.eye(2, dtype=torch.float64).view(1, 2, 1, 2)
    >>> attention_map(x, x, causal=True, scale=1.0)[0, 0].round(decimals=2).tolist()
    [[1.0, 0.0], [0.27, 0.73]]
    """
    k = repeat(k, "b s g k -> b s (g r) k", r=q.shape[2] // k.shape[2])
    scores = einsum(q, k, "b t h k, b s h k -> b h t s") * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1)


def visible(
    queries: Int[Tensor, " t"] | Int[Tensor, "b t"],
    keys: Int[Tensor, " s"] | Int[Tensor, "b s"],
    window: int | None = None,
) -> Mask:
    """Which key each query may see, by position: not later, not `window` or more earlier, and no empty slot (-1).

    A query that would see nothing (padding) sees everything instead, so that its softmax is a number; nobody reads it.

    >>> visible(torch.tensor([1, 2]), torch.tensor([0, 1, 2]), window=2).int().tolist()
    [[1, 1, 0], [0, 1, 1]]
    """
    distance = queries[..., :, None] - keys[..., None, :]
    seen = (distance >= 0) & (keys >= 0)[..., None, :]
    if window is not None:
        seen = seen & (distance < window)
    seen = seen | ~seen.any(-1, keepdim=True)
    return seen if seen.ndim == 2 else seen[:, None]
