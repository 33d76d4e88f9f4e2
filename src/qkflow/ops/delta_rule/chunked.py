r"""The delta rule chunk by chunk, in plain torch for any device: products of matrices and a triangular solve.

Inside a chunk of C tokens with memory H = S^\top before it, G the sum of the log decays up to and with each token,
D_{ij} = e^{G_i - G_j}, and n_i the error that token i corrects (u_i = \beta_i n_i is what it writes):

    M = tril(X K^\top \odot D, -1),   P = \sigma tril(Q K^\top \odot D),   \tilde K = diag(e^{G_C - G}) K
    (I + M diag(\beta)) N = V - diag(e^G) X H,   U = diag(\beta) N
    O = \sigma diag(e^G) Q H + P U,   H' = e^{G_C} H + \tilde K^\top U

The solve runs ahead for all chunks at once, on V and on X, so that the loop over chunks is two products. Backward, with
bars for gradients, is the same kind of loop the other way round:

    (I + M^\top diag(\beta)) \hat U = P^\top \bar O + \tilde K \bar H',   \bar N = \bar V = diag(\beta) \hat U
    \bar M = -\bar N U^\top,   \bar P = \bar O U^\top,   \bar\beta_i = \hat u_i \cdot n_i
    \bar H = e^{G_C} \bar H' + \sigma Q^\top diag(e^G) \bar O - X^\top diag(e^G) \bar N
    \bar G_i = \bar o_i \cdot o_i - \bar v_i \cdot v_i,   and \langle H', \bar H' \rangle more at the chunk's end

The last line is a symmetry: a decay before token i rescales all that later tokens find, but not what they write.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from qkflow.ops.delta_rule.inputs import Inputs

CHUNK = 64
"""Tokens of a chunk unless told otherwise."""
NOTHING = -1000.0
"""A log decay of which nothing is left in any precision."""


class Forward(NamedTuple):
    """What a forward pass gives; the last two are empty unless they were to be kept for its backward pass."""

    o: Tensor
    """[n t h v]"""
    final: Tensor
    """[n h v k]"""
    errors: Tensor
    """N, what each token found wrong before it wrote, as the same form's backward pass wants it."""
    marks: Tensor
    """Memories on the way, likewise."""


class Kept(NamedTuple):
    """What a backward pass needs of its forward pass."""

    o: Tensor
    errors: Tensor
    marks: Tensor


class _Chunks(NamedTuple):
    """All chunks of all rows and heads, [c m C ...] with m for rows and heads, and what is inside them."""

    q: Tensor
    k: Tensor
    x: Tensor
    beta: Tensor
    """[c m C 1]"""
    decay: Tensor
    """e^G, [c m C 1]"""
    rest: Tensor
    """e^{G_C - G}, [c m C 1]"""
    D: Tensor | None
    """Zero above the diagonal; None where nothing decays."""
    M: Tensor
    """Right below the diagonal alone, which is all that a solve with ones on it reads."""
    P: Tensor
    """Without the scale."""


def forward(given: Inputs, state: Tensor | None, scale: float, chunk: int, keep: bool) -> Forward:
    """Outputs and the memory after the last token; `chunk` 0 leaves it to us."""
    q, v, chunk = given.q, given.v, chunk or CHUNK
    (n, t, h, width), deep = q.shape, v.shape[3]
    part = _inside(given, chunk)
    right = torch.cat([_split(v, chunk), part.x * part.decay], -1)
    ahead, by = _solved(part.M * part.beta.mT, right, upper=False).split([deep, width], -1)
    written = (part.k * (part.beta * part.rest)).mT  # times N it is what a chunk adds to H
    N, H = torch.empty_like(right[..., :deep]), q.new_empty(len(right) + 1, n * h, width, deep)
    H[0] = 0 if state is None else state.flatten(0, 1).mT
    for c in range(len(right)):
        torch.baddbmm(ahead[c], by[c], H[c], alpha=-1, out=N[c])
        torch.baddbmm(H[c] * part.decay[c, :, -1:], written[c], N[c], out=H[c + 1])
    o = _summed(part.P, N * (scale * part.beta), part.q * (scale * part.decay), H[:-1])
    final = H[-1].mT.contiguous().view(n, h, deep, width)
    return Forward(_joined(o, n, h, t), final, *((N, H) if keep else (q.new_empty(0), q.new_empty(0))))


def backward(
    go: Tensor | None, gfinal: Tensor | None, given: Inputs, kept: Kept, scale: float, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the inputs, and of the memory before the first token."""
    q, v, lam, chunk = given.q, given.v, given.lam, chunk or CHUNK
    (n, t, h, width), deep = q.shape, v.shape[3]
    part, N, H = _inside(given, chunk), kept.errors, kept.marks
    go = torch.zeros_like(v) if go is None else go
    gO, U = scale * _split(go, chunk), part.beta * N
    right = torch.cat([part.P.mT @ gO, part.k * part.rest], -1)
    ahead, by = _solved((part.beta * part.M).mT, right, upper=True).split([deep, width], -1)
    read, corrected = gO * part.decay, (part.x * (part.beta * part.decay)).mT
    wanted, hat, gH = part.q.mT @ read, torch.empty_like(N), torch.empty_like(H)
    gH[-1] = 0 if gfinal is None else gfinal.flatten(0, 1).mT
    for c in reversed(range(len(N))):
        torch.baddbmm(ahead[c], by[c], gH[c + 1], out=hat[c])
        torch.baddbmm(wanted[c], corrected[c], hat[c], alpha=-1, out=gH[c])
        gH[c].addcmul_(gH[c + 1], part.decay[c, :, -1:])
    gV = part.beta * hat
    gA, gB = (gV @ U.mT).neg_().tril_(-1), (gO @ U.mT).tril_()
    if part.D is not None:
        gA, gB = gA.mul_(part.D), gB.mul_(part.D)
    gX = _summed(gA, part.k, gV * -part.decay, H[:-1].mT)
    gQ = _summed(gB, part.k, read, H[:-1].mT)
    gK = _summed(gA.mT, part.x, gB.mT, part.q).add_((U * part.rest) @ gH[1:].mT).add_(gX)
    gv, glam, gG = _joined(gV, n, h, t), q.new_empty(0), q.new_empty(0)
    if lam is not None:
        glam = _joined((gX * part.q).sum(-1), n, h, t)
        gQ.addcmul_(_split(lam, chunk).unsqueeze(-1), gX)
    if given.log_alpha is not None:
        each = _split((go * kept.o).sum(-1) - (gv * v).sum(-1), chunk)
        each[..., -1] += (H[1:] * gH[1:]).sum((-1, -2))
        gG = _joined(each.flip(-1).cumsum(-1).flip(-1), n, h, t)
    gbeta = _joined((hat * N).sum(-1), n, h, t)
    gstate = gH[0].mT.contiguous().view(n, h, deep, width)
    return _joined(gQ, n, h, t), _joined(gK, n, h, t), gv, gbeta, gG, glam, gstate


def _inside(given: Inputs, chunk: int) -> _Chunks:
    log_alpha = given.log_alpha
    q, k, b = _split(given.q, chunk), _split(given.k, chunk), _split(given.beta, chunk).unsqueeze(-1)
    x = k if given.lam is None else torch.addcmul(k, _split(given.lam, chunk).unsqueeze(-1), q)
    M, P = x @ k.mT, q @ k.mT
    if log_alpha is None:
        one = torch.ones_like(b)
        return _Chunks(q, k, x, b, one, one, None, M, P.tril_())
    wide = log_alpha.float() if log_alpha.device.type == "mps" else log_alpha.double()  # which has no float64
    # differences of float32 sums would lose their digits, and so would those of sums with all too large numbers
    G = _split(wide.clamp(min=NOTHING), chunk).cumsum(-1)
    D = _exp((G.unsqueeze(-1) - G.unsqueeze(-2)).to(q.dtype, copy=True).clamp_(max=0)).tril_()
    decay, rest = (_exp(y.to(q.dtype, copy=True)).unsqueeze(-1) for y in (G, G[..., -1:] - G))
    return _Chunks(q, k, x, b, decay, rest, D, M.mul_(D), P.mul_(D))


def _exp(x: Tensor) -> Tensor:
    """e^x in the place of x, and zero where products with it would be too small for processors to be fast with them."""
    least = 0.7 * math.log(torch.finfo(x.dtype).tiny)
    return torch.threshold_(x, least, -math.inf).exp_()


def _solved(L: Tensor, right: Tensor, *, upper: bool) -> Tensor:
    """Transposed, since solvers want columns one behind the other: as it stands it would be copied there and back."""
    return torch.linalg.solve_triangular(L.mT, right.mT, upper=not upper, left=False, unitriangular=True).mT


def _summed(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """A b + c d, chunk by chunk."""
    first = (a @ b).flatten(0, 1)
    return torch.baddbmm(first, c.flatten(0, 1), d.flatten(0, 1), out=first).unflatten(0, a.shape[:2])


def _split(x: Tensor, chunk: int) -> Tensor:
    """Chunks of whole length, perhaps `x` itself; what is added behind the end has beta = 0, and changes nothing."""
    short = -x.shape[1] % chunk
    if short:
        x = torch.cat([x, x.new_zeros(x.shape[0], short, *x.shape[2:])], 1)
    return rearrange(x, "n (c i) h ... -> c (n h) i ...", i=chunk).contiguous()


def _joined(x: Tensor, n: int, h: int, t: int) -> Tensor:
    return rearrange(x, "c (n h) i ... -> n (c i) h ...", n=n, h=h)[:, :t].contiguous()
