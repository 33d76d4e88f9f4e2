r"""Coupled dynamics of a query and a key: the query is a position, the key its momentum, and a force acts between them.

    drift   q <- q + c k            kick   k <- k + c f(q)

| function           | a step of size \delta                            | order | volume | symplectic if f = -\nabla V |
|--------------------|--------------------------------------------------|-------|--------|-----------------------------|
| `euler`            | drift and kick at once, both from the old (q, k) | 1     | no     | no                          |
| `symplectic_euler` | drift(\delta), kick(\delta)                      | 1     | kept   | yes                         |
| `leapfrog`         | drift(\delta/2), kick(\delta), drift(\delta/2)   | 2     | kept   | yes, and reversible         |

A force is any function of q alone. Two are given: `mlp_force`, a perceptron, and `potential_force`, the downhill slope
of a potential that holds the query in. An affine coupling moves the same pair by maps with a known inverse instead:

    q' = q \odot e^{s_1(k)} + m_1(k)        k' = k \odot e^{s_2(q')} + m_2(q')

Written for reading, and differentiable any number of times; `qkflow.ops.symplectic.reversible` is the fast form.

https://arxiv.org/abs/2604.01683
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from qkflow.errors import UsageError

Point = Float[Tensor, "..."]
Matrix = Float[Tensor, "*g m k"]
Bias = Float[Tensor, "*g m"]
Step = float | Float[Tensor, ""]
Integrator = Literal["symplectic-euler", "leapfrog"]
Force = Callable[[Tensor], Tensor]
Shift = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From one of the pair, the log-scale and the shift of the other."""


def euler(q: Point, k: Point, force: Force, dt: Step, steps: int = 1) -> tuple[Point, Point]:
    """Both move by what they were before the step.

    >>> q, k = euler(torch.ones(1), torch.zeros(1), force=lambda q: -q, dt=0.5, steps=2)
    >>> q.item(), k.item()
    (0.75, -1.0)
    """
    _check(q, k, steps)
    for _ in range(steps):
        q, k = q + dt * k, k + dt * force(q)
    return q, k


def symplectic_euler(q: Point, k: Point, force: Force, dt: Step, steps: int = 1) -> tuple[Point, Point]:
    """The query drifts first, and kicks the key from where it has come to.

    >>> q, k = symplectic_euler(torch.ones(1), torch.zeros(1), force=lambda q: -q, dt=0.5, steps=2)
    >>> q.item(), k.item()
    (0.75, -0.875)
    """
    _check(q, k, steps)
    return alternate(q, k, force, dt, drifts("symplectic-euler", steps))


def leapfrog(q: Point, k: Point, force: Force, dt: Step, steps: int = 1) -> tuple[Point, Point]:
    """Half a drift, a kick, half a drift; between two steps the halves are one.

    >>> q, k = leapfrog(torch.ones(1), torch.zeros(1), force=lambda q: -q, dt=0.5, steps=2)
    >>> q.item(), k.item()
    (0.53125, -0.875)
    """
    _check(q, k, steps)
    return alternate(q, k, force, dt, drifts("leapfrog", steps))


def alternate(q: Point, k: Point, force: Force, dt: Step, parts: Sequence[float]) -> tuple[Point, Point]:
    """Drifts by those parts of `dt`, and a kick of a whole `dt` after each but the last: either scheme from above."""
    *before, after = parts
    for part in before:
        if part:
            q = q + part * dt * k
        k = k + dt * force(q)
    return (q + after * dt * k if after else q), k


def drifts(integrator: Integrator, steps: int) -> tuple[float, ...]:
    """The drifts of a scheme, in parts of a step.

    >>> drifts("symplectic-euler", 2), drifts("leapfrog", 2)
    ((1.0, 1.0, 0.0), (0.5, 1.0, 0.5))
    """
    return (*(1.0,) * steps, 0.0) if integrator == "symplectic-euler" else (0.5, *(1.0,) * (steps - 1), 0.5)


def mlp_force(
    q: Point, inner: Matrix, inner_bias: Bias, outer: Float[Tensor, "*g n m"], outer_bias: Float[Tensor, "*g n"]
) -> Point:
    r"""f(q) = W_2 silu(W_1 q + b_1) + b_2: keeps volume, and is no slope of anything unless it happens to be."""
    return linear(F.silu(linear(q, inner, inner_bias)), outer, outer_bias)


def potential(q: Point, w: Matrix, b: Bias, a: Bias) -> Float[Tensor, "..."]:
    r"""V(q) = \sum_j a_j (softplus(w_j \cdot q + b_j) + softplus(-w_j \cdot q + b_j)).

    With every a_j > 0 it rises in each direction that some w_j sees, so it holds the query in.
    """
    z = linear(q, w)
    far = 50.0  # where torch takes softplus(z) for z: at its own 20, double precision would notice
    return (a * (F.softplus(z + b, threshold=far) + F.softplus(b - z, threshold=far))).sum(-1)


def potential_force(q: Point, w: Matrix, b: Bias, a: Bias) -> Point:
    r"""f(q) = -\nabla V(q) = -W^\top (a \odot (\sigma(W q + b) - \sigma(b - W q))), in closed form."""
    z = linear(q, w)
    return -linear(a * (torch.sigmoid(z + b) - torch.sigmoid(b - z)), w.mT)


def energy(q: Point, k: Point, w: Matrix, b: Bias, a: Bias) -> Float[Tensor, "..."]:
    r"""H(q, k) = |k|^2 / 2 + V(q): what the motion under the potential keeps where time is continuous."""
    return k.square().sum(-1) / 2 + potential(q, w, b, a)


def linear(x: Point, weight: Matrix, bias: Bias | None = None) -> Point:
    """A matrix for all heads, or one for each of them: `x` is `[... k]`, or `[... g k]` for g matrices."""
    if weight.ndim == 2:
        return F.linear(x, weight, bias)
    y = einsum(x, weight, "... g k, g m k -> ... g m")
    return y if bias is None else y + bias


def affine_coupling(q: Point, k: Point, layers: Sequence[tuple[Shift, Shift]]) -> tuple[Point, Point]:
    """Each layer moves the query by what the key says, then the key by what the moved query says."""
    _check(q, k)
    for of_query, of_key in layers:
        scale, shift = of_query(k)
        q = torch.addcmul(shift, q, scale.exp())
        scale, shift = of_key(q)
        k = torch.addcmul(shift, k, scale.exp())
    return q, k


def affine_coupling_inverse(q: Point, k: Point, layers: Sequence[tuple[Shift, Shift]]) -> tuple[Point, Point]:
    """The pair that `affine_coupling` takes to (q, k)."""
    _check(q, k)
    for of_query, of_key in reversed(layers):
        scale, shift = of_key(q)
        k = (k - shift) * (-scale).exp()
        scale, shift = of_query(k)
        q = (q - shift) * (-scale).exp()
    return q, k


def _check(q: Tensor, k: Tensor, steps: int = 1) -> None:
    if q.shape != k.shape:
        raise UsageError(f"queries and keys move in pairs: got {list(q.shape)} queries and {list(k.shape)} keys")
    if steps < 1:
        raise UsageError(f"steps must be at least 1, got {steps}")
