r"""Differential attention: the difference of two softmax maps, which cancels common noise.

    A   = softmax(q^1 k^{1\top} / \sqrt{k}) - \lambda \, softmax(q^2 k^{2\top} / \sqrt{k})          (1)
    o_t = \sum_s A_{ts} v_s                                                                       (2)
    \lambda = exp(l_{q1} \cdot l_{k1}) - exp(l_{q2} \cdot l_{k2}) + \lambda_{init}                  (3)

| symbol     | here | shape                                                        |
|------------|------|--------------------------------------------------------------|
| q^1, q^2   | `q`  | `[b t 2h k]`; heads 2i and 2i + 1 form a pair                |
| k^1, k^2   | `k`  | `[b s 2g k]`, likewise                                       |
| v          | `v`  | `[b s g 2k]`                                                 |

https://arxiv.org/abs/2410.05258
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkflow.ops.attention import Mask, attention, attention_map


def differential_lambda(
    q1: Float[Tensor, " k"], k1: Float[Tensor, " k"], q2: Float[Tensor, " k"], k2: Float[Tensor, " k"], init: float
) -> Float[Tensor, ""]:
    """Equation (3). Elementwise, because autocast would round matrix products."""
    return torch.exp((q1 * k1).sum()) - torch.exp((q2 * k2).sum()) + init


def lambda_init(layer: int) -> float:
    """The published initial value of lambda, which increases with depth; layers count from 0.

    >>> round(lambda_init(0), 3), round(lambda_init(10), 3)
    (0.2, 0.77)
    """
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


def differential_attention(
    q: Float[Tensor, "b t h2 k"],
    k: Float[Tensor, "b s g2 k"],
    v: Float[Tensor, "b s g v"],
    lam: Float[Tensor, ""],
    *,
    causal: bool = False,
    window: int | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "b t h v"]:
    """Equations (1) and (2), without the maps in memory; `dropout` applies to each map."""
    visible: Any = {"causal": causal, "window": window, "mask": mask}
    first, second = (
        attention(q[:, :, i::2], k[:, :, i::2], v, **visible, scale=scale, dropout=dropout) for i in (0, 1)
    )
    return first - lam * second


def differential_map(
    q: Float[Tensor, "b t h2 k"],
    k: Float[Tensor, "b s g2 k"],
    lam: Float[Tensor, ""],
    *,
    causal: bool = False,
    window: int | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
) -> Float[Tensor, "b h t s"]:
    """Equation (1): rows sum to 1 - lambda, and entries may be negative."""
    pairs = ((q[:, :, i::2], k[:, :, i::2]) for i in (0, 1))
    first, second = (attention_map(*pair, causal=causal, window=window, mask=mask, scale=scale) for pair in pairs)
    return first - lam * second
