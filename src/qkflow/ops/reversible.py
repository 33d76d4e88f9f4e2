r"""The alternating schemes of `qkflow.ops.coupled`, fast: a backward written by hand that runs the motion backwards.

Drifts and kicks undo themselves (q - c k, k - f(q)), so what came before follows from what came after: backward keeps
the final (q, k) alone, whatever the number of steps, and walks back. For one step whose drift the caller has folded
into a projection it keeps q alone. With the kick already scaled by the step,

    z = W_1 q + b_1,   k' = k + W_2 \phi(z) + b_2                                                   (kick)
    \bar z = \phi'(z) \odot W_2^\top \bar k,   \bar q += W_1^\top \bar z,   \bar k stays
    \bar W_2 = \bar k^\top \phi(z),  \bar b_2 = \sum \bar k,  \bar W_1 = \bar z^\top q,  \bar b_1 = \sum \bar z
    q' = q + c \delta k                                                                             (drift)
    \bar k += c \delta \bar q,   \bar \delta += c \langle \bar q, k \rangle
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

Rows = Float[Tensor, "n k"]
Activation = Literal["silu", "sigmoid"]
Perceptron = tuple[Tensor, Tensor, Tensor, Tensor]
"""W_1, b_1, W_2 and b_2 of a kick."""


class _Alternate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        dt: Tensor,
        w1: Tensor,
        b1: Tensor,
        w2: Tensor,
        b2: Tensor,
        parts: tuple[float, ...],
        activation: Activation,
    ) -> tuple[Tensor, Tensor]:
        end = _forward(q, k, dt, (w1, b1, w2, b2), parts, activation)
        ctx.parts, ctx.activation = parts, activation
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(dt, w1, b1, w2, b2, end[0], end[1] if any(parts) else None)
        return end

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dt, w1, b1, w2, b2, q, k = ctx.saved_tensors
        (gq, gk), (*parts, after) = grads, ctx.parts
        gk = torch.zeros_like(q) if gk is None else gk
        weights: tuple[Tensor, ...] | None = None
        gdt = torch.zeros_like(dt)
        if any(ctx.parts) and gq is None:
            gq = torch.zeros_like(q)
        if after:
            gdt = gdt + after * _dot(gq, k)
            q, gk = _add(q, k, dt, -after), _add(gk, gq, dt, after)
        for step in reversed(range(len(parts))):
            z = torch.addmm(b1, q, w1.mT)
            a, gz = _activate(z, gk @ w2, ctx.activation)
            if any(parts[: step + 1]):
                k = _kick(k, -a, w2, -b2)
            now = (gz.mT @ q, gz.sum(0), gk.mT @ a, gk.sum(0))
            weights = now if weights is None else tuple(x + y for x, y in zip(weights, now, strict=True))
            gq = gz @ w1 if gq is None else torch.addmm(gq, gz, w1)
            if part := parts[step]:
                gdt = gdt + part * _dot(gq, k)
                q, gk = _add(q, k, dt, -part), _add(gk, gq, dt, part)
        assert weights is not None
        return gq, gk, gdt, *weights, None, None


def alternate_fast(
    q: Rows,
    k: Rows,
    dt: Float[Tensor, ""],
    kick: Perceptron,
    parts: Sequence[float],
    activation: Activation,
) -> tuple[Rows, Rows]:
    r"""`alternate` of `qkflow.ops.coupled` for a perceptron `kick`, whose outer layer is times `dt` already.

    >>> import qkflow.ops.coupled as plain
    >>> q, k, w, b = torch.randn(5, 2), torch.randn(5, 2), torch.randn(2, 2), torch.zeros(2)
    >>> dt, force = torch.tensor(0.1), lambda q: plain.mlp_force(q, w, b, w, b)
    >>> want = plain.leapfrog(q, k, force, 0.1, steps=3)
    >>> got = alternate_fast(q, k, dt, (w, b, 0.1 * w, 0.1 * b), plain.drifts("leapfrog", 3), "silu")
    >>> all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, want))
    True
    """
    if not torch.is_grad_enabled():
        return _forward(q, k, dt, kick, tuple(parts), activation)
    return _Alternate.apply(q, k, dt, *kick, tuple(parts), activation)


def _forward(
    q: Tensor, k: Tensor, dt: Tensor, kick: Perceptron, parts: tuple[float, ...], activation: Activation
) -> tuple[Tensor, Tensor]:
    w1, b1, w2, b2 = kick
    *before, after = parts
    for part in before:
        if part:
            q = _add(q, k, dt, part)
        z = torch.addmm(b1, q, w1.mT)
        k = _kick(k, F.silu(z, inplace=True) if activation == "silu" else z.sigmoid_(), w2, b2)
    return (_add(q, k, dt, after) if after else q), k


def _kick(k: Tensor, a: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return torch.addmm(k, a, w2.mT) + b2


def _add(x: Tensor, y: Tensor, dt: Tensor, part: float) -> Tensor:
    return torch.addcmul(x, y, dt, value=part)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return torch.dot(x.flatten(), y.flatten())


def _activate(z: Tensor, ga: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """The activation at z, and the gradient of z from that of the activation."""
    if activation == "silu":
        return F.silu(z), torch.ops.aten.silu_backward(ga, z)
    a = torch.sigmoid(z)
    return a, torch.ops.aten.sigmoid_backward(ga, a)
