"""Drift and kick on CPUs, by the C kernel `csrc/symplectic.c`, as operators that torch.compile treats as opaque."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.flop_counter import register_flop_formula

from qkflow.errors import UsageError, unknown
from qkflow.ops.csrc import build

Activation = Literal["silu", "sigmoid"]
MLPWeights = tuple[Tensor, Tensor, Tensor, Tensor]
"""W_1, b_1, W_2 and b_2 of a force."""

_MIN_PACKED = 32
"""Number of rows from which packing the weights and using threads pays off."""
_ACTIVATIONS = ("silu", "sigmoid")
_ARGUMENTS = "Tensor dt, Tensor w1, Tensor b1, Tensor w2, Tensor b2, float[] coefficients, int activation"
_OPS = torch.library.Library("qkflow", "FRAGMENT")
_OPS.define(f"drift_kick(Tensor q, Tensor k, {_ARGUMENTS}) -> Tensor[]")
_OPS.define(f"drift_kick_backward(Tensor q, Tensor? k, Tensor? gq, Tensor gk, {_ARGUMENTS}) -> Tensor[]")


def check_shapes(q: Tensor, k: Tensor, dt: Tensor, force: Sequence[Tensor], coefficients: Sequence[float]) -> None:
    """Raise if the shapes do not match, or if there is no kick."""
    shape, (w1, b1, w2, b2) = q.shape, force
    if not shape or shape[-1] < 1 or k.shape != shape or k.dtype != q.dtype:
        raise UsageError(
            f"queries and keys must have the same shape [..., k] and dtype, got {[*shape]} {q.dtype} and {[*k.shape]}"
            f" {k.dtype}"
        )
    width, hidden = shape[-1], b1.numel()
    is_valid = b1.ndim == 1 and w1.shape == (hidden, width) and w2.shape == (width, hidden) and b2.shape == (width,)
    if not is_valid or hidden < 1:
        raise UsageError(
            f"W1, b1, W2 and b2 must be [m, k], [m], [k, m] and [k] with k = {width}, got {[[*x.shape] for x in force]}"
        )
    if dt.ndim != 0 or len(coefficients) < 2:
        raise UsageError(
            f"expected a scalar step and at least one kick (two coefficients), got {[*dt.shape]} and {coefficients}"
        )


def forward(
    q: Tensor, k: Tensor, dt: Tensor, force: MLPWeights, coefficients: tuple[float, ...], activation: Activation
) -> tuple[Tensor, Tensor]:
    """Queries and keys after the motion."""
    args = (q, k, dt, *force, coefficients, _index(activation))
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        moved = torch.ops.qkflow.drift_kick(*args)
    else:
        moved = _forward(*args)  # bypasses the dispatcher, whose overhead matters in decoding
    return (moved[0], moved[1]) if any(coefficients) else (q, moved[0])


def backward(
    q: Tensor,
    k: Tensor | None,
    gq: Tensor | None,
    gk: Tensor | None,
    dt: Tensor,
    force: MLPWeights,
    coefficients: tuple[float, ...],
    activation: Activation,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, dt, W_1, b_1, W_2 and b_2, given q and k after the motion."""
    if gk is None:
        gk = torch.zeros_like(q)
    args = (q, k, gq, gk, dt, *force, coefficients, _index(activation))
    *moved, sums = torch.ops.qkflow.drift_kick_backward(*args)
    *grads, gdt = sums.split([*(weight.numel() for weight in force), 1])
    gforce = [grad.view(weight.shape) for grad, weight in zip(grads, force, strict=True)]
    return moved[0], (moved[1] if any(coefficients) else gk), gdt.view(dt.shape), *gforce


def _index(activation: str) -> int:
    if activation not in _ACTIVATIONS:
        raise unknown("activation", activation, _ACTIVATIONS)
    return _ACTIVATIONS.index(activation)


# The operators. Without a drift the queries do not move: they return only the keys, and no gradient of the keys.


def _forward(q: Tensor, k: Tensor, dt: Tensor, *args: Any) -> list[Tensor]:
    *force, coefficients, activation = args
    moved = [_empty(q), _empty(k)] if any(coefficients) else [_empty(k)]
    q_out = moved[0] if any(coefficients) else None
    name = "drift_kick" if q.numel() >= _MIN_PACKED * q.shape[-1] else "drift_kick_few"
    _call(name, q, dt, force, coefficients, activation, (q, k, q_out, moved[-1]))
    return moved


def _checked_forward(q: Tensor, k: Tensor, dt: Tensor, *args: Any) -> list[Tensor]:
    _check_operands(q, (k,), dt, *args)
    return _forward(q, k, dt, *args)


def _empty_forward(q: Tensor, k: Tensor, dt: Tensor, *args: Any) -> list[Tensor]:
    _check_operands(q, (k,), dt, *args)
    return [_empty(q), _empty(k)] if any(args[-2]) else [_empty(k)]


def _checked_backward(
    q: Tensor, k: Tensor | None, gq: Tensor | None, gk: Tensor, dt: Tensor, *args: Any
) -> list[Tensor]:
    *force, coefficients, activation = args
    *moved, sums = _empty_backward(q, k, gq, gk, dt, *args)
    gk_out = moved[1] if any(coefficients) else None
    _call("drift_kick_backward", q, dt, force, coefficients, activation, (q, k, gq, gk, moved[0], gk_out, sums))
    return [*moved, sums]


def _empty_backward(q: Tensor, k: Tensor | None, gq: Tensor | None, gk: Tensor, dt: Tensor, *args: Any) -> list[Tensor]:
    *force, coefficients, _ = args
    _check_operands(q, (gk, k, gq), dt, *args)
    if gk is None or (k is None and any(coefficients)):
        raise UsageError("the backward pass requires the gradient of the keys, and with a drift the keys; got None")
    moved = [_empty(q) for _ in range(2 if any(coefficients) else 1)]
    return [*moved, q.new_empty(sum(weight.numel() for weight in force) + 1)]


def _check_operands(q: Tensor, others: Sequence[Tensor | None], dt: Tensor, *args: Any) -> None:
    *force, coefficients, activation = args
    for x in (*others, *force, dt):
        if x is not None and (x.device != q.device or (x.dtype != q.dtype and x is not dt)):
            raise UsageError(f"got {x.dtype} on {x.device}: expected {q.dtype} on {q.device}, as the queries")
    for x in others:
        if x is not None:
            check_shapes(q, x, dt, force, coefficients)
    if not 0 <= activation < len(_ACTIVATIONS):
        raise UsageError(f"activation {activation}: expected 0 (silu) or 1 (sigmoid)")


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _call(
    name: str,
    q: Tensor,
    dt: Tensor,
    force: Sequence[Tensor],
    coefficients: Sequence[float],
    activation: int,
    tensors: tuple[Tensor | None, ...],
) -> None:
    width = q.shape[-1]
    sizes = (q.numel() // width, width, force[0].shape[0], activation, len(coefficients) - 1, torch.get_num_threads())
    scalars = (*sizes, dt.item(), doubles(tuple(coefficients)))
    if build.call(name, "liiiiidp", scalars, (*force, *tensors)):
        raise MemoryError("the C kernel of the coupling could not allocate its buffers")


@lru_cache(maxsize=64)
def doubles(values: tuple[float, ...]) -> Any:
    """The numbers as a C array."""
    return (ctypes.c_double * len(values))(*values)


_OPS.impl("drift_kick", _checked_forward, "CPU")
_OPS.impl("drift_kick_backward", _checked_backward, "CPU")
_OPS.impl("drift_kick", _empty_forward, "Meta")
_OPS.impl("drift_kick_backward", _empty_backward, "Meta")


@register_flop_formula(torch.ops.qkflow.drift_kick)
def _forward_flops(q: Any, k: Any, dt: Any, w1: Any, *args: Any, **_: Any) -> int:
    """Two products per kick; the arguments are shapes."""
    coefficients = args[3]
    return 2 * 2 * math.prod(q[:-1]) * w1[0] * w1[1] * (len(coefficients) - 1)


@register_flop_formula(torch.ops.qkflow.drift_kick_backward)
def _backward_flops(q: Any, k: Any, gq: Any, gk: Any, dt: Any, w1: Any, *args: Any, **_: Any) -> int:
    """Five products per kick, and one more to undo it if a drift precedes it."""
    coefficients = args[3]
    kicks = len(coefficients) - 1
    undone = sum(any(coefficients[: step + 1]) for step in range(kicks))
    return 2 * math.prod(q[:-1]) * w1[0] * w1[1] * (5 * kicks + undone)
