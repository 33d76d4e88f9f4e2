r"""The fast form of `drift_kick` (`naive.py`), with a backward pass that reverses the motion.

Drifts and kicks are invertible (q - c \delta k, k - \delta f(q)), so the backward pass saves only the final (q, k),
whatever the number of steps, and recomputes the states before it. If the motion has no drift, it saves only q.

    kick    z = W_1 q + b_1,   k' = k + \delta (W_2 \phi(z) + b_2)                                                (1)
            \bar z = \phi'(z) \odot \delta W_2^\top \bar k,   \bar q += W_1^\top \bar z                           (2)
            \bar W_1 = \bar z^\top q,   \bar b_1 = \sum \bar z,   \bar W_2 = \delta \bar k^\top \phi(z)            (3)
            \bar b_2 = \delta \sum \bar k,   \bar \delta += \langle \bar k, W_2 \phi(z) + b_2 \rangle              (4)
    drift   q' = q + c \delta k                                                                                 (5)
            \bar k += c \delta \bar q,   \bar \delta += c \langle \bar q, k \rangle                               (6)

On CPUs a C kernel does the same (`cpu.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from qkflow.ops.csrc import build
from qkflow.ops.csrc.eager import is_transformed
from qkflow.ops.symplectic import cpu
from qkflow.ops.symplectic.cpu import Activation, MLPWeights

__all__ = ["Activation", "MLPWeights", "drift_kick_reversible"]


def drift_kick_reversible(
    q: Float[Tensor, "... k"],
    k: Float[Tensor, "... k"],
    force: MLPWeights,
    dt: Float[Tensor, ""],
    coefficients: Sequence[float],
    activation: Activation,
) -> tuple[Float[Tensor, "... k"], Float[Tensor, "... k"]]:
    """`drift_kick` for the force W_2 phi(W_1 q + b_1) + b_2.

    >>> from qkflow.ops.symplectic import naive
    >>> q, k, w, b = torch.randn(5, 2), torch.randn(5, 2), torch.randn(2, 2), torch.zeros(2)
    >>> expected = naive.leapfrog(q, k, lambda q: naive.mlp_force(q, w, b, w, b), 0.1, steps=3)
    >>> coefficients = naive.drift_coefficients("leapfrog", 3)
    >>> actual = drift_kick_reversible(q, k, (w, b, w, b), torch.tensor(0.1), coefficients, "silu")
    >>> all(torch.allclose(a, b, atol=1e-6) for a, b in zip(actual, expected))
    True
    """
    cpu.check_shapes(q, k, dt, force, coefficients)
    if not torch.compiler.is_compiling() and is_transformed():
        return _torch_forward(q, k, dt, force, coefficients, activation)
    if not torch.is_grad_enabled():
        return _forward(q, k, dt, force, tuple(coefficients), activation)
    rows = q.reshape(-1, q.shape[-1]), k.reshape(-1, k.shape[-1])
    q_out, k_out = _DriftKick.apply(*rows, dt, *force, tuple(coefficients), activation)
    return q_out.view(q.shape), k_out.view(k.shape)


class _DriftKick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        q, k, dt, w1, b1, w2, b2, coefficients, activation = args
        q_out, k_out = _forward(q, k, dt, (w1, b1, w2, b2), coefficients, activation)
        ctx.coefficients, ctx.activation = coefficients, activation
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(dt, w1, b1, w2, b2, q_out, k_out if any(coefficients) else None)
        return q_out, k_out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dt, w1, b1, w2, b2, q, k = ctx.saved_tensors
        use_kernel = build.supports(q) and (torch.compiler.is_compiling() or not torch.is_grad_enabled())
        backward = cpu.backward if use_kernel else _backward  # the latter is differentiable
        gq, gk = grads
        return *backward(q, k, gq, gk, dt, (w1, b1, w2, b2), ctx.coefficients, ctx.activation), None, None


def _forward(
    q: Tensor, k: Tensor, dt: Tensor, force: MLPWeights, coefficients: tuple[float, ...], activation: Activation
) -> tuple[Tensor, Tensor]:
    if build.supports(q):
        return cpu.forward(q, k, dt, force, coefficients, activation)
    return _torch_forward(q, k, dt, force, coefficients, activation)


def _torch_forward(
    q: Tensor, k: Tensor, dt: Tensor, force: MLPWeights, coefficients: Sequence[float], activation: Activation
) -> tuple[Tensor, Tensor]:
    w1, b1, w2, b2 = force
    *before_kick, last = coefficients
    for c in before_kick:
        if c:
            q = torch.addcmul(q, k, dt, value=c)  # (5)
        z = F.linear(q, w1, b1)
        a = F.silu(z, inplace=True) if activation == "silu" else z.sigmoid_()
        k = torch.addcmul(k, F.linear(a, w2, b2), dt)  # (1)
    return (torch.addcmul(q, k, dt, value=last) if last else q), k


def _backward(
    q: Tensor,
    k: Tensor | None,
    gq: Tensor | None,
    gk: Tensor | None,
    dt: Tensor,
    force: MLPWeights,
    coefficients: tuple[float, ...],
    activation: Activation,
) -> tuple[Tensor, ...]:
    (w1, b1, w2, b2), n_kicks = force, len(coefficients) - 1
    w2_dt, b2_dt = dt * w2, dt * b2
    gk = torch.zeros_like(q) if gk is None else gk
    gq = torch.zeros_like(q) if gq is None else gq
    gdt, gforce = torch.zeros_like(dt), None
    for step in reversed(range(len(coefficients))):
        if step < n_kicks:
            z = F.linear(q, w1, b1)
            a, gz = _activation_backward(z, gk @ w2_dt, activation)  # (2)
            if k is not None and any(coefficients[: step + 1]):  # a drift precedes: it needs the key before this kick
                k = k - F.linear(a, w2_dt, b2_dt)
            gforce_step = (gz.mT @ q, gz.sum(0), gk.mT @ a, gk.sum(0))  # (3), (4)
            gforce = gforce_step if gforce is None else tuple(x + y for x, y in zip(gforce, gforce_step, strict=True))
            gq = torch.addmm(gq, gz, w1)
        if (c := coefficients[step]) and k is not None:
            gdt = gdt + c * torch.dot(gq.flatten(), k.flatten())  # (6)
            q, gk = torch.addcmul(q, k, dt, value=-c), torch.addcmul(gk, gq, dt, value=c)
    gw1, gb1, gw2_dt, gb2_dt = cast(tuple[Tensor, ...], gforce)  # there is at least one kick
    gdt = gdt + (gw2_dt * w2).sum() + (gb2_dt * b2).sum()  # (4)
    return gq, gk, gdt, gw1, gb1, dt * gw2_dt, dt * gb2_dt


def _activation_backward(z: Tensor, ga: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """The activation of z, and the gradient of z given that of the activation."""
    if activation == "silu":
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # for a second derivative
            s = z.sigmoid()
            return z * s, ga * s * (1 + z * (1 - s))
        return F.silu(z), torch.ops.aten.silu_backward(ga, z)
    a = torch.sigmoid(z)
    return a, torch.ops.aten.sigmoid_backward(ga, a)
