r"""Kuramoto attention on the torus (Nunley, https://arxiv.org/abs/2606.11585): tokens are phases that synchronise.

    s_{tu} = \tau \sum_j g_j \cos(\theta_{uj} - \theta_{tj} + \omega_j (u - t))      gated cosines, with a drift   (1)
    A_{tu} = softmax_u s_{tu}                                                                                      (2)
    \Delta\theta_{tj} = \eta_j \sum_u A_{tu} \sin(\theta_{uj} - \theta_{tj})         Kuramoto's coupling           (3)

Since  \cos(a - b) = \cos a \cos b + \sin a \sin b,  a score is a dot product of doubled features e^{i \theta}, and with
the same features as values attention returns the circular mean  C + i S = \sum_u A_{tu} e^{i \theta_u}.  Its component
along the circle at \theta_t is the coupling, so torch's fused attention does all of it with no t x u matrix in memory:

    \sum_u A_{tu} \sin(\theta_u - \theta_t) = \cos \theta_t \, S - \sin \theta_t \, C                              (4)

Frustration (Sakaguchi's phase lag, and harmonics m of a kernel) turns the mean before it pulls:

    \Delta\theta_{tj} = \eta_j \sum_m a_{mj} \sum_u A_{tu} \sin(m (\theta_{uj} - \theta_{tj}) + \alpha_{mj})       (5)

| symbol                  | here     | shape           |
|-------------------------|----------|-----------------|
| \theta_t                | `theta`  | `[...]`         |
| e^{i \theta_t}          | `points` | `[... 2]`       |
| C + i S                 | `mean`   | `[... 2]`       |
| A                       | `map`    | `[b h t u]`     |
"""

from __future__ import annotations

from typing import Any

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from qkflow.errors import NotFiniteError
from qkflow.ops.kuramoto import cpu

Angles = Float[Tensor, "*n"]
Points = Float[Tensor, "*n 2"]
Weights = Float[Tensor, "h j"]
Map = Float[Tensor, "b h t u"]


def coupling(theta: Float[Tensor, "b t h j"], map: Map) -> Float[Tensor, "b t h j"]:
    """Equation (3) without its steps, by definition: every pair of phases in memory at once. The truth for (4).

    >>> theta = torch.tensor([0.0, torch.pi / 2]).view(1, 2, 1, 1)
    >>> coupling(theta, torch.tensor([[[[0.0, 0.0], [1.0, 0.0]]]])).flatten().tolist()
    [0.0, -1.0]
    """
    apart = theta[:, None] - theta[:, :, None]  # [b t u h j]: theta_u - theta_t
    return einsum(map, apart.sin(), "b h t u, b t u h j -> b t h j")


def energy(theta: Float[Tensor, "b t h j"], map: Map) -> Float[Tensor, "b t h"]:
    r"""The energy of each row,  E_t = -\sum_u A_{tu} \sum_j \cos(\theta_{uj} - \theta_{tj}):  (3) is its descent.

    >>> energy(torch.zeros(1, 2, 1, 3), torch.tensor([[[[1.0, 0.0], [0.5, 0.5]]]])).flatten().tolist()
    [-3.0, -3.0]
    """
    apart = theta[:, None] - theta[:, :, None]
    return -einsum(map, apart.cos(), "b h t u, b t u h j -> b t h")


def order(theta: Float[Tensor, "*n t j"]) -> Float[Tensor, "*n j"]:
    r"""The order parameter  R_j = |\frac{1}{T} \sum_t e^{i \theta_{tj}}|:  0 for phases all around, 1 in step.

    >>> order(torch.tensor([[0.0, 0.3], [torch.pi, 0.3]])).round(decimals=6).tolist()
    [0.0, 1.0]
    """
    return torch.linalg.vector_norm(points(theta).mean(-3), dim=-1)


def points(theta: Angles) -> Points:
    """Where angles lie on their circles: cosine and sine side by side, in one pass each way.

    >>> points(torch.tensor([0.0, torch.pi])).round(decimals=6).tolist()
    [[1.0, 0.0], [-1.0, -0.0]]
    """
    if theta.dtype in (torch.bfloat16, torch.float16):  # a whole turn is little in numbers of eight bits
        return points(theta.float()).to(theta.dtype)
    return _Points.apply(theta) if torch.is_grad_enabled() else _around(theta)


def tangent(points: Points, mean: Points) -> Angles:
    """The right side of (4): how far along its circle each point is pulled towards a mean.

    >>> tangent(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.3, 0.4]])).tolist()
    [0.4000000059604645]
    """
    if not torch.is_grad_enabled() and points.shape == mean.shape and cpu.fits(points, mean):
        return cpu.tangent(points, mean)
    return points[..., 0] * mean[..., 1] - points[..., 1] * mean[..., 0]


def turned(points: Points, by: Points) -> Points:
    """Points of the circle moved on by others: the product of complex numbers.

    >>> turned(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, 1.0]])).tolist()
    [[-1.0, 0.0]]
    """
    (a, b), (c, d) = points.unbind(-1), by.unbind(-1)
    return torch.stack([a * c - b * d, a * d + b * c], -1)


def powers(points: Points, count: int) -> list[Points]:
    """The first `count` harmonics  e^{i m \theta},  m = 1, 2, ...

    >>> [p.round(decimals=6).tolist() for p in powers(torch.tensor([[0.0, 1.0]]), 2)]
    [[[0.0, 1.0]], [[-1.0, 0.0]]]
    """
    made = [points]
    while len(made) < count:
        made.append(turned(made[-1], points))
    return made


def pull(theta: Angles, points: Points, mean: Points, along: Weights, across: Weights | None = None) -> Angles:
    r"""Equation (4) times a step, and with a lag \alpha besides:  along = \eta \cos \alpha,  across = \eta \sin \alpha.

        along (\cos \theta \, S - \sin \theta \, C) + across (\cos \theta \, C + \sin \theta \, S)

    `points` are those of `theta`, which is where the gradient goes: it is half as wide.

    >>> theta = torch.zeros(1, 1)
    >>> pull(theta, points(theta), torch.tensor([[[0.3, 0.4]]]), torch.tensor([[2.0]])).tolist()
    [[0.800000011920929]]
    """
    weighed = all(x is None or x.shape == points.shape[-3:-1] for x in (along, across))
    if weighed and points.shape == mean.shape and cpu.fits(points, theta, mean, along, across):
        if torch.is_grad_enabled():
            return _Pull.apply(theta, points, mean, along, across)
        return cpu.pull(points, mean, along, across)
    return _pulled(points, mean, along, across)


def delay(
    theta: Float[Tensor, "n t h j"],
    points: Float[Tensor, "n t h j 2"],
    by: Float[Tensor, "*n t h j 2"] | None,
    firsts: tuple[Float[Tensor, "n 1 h j 2"] | None, ...],
) -> tuple[Float[Tensor, "n t h j 2"], ...]:
    """Points one token late: turned, as keys, and as they are if there are two `firsts`, what stands before the first.

    `points` are those of `theta`, which is where the gradient goes.

    >>> theta = torch.tensor([0.0, torch.pi / 2, 1.0]).view(1, 3, 1, 1)
    >>> delay(theta, points(theta), None, (None,))[0].flatten(1).round(decimals=6).tolist()
    [[0.0, 0.0, 1.0, 0.0, -0.0, 1.0]]
    """
    one = (len(points), 1, *points.shape[2:])
    whole = (by is None or by.shape == points.shape[1:]) and all(x is None or x.shape == one for x in firsts)
    if whole and cpu.fits(points, theta, by, *firsts):  # by pointer, nothing is broadcast
        first_key, first_late = (*firsts, None)[:2]
        return _Delay.apply(theta, points, by, first_key, first_late, len(firsts) > 1)
    return _late(points, by, firsts)


class _Points(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, theta: Tensor) -> Tensor:
        made = _around(theta)
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tangent(ctx.saved_tensors[0], grads[0])


class _Pull(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, theta: Tensor, points: Tensor, mean: Tensor, along: Tensor, across: Tensor | None) -> Tensor:
        ctx.save_for_backward(theta, points, mean, along, across)
        return cpu.pull(points, mean, along, across)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        theta, points, mean, along, across = ctx.saved_tensors
        if not torch.is_grad_enabled():
            gtheta, *rest = cpu.pull_backward(grads[0], points, mean, along, across)
            return gtheta, None, *rest
        made = _pulled(_Points.apply(theta), mean, along, across)  # someone will differentiate once more
        needed = [needs and i != 1 for i, needs in enumerate(ctx.needs_input_grad)]  # the points have none of their own
        given = [x for x, needs in zip(ctx.saved_tensors, needed, strict=True) if needs]
        found = iter(torch.autograd.grad(made, given, grads[0], create_graph=True))
        return tuple(next(found) if needs else None for needs in needed)


class _Delay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        theta: Tensor,
        points: Tensor,
        by: Tensor | None,
        first_key: Tensor | None,
        first_late: Tensor | None,
        both: bool,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(theta, points, by)
        ctx.first = first_key is not None, first_late is not None
        key, late = cpu.delay(points, by, first_key, first_late, both)
        return (key,) if late is None else (key, late)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (theta, points, by), (gkey, *glate) = ctx.saved_tensors, grads
        late = glate[0] if glate else None
        if torch.is_grad_enabled():  # someone will differentiate once more
            gtheta = tangent(_Points.apply(theta), _early(gkey, late, by))
        else:
            gtheta = cpu.delay_backward(gkey, late, points, by)
        firsts = [g[:, :1] if was else None for g, was in zip(grads, ctx.first, strict=False)]
        return gtheta, None, None, *firsts, *[None] * (3 - len(firsts))


def _late(points: Tensor, by: Tensor | None, firsts: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """What the kernel does, in plain operations."""
    turned_points = points if by is None else turned(points, by.expand_as(points))
    made = (turned_points, points)[: len(firsts)]
    before = [torch.zeros_like(points[:, :1]) if first is None else first for first in firsts]
    return tuple(torch.cat([first, x[:, :-1]], 1) for first, x in zip(before, made, strict=True))


def _early(gkey: Tensor, glate: Tensor | None, by: Tensor | None) -> Tensor:
    """The way back."""
    g = gkey[:, 1:]
    if by is not None:
        g = turned(g, (by[..., :-1, :, :, :] * by.new_tensor([1.0, -1.0])).expand_as(g))
    g = g if glate is None else g + glate[:, 1:]
    return torch.cat([g, torch.zeros_like(gkey[:, :1])], 1)


def _pulled(points: Tensor, mean: Tensor, along: Tensor, across: Tensor | None) -> Tensor:
    y = along * (points[..., 0] * mean[..., 1] - points[..., 1] * mean[..., 0])
    return y if across is None else y + across * (points * mean).sum(-1)


def _around(theta: Tensor) -> Tensor:
    if cpu.fits(theta):
        made, finite = cpu.points(theta)
    else:
        made, finite = torch.stack([theta.cos(), theta.sin()], -1), True
        if theta.device.type == "cpu" and not torch.compiler.is_compiling():  # elsewhere it would wait for the device
            finite = bool(made.isfinite().all())
    if not finite:
        raise NotFiniteError("phases must be finite numbers, got some that are not")
    return made
