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

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

CHUNK = 64
"""Tokens of a chunk unless told otherwise."""


class Forward(NamedTuple):
    """What a forward pass gives, and what its backward pass needs of it."""

    o: Tensor
    """[n t h v]"""
    final: Tensor
    """[n h v k]"""
    errors: Tensor
    """[n t h v]: N, what each token found wrong before it wrote; empty unless it was to be kept."""
    marks: Tensor
    """Memories on the way, as the backward pass of the same form wants them; empty unless they were to be kept."""


class _Chunks(NamedTuple):
    """All chunks of all rows and heads, [n h c C ...], and what is inside them."""

    q: Tensor
    k: Tensor
    x: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor | None
    """e^G, [n h c C 1]"""
    rest: Tensor | None
    """e^{G_C - G}, [n h c C 1]"""
    D: Tensor | None
    M: Tensor
    P: Tensor


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_alpha: Tensor | None,
    lam: Tensor | None,
    state: Tensor | None,
    scale: float,
    chunk: int,
    keep: bool,
) -> Forward:
    """Outputs and the memory after the last token; `chunk` 0 leaves it to us."""
    t, width, chunk = q.shape[1], q.shape[3], chunk or CHUNK
    part = _inside(q, k, v, beta, log_alpha, lam, scale, chunk)
    right = torch.cat([part.v, _times(part.x, part.decay)], -1)
    ahead, by = torch.linalg.solve_triangular(part.M * part.beta.mT, right, upper=False, unitriangular=True).split(
        [v.shape[3], width], -1
    )
    written = _times(part.k, part.rest) * part.beta  # times N it is what a chunk adds to H
    last = None if part.decay is None else part.decay[..., -1:, :]
    n, h, chunks = ahead.shape[:3]
    H = q.new_zeros(n, h, width, v.shape[3]) if state is None else state.transpose(2, 3)
    before, errors = [], []
    for c in range(chunks):
        before.append(H)
        errors.append(ahead[:, :, c] - by[:, :, c] @ H)
        H = (H if last is None else last[:, :, c] * H) + written[:, :, c].mT @ errors[-1]
    states, N = torch.stack(before, 2), torch.stack(errors, 2)
    o = scale * _times(part.q, part.decay) @ states + part.P @ (part.beta * N)
    kept = (_joined(N, t), states) if keep else (q.new_empty(0), q.new_empty(0))
    return Forward(_joined(o, t), H.mT.contiguous(), *kept)


def backward(
    go: Tensor | None,
    gfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_alpha: Tensor | None,
    lam: Tensor | None,
    result: Forward,
    scale: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, beta, log_alpha, lam and of the memory before the first token."""
    t, H0, chunk = q.shape[1], result.marks, chunk or CHUNK
    part = _inside(q, k, v, beta, log_alpha, lam, scale, chunk)
    go = torch.zeros_like(v) if go is None else go
    gO, N = _split(go, chunk), _split(result.errors, chunk)
    U = part.beta * N
    decayed_q, decayed_x = scale * _times(part.q, part.decay), _times(part.x, part.decay)
    kept_k = _times(part.k, part.rest)
    right = torch.cat([part.P.mT @ gO, kept_k], -1)
    ahead, by = torch.linalg.solve_triangular((part.beta * part.M).mT, right, upper=True, unitriangular=True).split(
        [v.shape[3], q.shape[3]], -1
    )
    read, corrected = decayed_q.mT @ gO, part.beta * decayed_x
    last = None if part.decay is None else part.decay[..., -1:, :]
    gH = torch.zeros_like(H0[:, :, 0]) if gfinal is None else gfinal.mT
    after, found = [], []
    for c in reversed(range(gO.shape[2])):
        after.append(gH)
        found.append(ahead[:, :, c] + by[:, :, c] @ gH)
        gH = (gH if last is None else last[:, :, c] * gH) + read[:, :, c] - corrected[:, :, c].mT @ found[-1]
    gH1, hat = torch.stack(after[::-1], 2), torch.stack(found[::-1], 2)
    gV = part.beta * hat
    gA, gB = -(gV @ U.mT).tril(-1), scale * (gO @ U.mT).tril()
    if part.D is not None:
        gA, gB = gA * part.D, gB * part.D
    gX = gA @ part.k - _times(gV, part.decay) @ H0.mT
    gQ = gB @ part.k + scale * _times(gO, part.decay) @ H0.mT
    gK = gA.mT @ part.x + gB.mT @ part.q + _times(U, part.rest) @ gH1.mT + gX
    glam, gG = q.new_empty(0), q.new_empty(0)
    if lam is not None:
        glam = _joined((gX * part.q).sum(-1), t)
        gQ = gQ + _split(lam, chunk).unsqueeze(-1) * gX
    if log_alpha is not None:
        H1 = torch.cat([H0[:, :, 1:], result.final.mT.unsqueeze(2)], 2)
        each = (gO * _split(result.o, chunk)).sum(-1) - (gV * part.v).sum(-1)
        each[..., -1] += (H1 * gH1).sum((-1, -2))
        gG = _joined(each.flip(-1).cumsum(-1).flip(-1), t)
    gbeta = _joined((hat * N).sum(-1), t)
    return _joined(gQ, t), _joined(gK, t), _joined(gV, t), gbeta, gG, glam, gH.mT.contiguous()


def _inside(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_alpha: Tensor | None,
    lam: Tensor | None,
    scale: float,
    chunk: int,
) -> _Chunks:
    q, k, v = _split(q, chunk), _split(k, chunk), _split(v, chunk)
    beta = _split(beta, chunk).unsqueeze(-1)
    x = k if lam is None else k + _split(lam, chunk).unsqueeze(-1) * q
    decay = rest = D = None
    M, P = x @ k.mT, scale * (q @ k.mT)
    if log_alpha is not None:
        wide = log_alpha.float() if log_alpha.device.type == "mps" else log_alpha.double()  # which has no float64
        G = _split(wide, chunk).cumsum(-1)  # differences of float32 sums would lose their digits
        D = (G.unsqueeze(-1) - G.unsqueeze(-2)).to(q.dtype).clamp(max=0).exp()  # above the diagonal nothing is read
        decay, rest = G.to(q.dtype).exp().unsqueeze(-1), (G[..., -1:] - G).to(q.dtype).exp().unsqueeze(-1)
        M, P = M * D, P * D
    return _Chunks(q, k, x, v, beta, decay, rest, D, M.tril(-1), P.tril())


def _split(x: Tensor, chunk: int) -> Tensor:
    """Chunks of whole length; what is put behind the last token has beta = 0 and no decay, and changes nothing."""
    short = -x.shape[1] % chunk
    if short:
        x = torch.cat([x, x.new_zeros(x.shape[0], short, *x.shape[2:])], 1)
    return rearrange(x, "n (c i) h ... -> n h c i ...", i=chunk).contiguous()


def _joined(x: Tensor, t: int) -> Tensor:
    return rearrange(x, "n h c i ... -> n (c i) h ...")[:, :t].contiguous()


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else factor * x
