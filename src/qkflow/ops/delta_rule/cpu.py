"""The kernel of `qkflow/ops/csrc/delta_rule.c` on CPUs: tensors in, pointers down, tensors out."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

from qkflow.ops.csrc import library
from qkflow.ops.delta_rule.chunked import Forward, Kept
from qkflow.ops.delta_rule.gates import check_gates
from qkflow.ops.delta_rule.inputs import WIDEST, Inputs

CHUNK = 32
"""Tokens of a chunk unless told otherwise: half the products of pairs that 64 would take, and better conditioned."""
_MARKS = 16
"""Chunks between two memories that are kept for the backward pass, as the kernel has it."""
_FEW = 4
"""Tokens up to which the recurrence itself is faster."""
_MOST = 128
"""The most tokens of a chunk, as the kernel has it."""

_GATES = 2
"""What the kernel answers to gates out of range."""
_MUCH, _PAGE, _HUGE = 2**22, 2**12, 14
"""Bytes from which on large pages are asked for, bytes of a small one, and Linux's word for it (MADV_HUGEPAGE)."""


def mark_tokens(chunk: int) -> int:
    """Tokens between two memories that are kept."""
    return _size(chunk) * _MARKS


def _size(chunk: int) -> int:
    return min(max(chunk, 0) or CHUNK, _MOST)


def forward(given: Inputs, state: Tensor | None, scale: float, chunk: int, keep: bool) -> Forward:
    """Outputs and the memory after the last token; `chunk` 0 leaves it to the kernel."""
    q, v = given.q, given.v
    (n, t, h, width), deep = q.shape, v.shape[3]
    o, final = _empty(v, v.shape), _empty(q, (n, h, deep, width))
    if t <= _FEW and not keep and width <= WIDEST:
        _call("delta_few", q.dtype, (n, t, h, width, deep), (scale,), (*given, state, o, final))
        return Forward(o, final, q.new_empty(0), q.new_empty(0))
    every = mark_tokens(chunk)
    errors = _empty(v, v.shape) if keep else None
    marks = _empty(q, (n, h, (t + every - 1) // every, width, deep)) if keep else None
    settings = (_size(chunk), scale, torch.get_num_threads())
    _call("delta_forward", q.dtype, (n, t, h, width, deep), settings, (*given, state, o, final, errors, marks))
    return Forward(o, final, q.new_empty(0) if errors is None else errors, q.new_empty(0) if marks is None else marks)


def backward(
    go: Tensor | None, gfinal: Tensor | None, given: Inputs, kept: Kept, scale: float, chunk: int
) -> tuple[Tensor, ...]:
    """Gradients of the inputs, and of the memory before the first token."""
    (n, t, h, width), deep = given.q.shape, given.v.shape[3]
    grads = [None if x is None else _empty(x, x.shape) for x in given]
    gstate = _empty(given.q, (n, h, deep, width))
    settings = (_size(chunk), scale, torch.get_num_threads())
    _call("delta_backward", gstate.dtype, (n, t, h, width, deep), settings, (*given, go, gfinal, *kept, *grads, gstate))
    return *(gstate.new_empty(0) if x is None else x for x in grads), gstate


def _empty(like: Tensor, shape: Any) -> Tensor:
    """Room for a result; if it is much, on large pages, since touching fresh small ones costs as much as the rule."""
    room = torch.empty(shape, dtype=like.dtype, device=like.device)
    if room.nbytes >= _MUCH and (advise := _advise()) is not None:
        begin = -room.data_ptr() % _PAGE + room.data_ptr()
        advise(begin, (room.data_ptr() + room.nbytes - begin) // _PAGE * _PAGE, _HUGE)
    return room


@cache
def _advise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def _call(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], settings: tuple[Any, ...], tensors: tuple[Tensor | None, ...]
) -> None:
    """Shapes and where everything lies, to the kernel of that name. Decoding waits for this: it is kept short."""
    if 0 in shape:
        return
    held = [x if x is None or x.is_contiguous() else x.contiguous() for x in tensors]
    places = [None if x is None else x.data_ptr() for x in held]
    failed = _function(name, dtype)(*shape, *settings, *places)
    if failed == _GATES:
        check_gates(*tensors[3:6])  # pyright: ignore[reportArgumentType]
    if failed:
        raise MemoryError("the kernel of the delta rule could not get the memory for its chunks")


@cache
def _function(name: str, dtype: torch.dtype) -> Any:
    function = getattr(library(), f"{name}_{'float' if dtype == torch.float32 else 'double'}")
    shape = [ctypes.c_long, ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_int]
    settings = [ctypes.c_double] if name == "delta_few" else [ctypes.c_int, ctypes.c_double, ctypes.c_int]
    pointers = {"delta_few": 9, "delta_forward": 11, "delta_backward": 18}[name]
    function.argtypes = [*shape, *settings, *[ctypes.c_void_p] * pointers]
    return function
