"""Draft."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def short_conv(
    x: Float[Tensor, "n t c"], weight: Float[Tensor, "c taps"], tail: Float[Tensor, "n w c"] | None = None
) -> Float[Tensor, "n t c"]:
    """Draft."""
    taps, t = weight.shape[1], x.shape[1]
    window = F.pad(x, (0, 0, taps - 1, 0)) if tail is None else torch.cat([tail, x], 1)
    y = window[:, :t] * weight[:, 0]
    for j in range(1, taps):
        y = y + window[:, j : j + t] * weight[:, j]
    return F.silu(y)


def tail_after(
    x: Float[Tensor, "n t c"],
    taps: int,
    tail: Float[Tensor, "n w c"] | None = None,
    lengths: Int[Tensor, " n"] | None = None,
) -> Float[Tensor, "n w c"]:
    """Draft."""
    w, t = taps - 1, x.shape[1]
    if lengths is None and t >= w:
        return x[:, t - w :].clone()
    window = F.pad(x, (0, 0, w, 0)) if tail is None else torch.cat([tail, x], 1)
    if lengths is None:
        return window[:, t:]
    last = lengths[:, None] + torch.arange(w, device=x.device)
    return window[torch.arange(len(x), device=x.device)[:, None], last]
