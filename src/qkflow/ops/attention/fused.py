"""Softmax attention by PyTorch's fused kernel, without the t x s map in memory; `naive.py` defines it."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from qkflow.ops.attention.naive import Keys, Mask, Queries


def attention(
    q: Queries,
    k: Keys,
    v: Float[Tensor, "b s g v"],
    *,
    causal: bool = False,
    mask: Mask | None = None,
    scale: float | None = None,
) -> Float[Tensor, "b t h v"]:
    """Softmax attention; arguments as in `attention_naive`.

    >>> import torch
    >>> x = torch.eye(2, dtype=torch.float64).view(1, 2, 1, 2)
    >>> attention(x, x, x, causal=True, scale=1.0)[0, :, 0].round(decimals=2).tolist()
    [[1.0, 0.0], [0.27, 0.73]]
    """
    if q.shape[1] == 1:  # a branch, because `causal and t > 1` is symbolic when the compiler keeps lengths dynamic
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
