r"""The integrators of `qkflow.ops.symplectic.naive`, with a hand-written backward that runs the motion backwards.

Drifts and kicks undo themselves (q - c k, k - f(q)), so what came before follows from what came after: backward keeps
the final (q, k) alone, whatever the number of steps, and walks back. For one step whose drift the caller has folded
into a projection it keeps q alone.

    z = W_1 q + b_1,   k' = k + \delta (W_2 \phi(z) + b_2)                                          (kick)
    \bar z = \phi'(z) \odot \delta W_2^\top \bar k,   \bar q += W_1^\top \bar z,   \bar k stays
    \bar W_1 = \bar z^\top q,   \bar b_1 = \sum \bar z,   \bar W_2 = \delta \bar k^\top \phi(z)
    \bar b_2 = \delta \sum \bar k,   \bar \delta += \langle \bar k, W_2 \phi(z) + b_2 \rangle
    q' = q + c \delta k                                                                             (drift)
    \bar k += c \delta \bar q,   \bar \delta += c \langle \bar q, k \rangle
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from qkflow.errors import UsageError
from qkflow.ops import csrc
from qkflow.ops.symplectic.cpu import Activation, Perceptron, native_backward, native_forward


def alternate_fast(
    q: Float[Tensor, "... k"],
    k: Float[Tensor, "... k"],
    force: Perceptron,
    dt: Float[Tensor, ""],
    parts: Sequence[float],
    activation: Activation,
) -> tuple[Float[Tensor, "... k"], Float[Tensor, "... k"]]:
    """`alternate` of `qkflow.ops.symplectic.naive` for a force that is a perceptron.

    >>> import qkflow.ops.symplectic.naive as plain
    >>> q, k, w, b = torch.randn(5, 2), torch.randn(5, 2), torch.randn(2, 2), torch.zeros(2)
    >>> want = plain.leapfrog(q, k, lambda q: plain.mlp_force(q, w, b, w, b), 0.1, steps=3)
    >>> got = alternate_fast(q, k, (w, b, w, b), torch.tensor(0.1), plain.drifts("leapfrog", 3), "silu")
    >>> all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, want))
    True
    """
    if not torch.is_grad_enabled():
        return _forward(q, k, dt, force, tuple(parts), activation)
    rows = q.reshape(-1, q.shape[-1]), k.reshape(-1, k.shape[-1])
    after = _Alternate.apply(*rows, dt, *force, tuple(parts), activation)
    return after[0].view(q.shape), after[1].view(k.shape)


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
        after = _forward(q, k, dt, (w1, b1, w2, b2), parts, activation)
        ctx.parts, ctx.activation = parts, activation
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(dt, w1, b1, w2, b2, after[0], after[1] if any(parts) else None)
        return after

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dt, w1, b1, w2, b2, q, k = ctx.saved_tensors
        back = _backward
        if _native(q) and (torch.compiler.is_compiling() or not torch.is_grad_enabled()):  # C cannot be differentiated
            back = native_backward
        gq, gk = grads
        return *back(q, k, gq, gk, dt, (w1, b1, w2, b2), ctx.parts, ctx.activation), None, None


def _native(q: Tensor) -> bool:
    """Whether the kernel in C takes these rows."""
    if not torch.compiler.is_compiling():
        csrc.prepare()
    return q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64) and csrc.ready()


def _forward(
    q: Tensor, k: Tensor, dt: Tensor, force: Perceptron, parts: tuple[float, ...], activation: Activation
) -> tuple[Tensor, Tensor]:
    if _native(q):
        return native_forward(q, k, dt, force, parts, activation)
    w1, b1, w2, b2 = force
    *before, last = parts
    for part in before:
        if part:
            q = torch.addcmul(q, k, dt, value=part)
        z = F.linear(q, w1, b1)
        a = F.silu(z, inplace=True) if activation == "silu" else z.sigmoid_()
        k = torch.addcmul(k, F.linear(a, w2, b2), dt)
    return (torch.addcmul(q, k, dt, value=last) if last else q), k


def _backward(
    q: Tensor,
    k: Tensor | None,
    gq: Tensor | None,
    gk: Tensor | None,
    dt: Tensor,
    force: Perceptron,
    parts: tuple[float, ...],
    activation: Activation,
) -> tuple[Tensor, ...]:
    (w1, b1, w2, b2), before = force, parts[:-1]
    outer, shift = dt * w2, dt * b2
    gk = torch.zeros_like(q) if gk is None else gk
    gq = torch.zeros_like(q) if gq is None else gq
    gdt, weights = torch.zeros_like(dt), None
    for step in reversed(range(len(parts))):
        if step < len(before):
            z = F.linear(q, w1, b1)
            a, gz = _activate(z, gk @ outer, activation)
            if k is not None and any(before[: step + 1]):  # a drift came before, and will ask for the key it saw
                k = k - F.linear(a, outer, shift)
            now = (gz.mT @ q, gz.sum(0), gk.mT @ a, gk.sum(0))
            weights = now if weights is None else tuple(x + y for x, y in zip(weights, now, strict=True))
            gq = torch.addmm(gq, gz, w1)
        if (part := parts[step]) and k is not None:
            gdt = gdt + part * torch.dot(gq.flatten(), k.flatten())
            q, gk = torch.addcmul(q, k, dt, value=-part), torch.addcmul(gk, gq, dt, value=part)
    if weights is None:
        raise UsageError("a motion has at least one kick, got none")
    gw1, gb1, gouter, gshift = weights
    gdt = gdt + (gouter * w2).sum() + (gshift * b2).sum()
    return gq, gk, gdt, gw1, gb1, dt * gouter, dt * gshift


def _activate(z: Tensor, ga: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """The activation at z, and the gradient of z from that of the activation."""
    if activation == "silu":
        return F.silu(z), torch.ops.aten.silu_backward(ga, z)
    a = torch.sigmoid(z)
    return a, torch.ops.aten.sigmoid_backward(ga, a)
