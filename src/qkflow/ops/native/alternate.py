"""The kernel of `alternate.c` as operators of torch: seen by its compiler and by its FLOP counter, opaque to both."""

from __future__ import annotations

import ctypes
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from qkflow.ops.native import library, pointer

Activation = Literal["silu", "sigmoid"]
Perceptron = tuple[Tensor, Tensor, Tensor, Tensor]
"""W_1, b_1, W_2 and b_2 of a force."""

_ACTIVATIONS = ("silu", "sigmoid")
_MOTION = "Tensor dt, Tensor w1, Tensor b1, Tensor w2, Tensor b2, float[] parts, int activation"
_OPS = torch.library.Library("qkflow", "FRAGMENT")
_OPS.define(f"alternate(Tensor q, Tensor k, {_MOTION}) -> Tensor[]")
_OPS.define(f"alternate_backward(Tensor q, Tensor? k, Tensor? gq, Tensor? gk, {_MOTION}) -> Tensor[]")


def native_forward(
    q: Tensor, k: Tensor, dt: Tensor, force: Perceptron, parts: tuple[float, ...], activation: Activation
) -> tuple[Tensor, Tensor]:
    """The motion of rows: (q, k) after it."""
    moved = torch.ops.qkflow.alternate(q, k, dt, *force, parts, _ACTIVATIONS.index(activation))
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
    parts: list[float],
    activation: int,
) -> list[Tensor]:
    q, k, *force = (x.contiguous() for x in (q, k, w1, b1, w2, b2))
    moved = [torch.empty_like(q), torch.empty_like(k)] if any(parts) else [torch.empty_like(k)]
    _call("alternate", q, dt, force, parts, activation, (q, k, moved[0] if any(parts) else None, moved[-1]))
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
    q, gk, *force = (x.contiguous() for x in (q, gk, w1, b1, w2, b2))
    k, gq = (None if x is None else x.contiguous() for x in (k, gq))
    moved = [torch.empty_like(q) for _ in range(2 if any(parts) else 1)]
    sums = q.new_empty(sum(weight.numel() for weight in force) + 1)
    out = (moved[0], moved[1] if any(parts) else None, sums)
    _call("alternate_backward", q, dt, force, parts, activation, (q, k, gq, gk, *out))
    return [*moved, sums]


def _call(
    name: str,
    q: Tensor,
    dt: Tensor,
    force: list[Tensor],
    parts: list[float],
    activation: int,
    tensors: tuple[Tensor | None, ...],
) -> None:
    function: Any = getattr(library(), f"{name}_{'float' if q.dtype == torch.float32 else 'double'}")
    failed = function(
        ctypes.c_long(len(q)),
        q.shape[1],
        len(force[0]),
        activation,
        len(parts) - 1,
        (ctypes.c_double * len(parts))(*parts),
        ctypes.c_double(float(dt)),
        *map(pointer, force),
        torch.get_num_threads(),
        *map(pointer, tensors),
    )
    if failed:
        raise MemoryError("the coupling's kernel could not get the memory for its tiles")


def _forward_shapes(q: Tensor, k: Tensor, *rest: Any) -> list[Tensor]:
    return [torch.empty_like(q), torch.empty_like(k)] if any(rest[-2]) else [torch.empty_like(k)]


def _backward_shapes(
    q: Tensor, k: Tensor | None, gq: Tensor | None, gk: Tensor, dt: Tensor, *rest: Any
) -> list[Tensor]:
    *force, parts, _ = rest
    moved = [torch.empty_like(q) for _ in range(2 if any(parts) else 1)]
    return [*moved, q.new_empty(sum(weight.numel() for weight in force) + 1)]


_OPS.impl("alternate", _forward, "CPU")
_OPS.impl("alternate_backward", _backward, "CPU")
_OPS.impl("alternate", _forward_shapes, "Meta")
_OPS.impl("alternate_backward", _backward_shapes, "Meta")


@register_flop_formula(torch.ops.qkflow.alternate)
def _forward_flops(q: Any, k: Any, dt: Any, w1: Any, b1: Any, w2: Any, b2: Any, parts: Any, *_: Any, **__: Any) -> int:
    """Two products a kick; shapes come in place of tensors."""
    return 2 * 2 * q[0] * w1[0] * w1[1] * (len(parts) - 1)


@register_flop_formula(torch.ops.qkflow.alternate_backward)
def _backward_flops(q: Any, k: Any, gq: Any, gk: Any, dt: Any, w1: Any, *rest: Any, **__: Any) -> int:
    """Five products a kick, and one more to undo it where a drift came before."""
    parts = rest[3]
    kicks = len(parts) - 1
    undone = sum(any(parts[: step + 1]) for step in range(kicks))
    return 2 * q[0] * w1[0] * w1[1] * (5 * kicks + undone)
