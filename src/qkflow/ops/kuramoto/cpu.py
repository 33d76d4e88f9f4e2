"""Phase operations on CPUs, by the C kernels of `csrc/phase.c`. torch.compile fuses the PyTorch operations instead."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from qkflow.ops.csrc import build

_SINGLE_THREAD = 1 << 14
"""Number of angles up to which one thread is faster."""


def supports(first: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels can be used: same dtype and device, and no tracing or dispatch mode."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
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


def _sizes(points: Tensor) -> tuple[int, int, int]:
    """Rows, tokens, and angles per token."""
    rows, t = points.shape[:2]
    return rows, t, points.shape[2:].numel() // 2


def _call(name: str, sizes: tuple[int, ...], *tensors: Tensor | None) -> int:
    threads = 1 if math.prod(sizes) <= _SINGLE_THREAD else torch.get_num_threads()
    return build.call(name, "l" * len(sizes) + "i", (*sizes, threads), tensors)
