r"""Short causal convolutions: each channel looks back at a few tokens of its own, and a SiLU follows.

    u_t = \sum_{j < J} w_j \odot x_{t-J+1+j},   y_t = u_t \odot \sigma(u_t)             J taps, the last for t itself
    \bar u_t = \bar y_t \odot \sigma(u_t) (1 + u_t (1 - \sigma(u_t)))
    \bar x_t = \sum_j w_j \odot \bar u_{t+J-1-j},   \bar w_j = \sum_t \bar u_t \odot x_{t-J+1+j}

Before the first token of x come those of a tail, the last J - 1 tokens of the call before; without one, zeros. Backward
keeps the inputs alone. On a CPU one kernel does all of it; torch's own convolutions want another layout and cost more.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from qkflow.errors import UsageError
from qkflow.ops import csrc
from qkflow.ops.csrc.short_conv import MOST_TAPS, native_backward, native_forward

__all__ = ["MOST_TAPS", "short_conv", "tail_after"]

Tail = Float[Tensor, "n w c"]


def short_conv(
    x: Float[Tensor, "n t c"], weight: Float[Tensor, "c taps"], tail: Tail | None = None
) -> Float[Tensor, "n t c"]:
    """The convolution of `x`, behind `tail` if there is one.

    >>> x, weight = torch.randn(1, 9, 5), torch.randn(5, 4)
    >>> later = short_conv(x[:, 6:], weight, tail_after(x[:, :6], 4))
    >>> torch.allclose(short_conv(x, weight)[:, 6:], later, atol=1e-6)
    True
    """
    _check(x, weight, tail)
    if x.dtype in (torch.bfloat16, torch.float16):  # a sum of several products, rounded once
        behind = None if tail is None else tail.float()
        return short_conv(x.float(), weight.float(), behind).to(x.dtype)
    weight, tail = weight.to(x.dtype), None if tail is None else tail.to(x.dtype)  # which a call in others has left
    if torch.is_grad_enabled():
        return _ShortConv.apply(x, weight, tail)
    return _forward(x, weight, tail)


def _check(x: Tensor, weight: Tensor, tail: Tensor | None) -> None:
    """The kernel takes their word for it."""
    if x.ndim != 3 or weight.ndim != 2 or len(weight) != x.shape[2] or weight.shape[1] < 1:
        raise UsageError(
            f"a convolution needs [n, t, channels] and weights [channels, taps], got {[*x.shape]} and {[*weight.shape]}"
        )
    want = (len(x), weight.shape[1] - 1, x.shape[2])
    if tail is not None and tail.shape != want:
        raise UsageError(f"the tail must be [n, taps - 1, channels] = {[*want]}, got {[*tail.shape]}")


def tail_after(
    x: Float[Tensor, "n t c"], taps: int, tail: Tail | None = None, lengths: Int[Tensor, " n"] | None = None
) -> Tail:
    """The last `taps - 1` tokens of `tail` and then `x`, of which row i has `lengths[i]` tokens (all, if not given).

    >>> tail_after(torch.tensor([[[1.0], [2.0], [0.0]]]), 4, lengths=torch.tensor([2])).flatten().tolist()
    [0.0, 1.0, 2.0]
    """
    back, t = taps - 1, x.shape[1]
    if lengths is None and t >= back:
        return x[:, t - back :].clone()  # else a state would hold on to the whole of x
    window = _window(x, taps, None if tail is None else tail.to(x.dtype))
    if lengths is None:
        return window[:, t:].clone()
    last = lengths[:, None] + torch.arange(back, device=x.device)
    return window.gather(1, last[..., None].expand(-1, -1, x.shape[2]))


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tail: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, tail)
        return _forward(x, weight, tail)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, tail = ctx.saved_tensors
        (gy,) = grads
        if _native(x, weight) and (torch.compiler.is_compiling() or not torch.is_grad_enabled()):
            return native_backward(gy, x, weight, tail)
        return _backward(gy, x, weight, tail)  # can be differentiated once more


def _native(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel in C takes these."""
    if not torch.compiler.is_compiling():
        csrc.prepare()
    fits = x.dtype in (torch.float32, torch.float64) and weight.shape[1] <= MOST_TAPS
    return x.device.type == "cpu" and fits and csrc.ready()


def _forward(x: Tensor, weight: Tensor, tail: Tensor | None) -> Tensor:
    if _native(x, weight):
        return native_forward(x, weight, tail)
    return F.silu(_convolved(_window(x, weight.shape[1], tail), weight, x.shape[1]))


def _backward(gy: Tensor, x: Tensor, weight: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    taps, t = weight.shape[1], x.shape[1]
    window = _window(x, taps, tail)
    u = _convolved(window, weight, t)
    s = u.sigmoid()
    gu = gy * s * (1 + u * (1 - s))
    behind = F.pad(gu, (0, 0, taps - 1, taps - 1))
    gwindow = _convolved(behind, weight.flip(1), t + taps - 1)
    gweight = torch.stack([(gu * window[:, j : j + t]).sum((0, 1)) for j in range(taps)], 1)
    return gwindow[:, taps - 1 :], gweight, None if tail is None else gwindow[:, : taps - 1]


def _window(x: Tensor, taps: int, tail: Tensor | None) -> Tensor:
    """Everything that is looked at, [n, taps - 1 + t, c]."""
    return F.pad(x, (0, 0, taps - 1, 0)) if tail is None else torch.cat([tail, x], 1)


def _convolved(window: Tensor, weight: Tensor, t: int) -> Tensor:
    u = window[:, :t] * weight[:, 0]
    for j in range(1, weight.shape[1]):
        u = torch.addcmul(u, window[:, j : j + t], weight[:, j])
    return u
