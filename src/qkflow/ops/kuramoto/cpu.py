"""The kernels of `phase.c` by pointer. Graphs do without: a compiler fuses what they do by itself."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from qkflow.ops.csrc import library, prepare, ready

_ALONE = 1 << 14
"""Angles up to which waking other threads takes longer than the work."""


def fits(first: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels can serve: plain numbers on the CPU, all of one kind, and nobody who watches operations."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return False
    prepare()
    alike = all(x is None or (x.dtype == first.dtype and x.device == first.device) for x in others)
    return alike and first.device.type == "cpu" and first.dtype in (torch.float32, torch.float64) and ready()


def points(theta: Tensor) -> tuple[Tensor, bool]:
    """Cosines and sines, and whether all angles were finite."""
    made = theta.new_empty(*theta.shape, 2)
    return made, not _call("points", (theta.numel(),), theta, made)


def tangent(points: Tensor, mean: Tensor) -> Tensor:
    """How far along its circle each point is pulled."""
    made = points.new_empty(points.shape[:-1])
    _call("tangent", (made.numel(),), points, mean, made)
    return made


def pull(points: Tensor, mean: Tensor, along: Tensor, across: Tensor | None) -> Tensor:
    """How far each point is pulled, `along` its circle and, with a lag, `across` it."""
    made = points.new_empty(points.shape[:-1])
    _call("pull", (made.numel() // along.numel(), along.numel()), points, mean, along, across, made)
    return made


def pull_backward(
    gy: Tensor, points: Tensor, mean: Tensor, along: Tensor, across: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of the angles, the means, and what they are weighed by."""
    shape, size = (gy.numel() // along.numel(), along.numel()), along.shape
    made = [points.new_empty(gy.shape), points.new_empty(points.shape), along.new_empty(size)]
    gacross = None if across is None else along.new_empty(size)
    if _call("pull_backward", shape, gy, points, mean, along, across, *made, gacross):
        raise MemoryError("the pull's kernel could not get the memory for its sums")
    return made[0], made[1], made[2], gacross


def delay(
    points: Tensor, by: Tensor | None, first_key: Tensor | None, first_late: Tensor | None, both: bool
) -> tuple[Tensor, Tensor | None]:
    """Points one token late as turned keys, and, if wished, as they are."""
    key, late = points.new_empty(points.shape), points.new_empty(points.shape) if both else None
    _call("delay", _rows(points), points, by, first_key, first_late, key, late)
    return key, late


def delay_backward(gkey: Tensor, glate: Tensor | None, points: Tensor, by: Tensor | None) -> Tensor:
    """The gradient of the angles."""
    made = points.new_empty(points.shape[:-1])
    _call("delay_backward", _rows(points), gkey, glate, points, by, made)
    return made


def _rows(points: Tensor) -> tuple[int, int, int]:
    rows, t = points.shape[:2]
    return rows, t, points.shape[2:].numel() // 2


def _call(name: str, shape: tuple[int, ...], *tensors: Tensor | None) -> int:
    held = [x if x is None or x.is_contiguous() else x.contiguous() for x in tensors]
    threads = 1 if math.prod(shape) <= _ALONE else torch.get_num_threads()
    function = _function(name, _dtype(held), len(shape), len(held))
    return function(*shape, threads, *(None if x is None else x.data_ptr() for x in held))


def _dtype(tensors: Sequence[Tensor | None]) -> torch.dtype:
    return next(x.dtype for x in tensors if x is not None)


@cache
def _function(name: str, dtype: torch.dtype, sizes: int, pointers: int) -> Any:
    function = getattr(library(), f"{name}_{'float' if dtype == torch.float32 else 'double'}")
    function.argtypes = [*[ctypes.c_long] * sizes, ctypes.c_int, *[ctypes.c_void_p] * pointers]
    return function
