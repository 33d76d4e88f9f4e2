r"""Softmax attention: the definition, with the attention map in memory.

    A_{ts} = softmax_s(q_t \cdot k_s / \sqrt{k})  over the s visible to t            (1)
    o_t    = \sum_s A_{ts} v_s                                                       (2)

| symbol   | here     | shape                                                                      |
|----------|----------|----------------------------------------------------------------------------|
| q_t      | `q`      | `[b t h k]`                                                                |
| k_s, v_s | `k`, `v` | `[b s g k]`, `[b s g v]`; g divides h, and head i uses group i // (h / g)  |
| A        |          | `[b h t s]`                                                                |

Visible keys are given by `causal` or by a boolean `mask`, True where visible; a `mask` of numbers is added to the
scores. Every query must see a key. With `causal`, the queries are the last tokens of the keys' sequence: query t has
the position p = t + n_keys - n_queries and sees the keys s <= p, or with a `window` the last of them, p - window < s <=
p.
"""

from __future__ import annotations

import math

import torch
from einops import einsum, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

Queries = Float[Tensor, "b t h k"]
Keys = Float[Tensor, "b s g k"]
Values = Float[Tensor, "b s g v"]
Mask = Bool[Tensor, "t s"] | Bool[Tensor, "_ _ t s"] | Float[Tensor, "_ _ t s"]
"""Of all sequences or one each, and of all heads or one each."""


def attention_map(
    q: Queries,
    k: Keys,
    *,
    causal: bool = False,
    window: int | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
) -> Float[Tensor, "b h t s"]:
    """Equation (1).

    >>> x = torch.eye(2, dtype=torch.float64).view(1, 2, 1, 2)
    >>> attention_map(x, x, causal=True, scale=1.0)[0, 0].round(decimals=2).tolist()
    [[1.0, 0.0], [0.27, 0.73]]
    """
    k = repeat(k, "b s g k -> b s (g r) k", r=q.shape[2] // k.shape[2])
    scores = einsum(q, k, "b t h k, b s h k -> b h t s") * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        keys = torch.arange(k.shape[1], device=q.device)
        mask = causal_mask(keys[k.shape[1] - q.shape[1] :], keys, window)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1)


def attention_naive(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    causal: bool = False,
    window: int | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
) -> Float[Tensor, "b t h v"]:
    """Equations (1) and (2), with the map in memory: differentiable any number of times.

    >>> x = torch.eye(2, dtype=torch.float64).view(1, 2, 1, 2)
    >>> attention_naive(x, x, x, causal=True, scale=1.0)[0, :, 0].round(decimals=2).tolist()
    [[1.0, 0.0], [0.27, 0.73]]
    """
    weights = attention_map(q, k, causal=causal, window=window, mask=mask, scale=scale)
    v = repeat(v, "b s g v -> b s (g r) v", r=q.shape[2] // v.shape[2])
    return einsum(weights, v, "b h t s, b s h v -> b t h v")


def causal_mask(
    queries: Int[Tensor, " t"] | Int[Tensor, "b t"],
    keys: Int[Tensor, " s"] | Int[Tensor, "b s"],
    window: int | None = None,
) -> Mask:
    """Which key positions each query position can see: not later, less than `window` earlier, and not -1 (empty).

    A query that sees nothing (padding) sees everything instead, so that its softmax is finite; its output is unused.

    >>> causal_mask(torch.tensor([1, 2]), torch.tensor([0, 1, 2]), window=2).int().tolist()
    [[1, 1, 0], [0, 1, 1]]
    """
    distance = queries[..., :, None] - keys[..., None, :]
    is_visible = (distance >= 0) & (keys >= 0)[..., None, :]
    if window is not None:
        is_visible = is_visible & (distance < window)
    is_visible = is_visible | ~is_visible.any(-1, keepdim=True)
    return is_visible if is_visible.ndim == 2 else is_visible[:, None]
