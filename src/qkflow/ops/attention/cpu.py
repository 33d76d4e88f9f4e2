"""Softmax attention on CPUs, by the C kernel `csrc/attention.c`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qkflow.ops import few_rows
from qkflow.ops.csrc import build

MAX_WIDTH = 256
"""Limit of the width of keys and values: the kernel keeps tiles of it in the cache."""
UNLIMITED = 1 << 60
"""Window of causal attention without a window."""
_Shape = ctypes.c_long * 20
_Step, _StepArrays = ctypes.c_long * 13, ctypes.c_void_p * 15
_SINGLE_THREAD = 1 << 18
"""Number of multiplications up to which one thread is faster."""


def forward(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, save: bool) -> tuple[Tensor, Tensor]:
    """Outputs, and the log-sum-exp of the scores (in units of log 2) if it is to be saved; `window` 0: not causal."""
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]) if save else (0,), dtype=q.dtype)
    return outputs(q, k, v, window, scale, lse if save else None), lse


def outputs(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, lse: Tensor | None = None) -> Tensor:
    """Outputs; the log-sum-exp is written to `lse`. A decoding step calls this, so it is kept short."""
    (n, t, h, width), (_, s, g, _), value_width = q.shape, k.shape, v.shape[3]
    o = torch.empty((n, t, h, value_width), dtype=q.dtype)
    pairs = n * h * t * s * (width + value_width)
    if pairs == 0 or width == 0 or value_width == 0:  # no query or no key
        if lse is not None:
            lse.zero_()
        return o.zero_()
    q, k, v = _readable(q), _readable(k), _readable(v)
    strides = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3]
    shape = _Shape(n, t, s, h, g, width, value_width, window, *strides)
    n_threads = 1 if pairs <= _SINGLE_THREAD else torch.get_num_threads()
    pointers = q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), None if lse is None else lse.data_ptr()
    if build.call("attention_forward", "pdippppp", (shape, scale, n_threads, *pointers), (), q.dtype):
        raise MemoryError("the C kernel of attention could not allocate its buffers")
    return o


def backward(
    go: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    gq, gk, gv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if q.numel() == 0 or v.numel() == 0:
        return gq.zero_(), gk.zero_(), gv.zero_()
    _call("attention_backward", (q, k, v, go), window, scale, (o, lse, gq, gk, gv))
    return gq, gk, gv


class MapDifference(NamedTuple):
    """How differential attention combines two maps: lambda, the scale of the normalised heads, and their norm."""

    lam: float
    scale: float
    norm: Tensor


def layer_step(
    x: Tensor,
    weights: Sequence[Tensor],
    buffers: tuple[Tensor, ...],
    heads: tuple[int, int],
    slots: tuple[int, int],
    rotation: Tensor | None,
    coupling: few_rows.CouplingStep,
    difference: MapDifference | None = None,
) -> Tensor:
    """One token of a layer: project, couple, rotate, write to `buffers`, attend and project, in one native call.

    `weights` are those of queries, keys, values and output, `heads` the numbers of query and key heads, and `slots` the
    slot of the token and the first that it sees.
    """
    (rows, _, width), (keys, values), (h, g) = x.shape, buffers, heads
    x, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    key_width, value_width, (slot, first) = keys.shape[3], values.shape[3], slots
    coupling_sizes, coupling_pointers = few_rows.coupling_arguments(coupling)
    sizes = (rows, width, h, g, key_width, values.shape[2], value_width, slot, first, keys.shape[1], *coupling_sizes)
    pointers = [
        x.data_ptr(),
        *[w.data_ptr() for w in (*weights, keys, values)],
        None if rotation is None else rotation.data_ptr(),
        *coupling_pointers,
        None if difference is None else difference.norm.data_ptr(),
        y.data_ptr(),
    ]
    n_visible = slot + 1 - first
    threads = 1 if rows * h * n_visible * (key_width + value_width) <= _SINGLE_THREAD else torch.get_num_threads()
    linear_threads = 1 if weights[0].numel() <= few_rows.SINGLE_THREAD else torch.get_num_threads()
    lam, norm_scale = (0.0, 1.0) if difference is None else difference[:2]
    scalars = (
        key_width**-0.5,
        coupling.dt,
        lam,
        norm_scale,
        threads,
        linear_threads,
        _Step(*sizes),
        _StepArrays(*pointers),
    )
    if build.call("attention_layer_few", "ddddiipp", scalars, (), x.dtype):
        raise MemoryError("the C kernel of attention could not allocate its buffers")
    return y


def _readable(x: Tensor) -> Tensor:
    """The tensor, or a copy of it if the kernel cannot read its memory."""
    return x if x.stride(3) == 1 and not x.is_neg() else x.resolve_neg().contiguous()


def _call(
    name: str, strided: tuple[Tensor, ...], window: int, scale: float, contiguous: tuple[Tensor | None, ...]
) -> None:
    """Call a kernel with tensors whose strides it takes, and with contiguous ones."""
    (n, t, h, width), (_, s, g, _), value_width = strided[0].shape, strided[1].shape, strided[2].shape[3]
    strides: list[int] = []
    pointers: list[int] = []
    held = [_readable(x) for x in strided]  # keeps the copies alive
    for x in held:
        strides += x.stride()[:3]
        pointers.append(x.data_ptr())
    shape = _Shape(n, t, s, h, g, width, value_width, window, *strides)
    n_threads = 1 if n * h * t * s * (width + value_width) <= _SINGLE_THREAD else torch.get_num_threads()
    scalars = (ctypes.addressof(shape), scale, n_threads, *pointers)
    if build.call(name, "pdippp" if len(held) == 3 else "pdipppp", scalars, contiguous):
        raise MemoryError("the C kernel of attention could not allocate its buffers")
