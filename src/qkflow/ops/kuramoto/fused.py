r"""Kuramoto attention without a t x u matrix in memory; `naive.py` defines it.

Since \cos(a - b) = \cos a \cos b + \sin a \sin b, a score is a dot product of the features e^{i \theta}. With the same
features as values, attention returns the circular mean C + i S = \sum_u A_{tu} e^{i \theta_u}. Its component along the
circle at \theta_t is the coupling, so PyTorch's fused attention can compute it:

    \sum_u A_{tu} \sin(\theta_u - \theta_t) = \cos \theta_t \, S - \sin \theta_t \, C                            (1)

A phase lag \alpha rotates the mean, and a harmonic m uses the features e^{i m \theta}:

    \sum_u A_{tu} \sin(\theta_u - \theta_t + \alpha)                                                              (2)
        = \cos \alpha (\cos \theta_t \, S - \sin \theta_t \, C) + \sin \alpha (\cos \theta_t \, C + \sin \theta_t \, S)

| symbol         | here     | shape     |
|----------------|----------|-----------|
| \theta_t       | `theta`  | `[...]`   |
| e^{i \theta_t} | `points` | `[... 2]` |
| C + i S        | `mean`   | `[... 2]` |

`phase_increment` and `shift_points` take `theta` and its `points`. Gradients go to `theta`, which is half as large; the
points themselves get none.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkflow.errors import NotFiniteError, UsageError
from qkflow.ops.csrc.eager import has_values, is_transformed
from qkflow.ops.kuramoto import cpu

Angles = Float[Tensor, "*n"]
Points = Float[Tensor, "*n 2"]
Weights = Float[Tensor, "h j"]


def points(theta: Angles) -> Points:
    r"""e^{i \theta} as cosine and sine.

    >>> points(torch.tensor([0.0, torch.pi])).round(decimals=6).tolist()
    [[1.0, 0.0], [-1.0, -0.0]]
    """
    if not theta.is_floating_point():
        raise UsageError(f"phases must have a floating-point dtype, got {theta.dtype}")
    if theta.dtype in (torch.bfloat16, torch.float16):
        return points(theta.float()).to(theta.dtype)
    is_plain = not torch.is_grad_enabled() or (not torch.compiler.is_compiling() and is_transformed())
    return _cos_sin(theta) if is_plain else _Points.apply(theta)


def tangent(points: Points, mean: Points) -> Angles:
    """The right-hand side of (1): the component of the mean along the circle at each point.

    >>> tangent(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.3, 0.4]])).tolist()
    [0.4000000059604645]
    """
    _check_points(points, mean)
    if not torch.is_grad_enabled() and points.shape == mean.shape and cpu.supports(points, mean):
        return cpu.tangent(points, mean)
    return points[..., 0] * mean[..., 1] - points[..., 1] * mean[..., 0]


def rotate_points(points: Points, rotation: Points) -> Points:
    """The product of complex numbers.

    >>> rotate_points(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, 1.0]])).tolist()
    [[-1.0, 0.0]]
    """
    (a, b), (c, d) = points.unbind(-1), rotation.unbind(-1)
    return torch.stack([a * c - b * d, a * d + b * c], -1)


def harmonics(points: Points, count: int) -> list[Points]:
    r"""e^{i m \theta} for m = 1, ..., count.

    >>> [p.round(decimals=6).tolist() for p in harmonics(torch.tensor([[0.0, 1.0]]), 2)]
    [[[0.0, 1.0]], [[-1.0, 0.0]]]
    """
    result = [points]
    while len(result) < count:
        result.append(rotate_points(result[-1], points))
    return result


def phase_increment(
    theta: Angles, points: Points, mean: Points, tangential: Weights, radial: Weights | None = None
) -> Angles:
    r"""Equation (2) times a step \eta: `tangential` is \eta \cos \alpha, `radial` is \eta \sin \alpha (None: no lag).

    >>> theta = torch.zeros(1, 1)
    >>> phase_increment(theta, points(theta), torch.tensor([[[0.3, 0.4]]]), torch.tensor([[2.0]])).tolist()
    [[0.800000011920929]]
    """
    _check_points(points, mean)
    _check_angles(theta, points)
    _check_tensors(points, tangential, radial)
    has_full_shape = all(x is None or x.shape == points.shape[-3:-1] for x in (tangential, radial))
    if has_full_shape and points.shape == mean.shape and cpu.supports(points, theta, mean, tangential, radial):
        if torch.is_grad_enabled():
            return _PhaseIncrement.apply(theta, points, mean, tangential, radial)
        return cpu.phase_increment(points, mean, tangential, radial)
    weights = [x if x is None else x.expand(points.shape[-3:-1]) for x in (tangential, radial)]
    return _phase_increment(points, mean.expand_as(points), *weights)  # pyright: ignore[reportArgumentType]


def shift_points(
    theta: Float[Tensor, "n t h j"],
    points: Float[Tensor, "n t h j 2"],
    rotation: Float[Tensor, "*n t h j 2"] | None,
    firsts: tuple[Float[Tensor, "n 1 h j 2"] | None, ...],
) -> tuple[Float[Tensor, "n t h j 2"], ...]:
    """Points shifted right by one token: rotated, as keys, and with two `firsts` also unrotated, as values.

    `firsts` are inserted before the first token; None inserts zeros.

    >>> theta = torch.tensor([0.0, torch.pi / 2, 1.0]).view(1, 3, 1, 1)
    >>> shift_points(theta, points(theta), None, (None,))[0].flatten(1).round(decimals=6).tolist()
    [[0.0, 0.0, 1.0, 0.0, -0.0, 1.0]]
    """
    _check_points(points, rotation, *firsts)
    _check_angles(theta, points)
    if points.ndim < 3 or len(firsts) not in (1, 2):
        raise UsageError(f"expected points [n, t, ..., 2] and one or two firsts, got {[*points.shape]}, {len(firsts)}")
    first_shape = (points.shape[0], 1, *points.shape[2:])
    has_full_shape = rotation is None or rotation.shape == points.shape[1:]
    has_full_shape = has_full_shape and all(x is None or x.shape == first_shape for x in firsts)
    if (
        has_full_shape and points.shape[1] and cpu.supports(points, theta, rotation, *firsts)
    ):  # the kernel does not broadcast
        first_key, first_value = (*firsts, None)[:2]
        return _ShiftPoints.apply(theta, points, rotation, first_key, first_value, len(firsts) > 1)
    return _shift_points(points, rotation, firsts)


def _check_points(first: Tensor, *others: Tensor | None) -> None:
    for x in (first, *others):
        if x is not None and (x.ndim < 1 or x.shape[-1] != 2):
            raise UsageError(f"points must be [..., 2], got {[*x.shape]}")
    _check_tensors(first, *others)


def _check_angles(theta: Tensor, points: Tensor) -> None:
    _check_tensors(points, theta)
    if theta.shape != points.shape[:-1]:
        raise UsageError(f"phases {[*theta.shape]} do not match their points {[*points.shape]}")


def _check_tensors(first: Tensor, *others: Tensor | None) -> None:
    if torch.compiler.is_compiling():  # it cannot trace `layout` in a backward pass, and checks devices itself
        return
    for x in (first, *others):
        if x is not None and (not x.is_floating_point() or x.device != first.device or x.layout != torch.strided):
            raise UsageError(f"got {x.dtype} on {x.device}: expected dense floating-point tensors on {first.device}")


class _Points(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, theta: Tensor) -> Tensor:
        points = _cos_sin(theta)
        ctx.save_for_backward(points)
        return points

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tangent(ctx.saved_tensors[0], grads[0])


class _PhaseIncrement(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, theta: Tensor, points: Tensor, mean: Tensor, tangential: Tensor, radial: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(theta, points, mean, tangential, radial)
        return cpu.phase_increment(points, mean, tangential, radial)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        theta, points, mean, tangential, radial = ctx.saved_tensors
        if not torch.is_grad_enabled():
            gtheta, *gothers = cpu.phase_increment_backward(grads[0], points, mean, tangential, radial)
            return gtheta, None, *gothers
        result = _phase_increment(_Points.apply(theta), mean, tangential, radial)  # for a second derivative
        is_needed = [needs and i != 1 for i, needs in enumerate(ctx.needs_input_grad)]
        inputs = [x for x, needed in zip(ctx.saved_tensors, is_needed, strict=True) if needed]
        gradients = iter(torch.autograd.grad(result, inputs, grads[0], create_graph=True))
        return tuple(next(gradients) if needed else None for needed in is_needed)


class _ShiftPoints(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        theta, points, rotation, first_key, first_value, with_values = args
        ctx.save_for_backward(theta, points, rotation)
        ctx.has_first = first_key is not None, first_value is not None
        key, value = cpu.shift_points(points, rotation, first_key, first_value, with_values)
        return (key,) if value is None else (key, value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (theta, points, rotation), (gkey, *others) = ctx.saved_tensors, grads
        gvalue = others[0] if others else None
        if torch.is_grad_enabled():  # for a second derivative
            gtheta = tangent(_Points.apply(theta), _unshift_gradients(gkey, gvalue, rotation))
        else:
            gtheta = cpu.shift_points_backward(gkey, gvalue, points, rotation)
        gfirsts = [g[:, :1] if has_first else None for g, has_first in zip(grads, ctx.has_first, strict=False)]
        return gtheta, None, None, *gfirsts, *[None] * (3 - len(gfirsts))


# ---- the same in PyTorch operations


def _cos_sin(theta: Tensor) -> Tensor:
    if cpu.supports(theta):
        points, is_finite = cpu.points(theta)
    else:
        points, is_finite = torch.stack([theta.cos(), theta.sin()], -1), True
        if theta.device.type == "cpu" and has_values(theta):  # elsewhere the check would synchronize
            is_finite = bool(points.isfinite().all())
    if not is_finite:
        raise NotFiniteError("phases must be finite, got NaN or infinite values")
    return points


def _phase_increment(points: Tensor, mean: Tensor, tangential: Tensor, radial: Tensor | None) -> Tensor:
    increment = tangential * (points[..., 0] * mean[..., 1] - points[..., 1] * mean[..., 0])
    return increment if radial is None else increment + radial * (points * mean).sum(-1)


def _shift_points(points: Tensor, rotation: Tensor | None, firsts: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    keys = points if rotation is None else rotate_points(points, rotation.expand_as(points))
    t, shape = points.shape[1], (points.shape[0], 1, *points.shape[2:])
    starts = [points.new_zeros(shape) if first is None else first.expand(shape) for first in firsts]
    end = (
        None if torch.compiler.is_compiling() else -1
    )  # `x[:, :-1]` would exclude length 2 from a graph for any length
    return tuple(torch.cat([first, x[:, :end]], 1)[:, :t] for first, x in zip(starts, (keys, points), strict=False))


def _unshift_gradients(gkey: Tensor, gvalue: Tensor | None, rotation: Tensor | None) -> Tensor:
    """Gradients of the points, from those of the shifted keys and values."""
    g = gkey[:, 1:]
    if rotation is not None:
        g = rotate_points(g, (rotation[..., :-1, :, :, :] * rotation.new_tensor([1.0, -1.0])).expand_as(g))
    g = g if gvalue is None else g + gvalue[:, 1:]
    return torch.cat([g, torch.zeros_like(gkey[:, :1])], 1)
