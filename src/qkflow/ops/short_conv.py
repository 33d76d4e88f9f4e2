r"""Short causal convolution: each channel mixes its own last few tokens, followed by SiLU.

    u_t = \sum_{j < J} w_j \odot x_{t-J+1+j},   y_t = u_t \odot \sigma(u_t)                              (1)
    \bar u_t = \bar y_t \odot \sigma(u_t) (1 + u_t (1 - \sigma(u_t)))                                   (2)
    \bar x_t = \sum_j w_j \odot \bar u_{t+J-1-j},   \bar w_j = \sum_t \bar u_t \odot x_{t-J+1+j}         (3)

J is the number of taps, the last of which reads token t itself. The J - 1 tokens before x are the convolution state of
the previous call, or zeros. The backward pass saves the inputs only. On CPUs a C kernel (`csrc/short_conv.c`) does all
of it in one pass; PyTorch's own convolutions need another layout and are slower.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from qkflow.errors import UsageError
from qkflow.ops.csrc import build
from qkflow.ops.csrc.eager import is_transformed

MAX_TAPS = 64
"""Limit of the C kernel."""
_SINGLE_THREAD = 1 << 15
"""Number of elements up to which one thread is faster."""

ConvState = Float[Tensor, "n w c"]


def short_conv(
    x: Float[Tensor, "n t c"], weight: Float[Tensor, "c taps"], state: ConvState | None = None
) -> Float[Tensor, "n t c"]:
    """The convolution of `x`, preceded by the tokens of `state`.

    >>> x, weight = torch.randn(1, 9, 5), torch.randn(5, 4)
    >>> last = short_conv(x[:, 6:], weight, next_conv_state(x[:, :6], 4))
    >>> torch.allclose(short_conv(x, weight)[:, 6:], last, atol=1e-6)
    True
    """
    _check(x, weight, state)
    if x.dtype in (torch.bfloat16, torch.float16):  # sum in float32 and round once
        return short_conv(x.float(), weight.float(), None if state is None else state.float()).to(x.dtype)
    weight, state = weight.to(x.dtype), None if state is None else state.to(x.dtype)
    if not torch.compiler.is_compiling() and is_transformed():
        return _torch_forward(x, weight, state)
    if torch.is_grad_enabled():
        return _ShortConv.apply(x, weight, state)
    return _forward(x, weight, state)


def next_conv_state(
    x: Float[Tensor, "n t c"], taps: int, state: ConvState | None = None, lengths: Int[Tensor, " n"] | None = None
) -> ConvState:
    """The last `taps - 1` tokens of `state` followed by `x`; row i of `x` has `lengths[i]` tokens (default: all).

    >>> next_conv_state(torch.tensor([[[1.0], [2.0], [0.0]]]), 4, lengths=torch.tensor([2])).flatten().tolist()
    [0.0, 1.0, 2.0]
    """
    size, t = taps - 1, x.shape[1]
    if lengths is None and not torch.compiler.is_compiling() and t >= size:  # a graph is for any length
        return x[:, t - size :].clone()  # a view would keep all of x alive
    window = _window(x, taps, None if state is None else state.to(x.dtype))
    if lengths is None:
        return window[:, t:].clone()
    index = lengths[:, None] + torch.arange(size, device=x.device)
    return window.gather(1, index[..., None].expand(-1, -1, x.shape[2]))


def _check(x: Tensor, weight: Tensor, state: Tensor | None) -> None:
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] < 1:
        raise UsageError(
            f"expected inputs [n, t, channels] and weights [channels, taps], got {[*x.shape]} and {[*weight.shape]}"
        )
    expected = (x.shape[0], weight.shape[1] - 1, x.shape[2])
    if state is not None and state.shape != expected:
        raise UsageError(f"the state must be [n, taps - 1, channels] = {[*expected]}, got {[*state.shape]}")
    for tensor in (x, weight, state):
        if tensor is not None and (not tensor.is_floating_point() or tensor.device != x.device):
            raise UsageError(
                f"got {tensor.dtype} on {tensor.device}: expected floating-point tensors on one device, {x.device}"
            )


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, state: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, state)
        return _forward(x, weight, state)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, state = ctx.saved_tensors
        (gy,) = grads
        if _has_kernel(x, weight) and (torch.compiler.is_compiling() or not torch.is_grad_enabled()):
            gx, gweight, *gstate = torch.ops.qkflow.short_conv_backward(gy, x, weight, state)
            return gx, gweight, (gstate[0] if gstate else None)
        return _torch_backward(gy, x, weight, state)  # differentiable


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    return build.supports(x) and weight.shape[1] <= MAX_TAPS


def _forward(x: Tensor, weight: Tensor, state: Tensor | None) -> Tensor:
    if not _has_kernel(x, weight):
        return _torch_forward(x, weight, state)
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return torch.ops.qkflow.short_conv(x, weight, state)
    return _kernel_forward(x, weight, state)  # bypasses the dispatcher, whose overhead matters in decoding


# ---- PyTorch


def _torch_forward(x: Tensor, weight: Tensor, state: Tensor | None) -> Tensor:
    return F.silu(_convolve(_window(x, weight.shape[1], state), weight, x.shape[1]))


def _torch_backward(
    gy: Tensor, x: Tensor, weight: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    taps, t = weight.shape[1], x.shape[1]
    window = _window(x, taps, state)
    u = _convolve(window, weight, t)
    s = u.sigmoid()
    gu = gy * s * (1 + u * (1 - s))  # (2)
    gwindow = _convolve(F.pad(gu, (0, 0, taps - 1, taps - 1)), weight.flip(1), t + taps - 1)  # (3)
    gweight = torch.stack([(gu * window[:, j : j + t]).sum((0, 1)) for j in range(taps)], 1)
    return gwindow[:, taps - 1 :], gweight, None if state is None else gwindow[:, : taps - 1]


def _window(x: Tensor, taps: int, state: Tensor | None) -> Tensor:
    """The state followed by x, [n, taps - 1 + t, c]."""
    return F.pad(x, (0, 0, taps - 1, 0)) if state is None else torch.cat([state, x], 1)


def _convolve(window: Tensor, weight: Tensor, t: int) -> Tensor:
    """U of equation (1)."""
    u = window[:, :t] * weight[:, 0]
    for j in range(1, weight.shape[1]):
        u = torch.addcmul(u, window[:, j : j + t], weight[:, j])
    return u


# ---- the C kernel, as operators that torch.compile treats as opaque; elementwise products count no FLOPs


def _kernel_forward(x: Tensor, weight: Tensor, state: Tensor | None) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _call("short_conv", x, weight, (x, weight, state, y))
    return y


def _checked_forward(x: Tensor, weight: Tensor, state: Tensor | None) -> Tensor:
    _check_operands(x, weight, state)
    return _kernel_forward(x, weight, state)


def _checked_backward(gy: Tensor, x: Tensor, weight: Tensor, state: Tensor | None) -> list[Tensor]:
    gradients = _empty_gradients(gy, x, weight, state)
    if x.numel() == 0:
        return [gradient.zero_() for gradient in gradients]
    gx, gweight, gstate = (*gradients, None)[:3]
    _call("short_conv_backward", x, weight, (gy, x, weight, state, gx, gweight, gstate))
    return gradients


def _check_operands(x: Tensor, weight: Tensor, state: Tensor | None) -> None:
    _check(x, weight, state)
    if weight.shape[1] > MAX_TAPS:
        raise UsageError(f"the C kernel has at most {MAX_TAPS} taps, got {weight.shape[1]}: use short_conv")


def _empty_forward(x: Tensor, weight: Tensor, state: Tensor | None) -> Tensor:
    _check_operands(x, weight, state)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _empty_gradients(gy: Tensor, x: Tensor, weight: Tensor, state: Tensor | None) -> list[Tensor]:
    _check_operands(x, weight, state)
    if gy.shape != x.shape or gy.dtype != x.dtype or gy.device != x.device:
        raise UsageError(f"gy must be {x.dtype} of shape {[*x.shape]} on {x.device}, got {gy.dtype} {[*gy.shape]}")
    inputs = (x, weight) if state is None else (x, weight, state)
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs]


def _call(name: str, x: Tensor, weight: Tensor, tensors: tuple[Tensor | None, ...]) -> None:
    threads = 1 if x.numel() <= _SINGLE_THREAD else torch.get_num_threads()
    if build.call(name, "lllii", (*x.shape, weight.shape[1], threads), tensors):
        raise MemoryError("the C kernel of the short convolution could not allocate its buffers")


_OPS = torch.library.Library("qkflow", "FRAGMENT")
_OPS.define("short_conv(Tensor x, Tensor weight, Tensor? state) -> Tensor")
_OPS.define("short_conv_backward(Tensor gy, Tensor x, Tensor weight, Tensor? state) -> Tensor[]")
_OPS.impl("short_conv", _checked_forward, "CPU")
_OPS.impl("short_conv_backward", _checked_backward, "CPU")
_OPS.impl("short_conv", _empty_forward, "Meta")
_OPS.impl("short_conv_backward", _empty_gradients, "Meta")
