"""Softmax attention on CPUs, by the C kernel `csrc/attention.c`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from qkflow.ops.csrc import build

MAX_WIDTH = 256
"""Limit of the width of keys and values: the kernel keeps tiles of it in the cache."""
UNLIMITED = 1 << 60
"""Window of causal attention without a window."""
_Shape = ctypes.c_long * 20
_SINGLE_THREAD = 1 << 18
"""Number of multiplications up to which one thread is faster."""


def forward(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, save: bool) -> tuple[Tensor, Tensor]:
    """Outputs, and the log-sum-exp of the scores (in units of log 2) if it is to be saved; `window` 0: not causal."""
    n, t, h, _ = q.shape
    o = torch.empty(n, t, h, v.shape[3], dtype=q.dtype)
    lse = torch.empty((n, h, t) if save else (0,), dtype=q.dtype)
    if q.numel() == 0 or v.numel() == 0:  # no query or no key
        return o.zero_(), lse.zero_()
    _call("attention_forward", (q, k, v), window, scale, (o, lse if save else None))
    return o, lse


def backward(
    go: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    gq, gk, gv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if q.numel() == 0 or v.numel() == 0:
        return gq.zero_(), gk.zero_(), gv.zero_()
    _call("attention_backward", (q, k, v, go), window, scale, (o, lse, gq, gk, gv))
    return gq, gk, gv


def _call(
    name: str, strided: tuple[Tensor, ...], window: int, scale: float, contiguous: tuple[Tensor | None, ...]
) -> None:
    """Call a kernel with tensors whose strides it takes, and with contiguous ones."""
    (n, t, h, width), (_, s, g, _), value_width = strided[0].shape, strided[1].shape, strided[2].shape[3]
    strides: list[int] = []
    pointers: list[int] = []
    held = [
        x if x.stride(3) == 1 and not x.is_neg() else x.resolve_neg().contiguous() for x in strided
    ]  # keeps the copies alive
    for x in held:
        strides += x.stride()[:3]
        pointers.append(x.data_ptr())
    shape = _Shape(n, t, s, h, g, width, value_width, window, *strides)
    n_threads = 1 if n * h * t * s * (width + value_width) <= _SINGLE_THREAD else torch.get_num_threads()
    scalars = (ctypes.addressof(shape), scale, n_threads, *pointers)
    if build.call(name, "pdippp" if len(held) == 3 else "pdipppp", scalars, contiguous):
        raise MemoryError("the C kernel of attention could not allocate its buffers")
