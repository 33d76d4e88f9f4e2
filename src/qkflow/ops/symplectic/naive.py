r"""Coupled query-key dynamics: the query is a position, the key its momentum, and a force acts on the key.

    drift   q <- q + c \delta k                                                  (1)
    kick    k <- k + \delta f(q)                                                 (2)

| function           | one step of size \delta                  | order | keeps volume | symplectic if f = -\nabla V |
|--------------------|------------------------------------------|-------|--------------|-----------------------------|
| `euler`            | drift and kick, both from the old (q, k) | 1     | no           | no                          |
| `symplectic_euler` | drift (c = 1), kick                      | 1     | yes          | yes                         |
| `leapfrog`         | drift (c = 1/2), kick, drift (c = 1/2)   | 2     | yes          | yes, and time-reversible    |

The force is any function of q. Two are defined here: `mlp_force`, a two-layer perceptron, and `potential_force`, the
negative gradient of a confining potential. An affine coupling moves the pair by maps with a known inverse instead:

    q' = q \odot e^{s_1(k)} + m_1(k)        k' = k \odot e^{s_2(q')} + m_2(q')    (3)

These functions are the definition: differentiable any number of times, but slow. `reversible.py` and the C kernel
compute the same motion and are tested against them.

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
"""Maps one of the pair to the log-scale and the shift of the other."""


def euler(q: Point, k: Point, force: Force, dt: Step, steps: int = 1) -> tuple[Point, Point]:
    """Explicit Euler: (1) and (2) from the same (q, k).

    >>> q, k = euler(torch.ones(1), torch.zeros(1), force=lambda q: -q, dt=0.5, steps=2)
    >>> q.item(), k.item()
    (0.75, -1.0)
    """
    _check(q, k, steps)
    for _ in range(steps):
        q, k = q + dt * k, k + dt * force(q)
    return q, k


def symplectic_euler(q: Point, k: Point, force: Force, dt: Step, steps: int = 1) -> tuple[Point, Point]:
    """A drift, then a kick at the new query.

    >>> q, k = symplectic_euler(torch.ones(1), torch.zeros(1), force=lambda q: -q, dt=0.5, steps=2)
    >>> q.item(), k.item()
    (0.75, -0.875)
    """
    _check(q, k, steps)
    return drift_kick(q, k, force, dt, drift_coefficients("symplectic-euler", steps))


def leapfrog(q: Point, k: Point, force: Force, dt: Step, steps: int = 1) -> tuple[Point, Point]:
    """Half a drift, a kick, half a drift; adjacent half drifts are merged.

    >>> q, k = leapfrog(torch.ones(1), torch.zeros(1), force=lambda q: -q, dt=0.5, steps=2)
    >>> q.item(), k.item()
    (0.53125, -0.875)
    """
    _check(q, k, steps)
    return drift_kick(q, k, force, dt, drift_coefficients("leapfrog", steps))


def drift_kick(q: Point, k: Point, force: Force, dt: Step, coefficients: Sequence[float]) -> tuple[Point, Point]:
    """A drift for each coefficient c, and a kick after each drift but the last."""
    *before_kick, last = coefficients
    for c in before_kick:
        if c:
            q = q + c * dt * k  # (1)
        k = k + dt * force(q)  # (2)
    return (q + last * dt * k if last else q), k


def drift_coefficients(integrator: Integrator, steps: int) -> tuple[float, ...]:
    """The coefficients c of an integrator's drifts, including the one after the last kick.

    >>> drift_coefficients("symplectic-euler", 2), drift_coefficients("leapfrog", 2)
    ((1.0, 1.0, 0.0), (0.5, 1.0, 0.5))
    """
    return (*(1.0,) * steps, 0.0) if integrator == "symplectic-euler" else (0.5, *(1.0,) * (steps - 1), 0.5)


def mlp_force(
    q: Point, inner: Matrix, inner_bias: Bias, outer: Float[Tensor, "*g n m"], outer_bias: Float[Tensor, "*g n"]
) -> Point:
    r"""f(q) = W_2 silu(W_1 q + b_1) + b_2. Volume-preserving, but in general not the gradient of a potential."""
    return linear(F.silu(linear(q, inner, inner_bias)), outer, outer_bias)


def potential(q: Point, w: Matrix, b: Bias, a: Bias) -> Float[Tensor, "..."]:
    r"""V(q) = \sum_j a_j (softplus(w_j \cdot q + b_j) + softplus(-w_j \cdot q + b_j)).

    With a_j > 0 it increases in both directions along every w_j, so it confines the query.
    """
    z = linear(q, w)
    threshold = 50.0  # softplus(z) becomes z above it; the default of 20 is too low for float64
    return (a * (F.softplus(z + b, threshold=threshold) + F.softplus(b - z, threshold=threshold))).sum(-1)


def potential_force(q: Point, w: Matrix, b: Bias, a: Bias) -> Point:
    r"""f(q) = -\nabla V(q) = -W^\top (a \odot (\sigma(W q + b) - \sigma(b - W q))), in closed form."""
    z = linear(q, w)
    return -linear(a * (torch.sigmoid(z + b) - torch.sigmoid(b - z)), w.mT)


def energy(q: Point, k: Point, w: Matrix, b: Bias, a: Bias) -> Float[Tensor, "..."]:
    r"""H(q, k) = |k|^2 / 2 + V(q), which the continuous motion under the potential conserves."""
    return k.square().sum(-1) / 2 + potential(q, w, b, a)


def linear(x: Point, weight: Matrix, bias: Bias | None = None) -> Point:
    """A linear layer with one matrix for all heads (`x` is `[... k]`) or one per head (`x` is `[... g k]`)."""
    if weight.ndim == 2:
        return F.linear(x, weight, bias)
    y = einsum(x, weight, "... g k, g m k -> ... g m")
    return y if bias is None else y + bias


def affine_coupling(q: Point, k: Point, layers: Sequence[tuple[Shift, Shift]]) -> tuple[Point, Point]:
    """Equation (3), once per layer."""
    _check(q, k)
    for of_query, of_key in layers:
        scale, shift = of_query(k)
        q = torch.addcmul(shift, q, scale.exp())
        scale, shift = of_key(q)
        k = torch.addcmul(shift, k, scale.exp())
    return q, k


def affine_coupling_inverse(q: Point, k: Point, layers: Sequence[tuple[Shift, Shift]]) -> tuple[Point, Point]:
    """The inverse of `affine_coupling`."""
    _check(q, k)
    for of_query, of_key in reversed(layers):
        scale, shift = of_key(q)
        k = (k - shift) * (-scale).exp()
        scale, shift = of_query(k)
        q = (q - shift) * (-scale).exp()
    return q, k


def _check(q: Tensor, k: Tensor, steps: int = 1) -> None:
    if q.shape != k.shape:
        raise UsageError(f"queries and keys must have the same shape, got {list(q.shape)} and {list(k.shape)}")
    if steps < 1:
        raise UsageError(f"steps must be at least 1, got {steps}")
