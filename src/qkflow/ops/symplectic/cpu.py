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


def forward(
    q: Tensor, k: Tensor, dt: Tensor, force: MLPWeights, coefficients: tuple[float, ...], activation: Activation
) -> tuple[Tensor, Tensor]:
    """Queries and keys after the motion."""
    args = (q, k, dt, *force, coefficients, _ACTIVATIONS.index(activation))
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
    args = (q, k, gq, gk, dt, *force, coefficients, _ACTIVATIONS.index(activation))
    *moved, sums = torch.ops.qkflow.drift_kick_backward(*args)
    *grads, gdt = sums.split([*(weight.numel() for weight in force), 1])
    gforce = [grad.view(weight.shape) for grad, weight in zip(grads, force, strict=True)]
    return moved[0], (moved[1] if any(coefficients) else gk), gdt.view(dt.shape), *gforce


# The operators. Without a drift the queries do not move: they return only the keys, and no gradient of the keys.


def _forward(q: Tensor, k: Tensor, dt: Tensor, *args: Any) -> list[Tensor]:
    *force, coefficients, activation = args
    moved = _empty_forward(q, k, dt, *args)
    q_out = moved[0] if any(coefficients) else None
    name = "drift_kick" if q.numel() >= _MIN_PACKED * q.shape[-1] else "drift_kick_few"
    _call(name, q, dt, force, coefficients, activation, (q, k, q_out, moved[-1]))
    return moved


def _empty_forward(q: Tensor, k: Tensor, *args: Any) -> list[Tensor]:
    return [_empty(q), _empty(k)] if any(args[-2]) else [_empty(k)]


def _backward(q: Tensor, k: Tensor | None, gq: Tensor | None, gk: Tensor, dt: Tensor, *args: Any) -> list[Tensor]:
    *force, coefficients, activation = args
    *moved, sums = _empty_backward(q, k, gq, gk, dt, *args)
    gk_out = moved[1] if any(coefficients) else None
    _call("drift_kick_backward", q, dt, force, coefficients, activation, (q, k, gq, gk, moved[0], gk_out, sums))
    return [*moved, sums]


def _empty_backward(q: Tensor, k: Tensor | None, gq: Tensor | None, gk: Tensor, dt: Tensor, *args: Any) -> list[Tensor]:
    *force, coefficients, _ = args
    moved = [_empty(q) for _ in range(2 if any(coefficients) else 1)]
    return [*moved, q.new_empty(sum(weight.numel() for weight in force) + 1)]


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


_OPS.impl("drift_kick", _forward, "CPU")
_OPS.impl("drift_kick_backward", _backward, "CPU")
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
