"""The kernels of `circle.c` by pointer. Graphs do without: a compiler fuses what they do by itself."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from qkflow.ops.native import library, prepare, ready

_ALONE = 1 << 14
"""Angles up to which waking other threads takes longer than the work."""


def fits(*tensors: Tensor) -> bool:
    """Whether the kernels can serve: plain numbers on the CPU, and nobody who watches operations."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return False
    prepare()
    plain = all(x.device.type == "cpu" and x.dtype == tensors[0].dtype for x in tensors)
    return plain and tensors[0].dtype in (torch.float32, torch.float64) and ready()


def points(theta: Tensor) -> tuple[Tensor, bool]:
    """Cosines and sines, and whether all angles were finite."""
    made = theta.new_empty(*theta.shape, 2)
    return made, not _call("points", theta.numel(), theta, made)


def tangent(points: Tensor, mean: Tensor) -> Tensor:
    """How far along its circle each point is pulled."""
    made = points.new_empty(points.shape[:-1])
    _call("tangent", made.numel(), points, mean, made)
    return made


def tangent_backward(gy: Tensor, points: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the points and of the means."""
    gpoints, gmean = points.new_empty(points.shape), points.new_empty(points.shape)
    _call("tangent_backward", gy.numel(), gy, points, mean, gpoints, gmean)
    return gpoints, gmean


def _call(name: str, count: int, *tensors: Tensor) -> int:
    held = [x if x.is_contiguous() else x.contiguous() for x in tensors]
    threads = 1 if count <= _ALONE else torch.get_num_threads()
    return _function(name, held[0].dtype, len(held))(count, threads, *(x.data_ptr() for x in held))


@cache
def _function(name: str, dtype: torch.dtype, pointers: int) -> Any:
    function = getattr(library(), f"{name}_{'float' if dtype == torch.float32 else 'double'}")
    function.argtypes = [ctypes.c_long, ctypes.c_int, *[ctypes.c_void_p] * pointers]
    return function
