"""Phase operations on CPUs, by the C kernels of `csrc/phase.c`. torch.compile fuses the PyTorch operations instead."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from qkflow.ops.csrc import build
from qkflow.ops.csrc.eager import is_transformed
from qkflow.ops.few_rows import SINGLE_THREAD

_SINGLE_THREAD = 1 << 14
"""Number of angles up to which one thread is faster."""
_NOT_FINITE = 2
_Step, _StepArrays = ctypes.c_long * 6, ctypes.c_void_p * 13


def supports(first: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels can be used: same dtype and device, and no tracing, dispatch mode or `torch.func`."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or is_transformed():
        return False
    is_same = all(x is None or (x.dtype == first.dtype and x.device == first.device) for x in others)
    return is_same and build.supports(first)


def points(theta: Tensor) -> tuple[Tensor, bool]:
    """Cosines and sines, and whether all angles are finite."""
    result = theta.new_empty(*theta.shape, 2)
    return result, not _call("points", (theta.numel(),), theta, result)


def tangent(points: Tensor, mean: Tensor) -> Tensor:
    """The component of each mean along the circle at its point."""
    result = points.new_empty(points.shape[:-1])
    _call("tangent", (result.numel(),), points, mean, result)
    return result


def phase_increment(points: Tensor, mean: Tensor, tangential: Tensor, radial: Tensor | None) -> Tensor:
    """`tangential` times the tangential component, plus `radial` times the radial one."""
    result = points.new_empty(points.shape[:-1])
    _call(
        "phase_increment",
        (result.numel() // tangential.numel(), tangential.numel()),
        points,
        mean,
        tangential,
        radial,
        result,
    )
    return result


def phase_increment_backward(
    gy: Tensor, points: Tensor, mean: Tensor, tangential: Tensor, radial: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of the angles, the means, `tangential` and `radial`."""
    shape = (gy.numel() // tangential.numel(), tangential.numel())
    gtheta, gmean, gtangential = (
        points.new_empty(gy.shape),
        points.new_empty(points.shape),
        tangential.new_empty(tangential.shape),
    )
    gradial = None if radial is None else tangential.new_empty(tangential.shape)
    inputs = (gy, points, mean, tangential, radial)
    if _call("phase_increment_backward", shape, *inputs, gtheta, gmean, gtangential, gradial):
        raise MemoryError("the C kernel of the phase increment could not allocate its buffers")
    return gtheta, gmean, gtangential, gradial


def shift_points(
    points: Tensor, rotation: Tensor | None, first_key: Tensor | None, first_value: Tensor | None, with_values: bool
) -> tuple[Tensor, Tensor | None]:
    """Points shifted right by one token: rotated, as keys, and if requested also unrotated, as values."""
    key, value = points.new_empty(points.shape), points.new_empty(points.shape) if with_values else None
    _call("shift_points", _sizes(points), points, rotation, first_key, first_value, key, value)
    return key, value


def shift_points_backward(gkey: Tensor, gvalue: Tensor | None, points: Tensor, rotation: Tensor | None) -> Tensor:
    """The gradient of the angles."""
    gtheta = points.new_empty(points.shape[:-1])
    _call("shift_points_backward", _sizes(points), gkey, gvalue, points, rotation, gtheta)
    return gtheta


def layer_step(
    theta: Tensor,
    query: Tensor,
    temperature: Tensor,
    step: Tensor,
    lag: Tensor | None,
    rotation: Tensor | None,
    last: tuple[Tensor, ...],
    buffers: tuple[Tensor, ...],
    slots: tuple[int, int],
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """One token of a layer in one native call, which writes to `buffers`: the output, and the next `last`.

    `slots` are the slot of the token and the first that it sees. None if a phase is not finite.
    """
    (h, e), (rows, capacity), (slot, first) = step.shape, buffers[0].shape[:2], slots
    theta, y = theta.contiguous(), torch.empty_like(theta, memory_format=torch.contiguous_format)
    following = tuple([torch.empty_like(x) for x in last])
    inputs = (theta, query, temperature, step, lag, rotation, *(*last, None)[:2], *buffers, *(*following, None)[:2], y)
    pointers = [None if x is None else x.data_ptr() for x in inputs]
    threads = 1 if rows * h * (slot + 1 - first) * 4 * e <= SINGLE_THREAD else torch.get_num_threads()
    linear_threads = 1 if query.numel() <= SINGLE_THREAD else torch.get_num_threads()
    scalars = (threads, linear_threads, _Step(rows, h, e, slot, first, capacity), _StepArrays(*pointers))
    status = build.call("kuramoto_layer_few", "iipp", scalars, (), theta.dtype)
    if status == _NOT_FINITE:
        return None
    if status:
        raise MemoryError("the C kernel of Kuramoto attention could not allocate its buffers")
    return y, following


def _sizes(points: Tensor) -> tuple[int, int, int]:
    """Rows, tokens, and angles per token."""
    rows, t = points.shape[:2]
    return rows, t, points.shape[2:].numel() // 2


def _call(name: str, sizes: tuple[int, ...], *tensors: Tensor | None) -> int:
    threads = 1 if math.prod(sizes) <= _SINGLE_THREAD else torch.get_num_threads()
    return build.call(name, "l" * len(sizes) + "i", (*sizes, threads), tensors)
