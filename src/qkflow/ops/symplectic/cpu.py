"""The kernel of `symplectic.c` as operators of torch: seen by its compiler and by its FLOP counter, opaque to both."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.flop_counter import register_flop_formula

from qkflow.ops.csrc import library

Activation = Literal["silu", "sigmoid"]
Perceptron = tuple[Tensor, Tensor, Tensor, Tensor]
"""W_1, b_1, W_2 and b_2 of a force."""

MANY = 32
"""Rows from which on it pays to pack the weights and to wake the other threads."""
_ACTIVATIONS = ("silu", "sigmoid")
_MOTION = "Tensor dt, Tensor w1, Tensor b1, Tensor w2, Tensor b2, float[] parts, int activation"
_OPS = torch.library.Library("qkflow", "FRAGMENT")
_OPS.define(f"alternate(Tensor q, Tensor k, {_MOTION}) -> Tensor[]")
_OPS.define(f"alternate_backward(Tensor q, Tensor? k, Tensor? gq, Tensor gk, {_MOTION}) -> Tensor[]")


def native_forward(
    q: Tensor, k: Tensor, dt: Tensor, force: Perceptron, parts: tuple[float, ...], activation: Activation
) -> tuple[Tensor, Tensor]:
    """The motion of rows: (q, k) after it."""
    which = _ACTIVATIONS.index(activation)
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        moved = torch.ops.qkflow.alternate(q, k, dt, *force, parts, which)
    else:  # nobody watches: straight to it, since decoding would feel the detour
        moved = _forward(q, k, dt, *force, parts, which)
    return (moved[0], moved[1]) if any(parts) else (q, moved[0])


def native_backward(
    q: Tensor,
    k: Tensor | None,
    gq: Tensor | None,
    gk: Tensor | None,
    dt: Tensor,
    force: Perceptron,
    parts: tuple[float, ...],
    activation: Activation,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, dt, W_1, b_1, W_2 and b_2, from the state after the motion."""
    which = _ACTIVATIONS.index(activation)
    if gk is None:
        gk = torch.zeros_like(q)
    *moved, sums = torch.ops.qkflow.alternate_backward(q, k, gq, gk, dt, *force, parts, which)
    sizes = [weight.numel() for weight in force]
    *grads, gdt = sums.split([*sizes, 1])
    shaped = [grad.view(weight.shape) for grad, weight in zip(grads, force, strict=True)]
    return moved[0], (moved[1] if any(parts) else gk), gdt.view(dt.shape), *shaped


def _forward(
    q: Tensor,
    k: Tensor,
    dt: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    parts: Sequence[float],
    activation: int,
) -> list[Tensor]:
    drifts = any(parts)
    moved = [_like(q), _like(k)] if drifts else [_like(k)]
    name = "alternate" if q.numel() >= MANY * q.shape[-1] else "alternate_few"
    _call(name, (w1, b1, w2, b2), dt, parts, activation, (q, k, moved[0] if drifts else None, moved[-1]))
    return moved


def _backward(
    q: Tensor,
    k: Tensor | None,
    gq: Tensor | None,
    gk: Tensor,
    dt: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    parts: list[float],
    activation: int,
) -> list[Tensor]:
    force = (w1, b1, w2, b2)
    moved = [_like(q) for _ in range(2 if any(parts) else 1)]
    sums = q.new_empty(sum(weight.numel() for weight in force) + 1)
    out = (moved[0], moved[1] if any(parts) else None, sums)
    _call("alternate_backward", force, dt, parts, activation, (q, k, gq, gk, *out))
    return [*moved, sums]


def _like(x: Tensor) -> Tensor:
    """Room for as much as `x`, one row after the other however `x` lies."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _call(
    name: str,
    force: Perceptron,
    dt: Tensor,
    parts: Sequence[float],
    activation: int,
    tensors: tuple[Tensor | None, ...],
) -> None:
    """Rows, shapes and where everything lies, to the kernel of that name. Decoding waits for this: it is kept short."""
    rows = cast(Tensor, tensors[0])  # the queries, which are always there
    held = [x if x is None or x.is_contiguous() else x.contiguous() for x in (*force, *tensors)]
    places = [None if x is None else x.data_ptr() for x in held]
    width = rows.shape[-1]
    failed = _function(name, rows.dtype, len(places))(
        rows.numel() // width,
        width,
        force[0].shape[0],
        activation,
        len(parts) - 1,
        _doubles(tuple(parts)),
        dt.item(),
        *places[:4],
        torch.get_num_threads(),
        *places[4:],
    )
    if failed:
        raise MemoryError("the coupling's kernel could not get the memory for its tiles")


@cache
def _function(name: str, dtype: torch.dtype, pointers: int) -> Any:
    function = getattr(library(), f"{name}_{'float' if dtype == torch.float32 else 'double'}")
    kinds = [ctypes.c_long, *[ctypes.c_int] * 4, ctypes.c_void_p, ctypes.c_double, *[ctypes.c_void_p] * 4, ctypes.c_int]
    function.argtypes = [*kinds, *[ctypes.c_void_p] * (pointers - 4)]
    return function


@lru_cache(maxsize=64)
def _doubles(values: tuple[float, ...]) -> Any:
    return (ctypes.c_double * len(values))(*values)


def _forward_shapes(q: Tensor, k: Tensor, *rest: Any) -> list[Tensor]:
    return [_like(q), _like(k)] if any(rest[-2]) else [_like(k)]


def _backward_shapes(
    q: Tensor, k: Tensor | None, gq: Tensor | None, gk: Tensor, dt: Tensor, *rest: Any
) -> list[Tensor]:
    *force, parts, _ = rest
    moved = [_like(q) for _ in range(2 if any(parts) else 1)]
    return [*moved, q.new_empty(sum(weight.numel() for weight in force) + 1)]


_OPS.impl("alternate", _forward, "CPU")
_OPS.impl("alternate_backward", _backward, "CPU")
_OPS.impl("alternate", _forward_shapes, "Meta")
_OPS.impl("alternate_backward", _backward_shapes, "Meta")


@register_flop_formula(torch.ops.qkflow.alternate)
def _forward_flops(q: Any, k: Any, dt: Any, w1: Any, b1: Any, w2: Any, b2: Any, parts: Any, *_: Any, **__: Any) -> int:
    """Two products a kick; shapes come in place of tensors."""
    return 2 * 2 * math.prod(q[:-1]) * w1[0] * w1[1] * (len(parts) - 1)


@register_flop_formula(torch.ops.qkflow.alternate_backward)
def _backward_flops(q: Any, k: Any, gq: Any, gk: Any, dt: Any, w1: Any, *rest: Any, **__: Any) -> int:
    """Five products a kick, and one more to undo it where a drift came before."""
    parts = rest[3]
    kicks = len(parts) - 1
    undone = sum(any(parts[: step + 1]) for step in range(kicks))
    return 2 * math.prod(q[:-1]) * w1[0] * w1[1] * (5 * kicks + undone)
