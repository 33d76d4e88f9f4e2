r"""The delta rule chunk by chunk, in PyTorch for any device: matrix products and a triangular solve.

For a chunk of C tokens let H = S^\top be the state before it, G the cumulative sum of the log decays (including each
token's own), D_{ij} = e^{G_i - G_j}, n_i the error that token i corrects and u_i = \beta_i n_i what it writes:

    M = tril(X K^\top \odot D, -1),   P = \sigma tril(Q K^\top \odot D),   \tilde K = diag(e^{G_C - G}) K      (1)
    (I + M diag(\beta)) N = V - diag(e^G) X H,   U = diag(\beta) N                                            (2)
    O = \sigma diag(e^G) Q H + P U,   H' = e^{G_C} H + \tilde K^\top U                                        (3)

The solve does not depend on H: it is applied to V and X for all chunks at once, so the loop over chunks has only two
products. The backward pass, with bars for gradients, is a loop of the same kind in reverse order:

    (I + M^\top diag(\beta)) \hat U = P^\top \bar O + \tilde K \bar H',   \bar N = \bar V = diag(\beta) \hat U  (4)
    \bar H = e^{G_C} \bar H' + \sigma Q^\top diag(e^G) \bar O - X^\top diag(e^G) \bar N                        (5)
    \bar M = -\bar N U^\top,   \bar P = \bar O U^\top,   \bar\beta_i = \hat u_i \cdot n_i                       (6)
    \bar G_i = \bar o_i \cdot o_i - \bar v_i \cdot v_i,   plus \langle H', \bar H' \rangle at the chunk's end   (7)

(7) follows from a symmetry: a decay before token i rescales all that later tokens read, but not what they write.

With a decay per key channel, G is [C k], D moves into the sums over channels (`channel_decay.py`) and the other
decays multiply the columns of X, Q and K instead of their rows:

    M = tril(scores of X and K, -1),   P = \sigma tril(scores of Q and K)                                     (1')
    (e^G \odot X) H,   (e^G \odot Q) H,   e^{G_C} multiplies the rows of H,   \tilde K = e^{G_C - G} \odot K     (2')

All of it is a function of e^G \odot X, e^G \odot Q, e^{-G} \odot K and e^{G_C} \odot H, hence with
\bar K_w the gradient of the keys as written (all of \bar K but what comes from x = k)

    \bar G = X \odot \bar X + Q \odot \bar Q - K \odot \bar K_w,   plus (H' \odot \bar H') 1 at the chunk's end   (7')
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from qkflow.ops.delta_rule import channel_decay
from qkflow.ops.delta_rule.channel_decay import ChannelDecay
from qkflow.ops.delta_rule.inputs import DeltaInputs

CHUNK = 64
"""Default number of tokens per chunk."""
MIN_LOG_DECAY = -1000.0
"""A log decay at which nothing is left in any precision."""


class Forward(NamedTuple):
    """The results of a forward pass. The last two are empty unless they are saved for the backward pass."""

    o: Tensor
    """[n t h v]"""
    final: Tensor
    """[n h v k]"""
    errors: Tensor
    """N, in the layout of the backend's own backward pass."""
    checkpoints: Tensor
    """States between chunks, likewise."""


class Saved(NamedTuple):
    """What a backward pass needs from its forward pass."""

    o: Tensor
    errors: Tensor
    checkpoints: Tensor


class _Chunks(NamedTuple):
    """All chunks of all rows and heads, [c m C ...] with m = rows x heads."""

    q: Tensor
    k: Tensor
    x: Tensor
    beta: Tensor
    """[c m C 1]"""
    decay: Tensor
    """e^G, [c m C 1], or [c m C k] with a decay per channel"""
    decay_to_end: Tensor
    """e^{G_C - G}, likewise"""
    D: Tensor | ChannelDecay | None
    """Zero above the diagonal; None without decay."""
    M: Tensor
    """Valid below the diagonal only; a unit-triangular solve reads nothing else."""
    P: Tensor
    """Without the scale."""


def chunk_size(chunk: int, is_vector: bool) -> int:
    """The chunk size for a requested one (0: the default); with a decay per channel, rounded up to a power of two."""
    chunk = chunk or CHUNK
    return 1 << (chunk - 1).bit_length() if is_vector else chunk


def forward(inputs: DeltaInputs, state: Tensor | None, scale: float, chunk: int, save: bool) -> Forward:
    """Outputs and the final state; `chunk` 0 selects the default size."""
    q, v, chunk = inputs.q, inputs.v, chunk_size(chunk, inputs.has_vector_decay)
    (n, t, h, key_width), value_width = q.shape, v.shape[3]
    c = _chunks(inputs, chunk)  # (1)
    right = torch.cat([_split(v, chunk), c.x * c.decay], -1)
    v_solved, x_solved = _solve(c.M * c.beta.mT, right, upper=False).split([value_width, key_width], -1)
    k_write = (c.k * (c.beta * c.decay_to_end)).mT
    N, H = torch.empty_like(right[..., :value_width]), q.new_empty(len(right) + 1, n * h, key_width, value_width)
    H[0] = 0 if state is None else state.flatten(0, 1).mT
    for i in range(len(right)):
        torch.baddbmm(v_solved[i], x_solved[i], H[i], alpha=-1, out=N[i])  # (2)
        torch.baddbmm(H[i] * c.decay[i, :, -1:].mT, k_write[i], N[i], out=H[i + 1])  # (3)
    o = _sum_of_products(c.P, N * (scale * c.beta), c.q * (scale * c.decay), H[:-1])  # (3)
    final = H[-1].mT.contiguous().view(n, h, value_width, key_width)
    return Forward(_join(o, n, h, t), final, *((N, H) if save else (q.new_empty(0), q.new_empty(0))))


def backward(
    go: Tensor | None, gfinal: Tensor | None, inputs: DeltaInputs, saved: Saved, scale: float, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the inputs and of the initial state."""
    q, v, is_vector = inputs.q, inputs.v, inputs.has_vector_decay
    chunk = chunk_size(chunk, is_vector)
    (n, t, h, key_width), value_width = q.shape, v.shape[3]
    c, N, H = _chunks(inputs, chunk), saved.errors, saved.checkpoints
    go = torch.zeros_like(v) if go is None else go
    gO, U = scale * _split(go, chunk), c.beta * N
    right = torch.cat([c.P.mT @ gO, c.k * c.decay_to_end], -1)
    o_solved, k_solved = _solve((c.beta * c.M).mT, right, upper=True).split([value_width, key_width], -1)
    x_erase = (c.x * (c.beta * c.decay)).mT
    gH_read = (c.q * c.decay).mT @ gO if is_vector else c.q.mT @ (gO * c.decay)
    U_hat, gH = torch.empty_like(N), torch.empty_like(H)
    gH[-1] = 0 if gfinal is None else gfinal.flatten(0, 1).mT
    for i in reversed(range(len(N))):
        torch.baddbmm(o_solved[i], k_solved[i], gH[i + 1], out=U_hat[i])  # (4)
        torch.baddbmm(gH_read[i], x_erase[i], U_hat[i], alpha=-1, out=gH[i])  # (5)
        gH[i].addcmul_(gH[i + 1], c.decay[i, :, -1:].mT)
    gV = c.beta * U_hat
    gX, gQ, gK = _keys_backward(c, (gV @ U.mT).neg_(), gO @ U.mT, gV, gO, U, H[:-1].mT, gH[1:].mT)  # (6)
    gv, gG = _join(gV, n, h, t), q.new_empty(0)
    if is_vector:
        gG_token = c.x * gX + c.q * gQ - c.k * gK  # (7')
        gG_token[..., -1, :] += (H[1:] * gH[1:]).sum(-1)
        gG = _join(gG_token.flip(-2).cumsum(-2).flip(-2), n, h, t)
    elif inputs.log_alpha is not None:
        gG_token = _split((go * saved.o).sum(-1) - (gv * v).sum(-1), chunk)  # (7)
        gG_token[..., -1] += (H[1:] * gH[1:]).sum((-1, -2))
        gG = _join(gG_token.flip(-1).cumsum(-1).flip(-1), n, h, t)
    gbeta = _join((U_hat * N).sum(-1), n, h, t)  # (6)
    gstate = gH[0].mT.contiguous().view(n, h, value_width, key_width)
    gerase = q.new_empty(0)
    if inputs.erase is None:
        gK.add_(gX)
    else:
        gerase = _join(gX, n, h, t)
    return _join(gQ, n, h, t), _join(gK, n, h, t), gv, gbeta, gG, gerase, gstate


def _keys_backward(
    c: _Chunks, gM: Tensor, gP: Tensor, gV: Tensor, gO: Tensor, U: Tensor, HT: Tensor, gHT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of X, Q and of the keys as written, from those of the scores; `gM` and `gP` are overwritten."""
    if isinstance(c.D, ChannelDecay):
        gX, gQ, gK = channel_decay.scores_backward(gM, gP, c.x, c.q, c.k, c.D)
        gX.addcmul_(c.decay, gV @ HT, value=-1)
        return gX, gQ.addcmul_(c.decay, gO @ HT), gK.addcmul_(c.decay_to_end, U @ gHT)
    gM, gP = gM.tril_(-1), gP.tril_()
    if c.D is not None:
        gM, gP = gM.mul_(c.D), gP.mul_(c.D)
    gX = _sum_of_products(gM, c.k, gV * -c.decay, HT)
    gQ = _sum_of_products(gP, c.k, gO * c.decay, HT)
    return gX, gQ, _sum_of_products(gM.mT, c.x, gP.mT, c.q).add_((U * c.decay_to_end) @ gHT)


def _chunks(inputs: DeltaInputs, chunk: int) -> _Chunks:
    """Equation (1), except for the scale of P."""
    log_alpha = inputs.log_alpha
    q, k, beta = _split(inputs.q, chunk), _split(inputs.k, chunk), _split(inputs.beta, chunk).unsqueeze(-1)
    x = k if inputs.erase is None else _split(inputs.erase, chunk)
    if log_alpha is not None and log_alpha.ndim == 4:
        decays = channel_decay.channel_decay(_exp_(_split(log_alpha, chunk).clone()))
        return _Chunks(q, k, x, beta, decays.decay, decays.decay_to_end, decays, *channel_decay.scores(x, q, k, decays))
    M, P = x @ k.mT, q @ k.mT
    if log_alpha is None:
        ones = torch.ones_like(beta)
        return _Chunks(q, k, x, beta, ones, ones, None, M, P.tril_())
    # differences of float32 sums would cancel, so sum in float64 (which MPS does not have) and clamp huge decays
    log_alpha = log_alpha.float() if log_alpha.device.type == "mps" else log_alpha.double()
    G = _split(log_alpha.clamp(min=MIN_LOG_DECAY), chunk).cumsum(-1)
    D = _exp_((G.unsqueeze(-1) - G.unsqueeze(-2)).to(q.dtype, copy=True).clamp_(max=0)).tril_()
    decay, decay_to_end = (_exp_(y.to(q.dtype, copy=True)).unsqueeze(-1) for y in (G, G[..., -1:] - G))
    return _Chunks(q, k, x, beta, decay, decay_to_end, D, M.mul_(D), P.mul_(D))


def _exp_(x: Tensor) -> Tensor:
    """In-place exponential that flushes tiny results to zero, since arithmetic with denormal numbers is slow."""
    smallest = 0.7 * math.log(torch.finfo(x.dtype).tiny)
    return torch.threshold_(x, smallest, -math.inf).exp_()


def _solve(L: Tensor, right: Tensor, *, upper: bool) -> Tensor:
    """Solve L y = right. Transposed, because LAPACK is column-major and would copy the operands otherwise."""
    return torch.linalg.solve_triangular(L.mT, right.mT, upper=not upper, left=False, unitriangular=True).mT


def _sum_of_products(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """A b + c d for every chunk."""
    first = (a @ b).flatten(0, 1)
    return torch.baddbmm(first, c.flatten(0, 1), d.flatten(0, 1), out=first).unflatten(0, a.shape[:2])


def _split(x: Tensor, chunk: int) -> Tensor:
    """Split into whole chunks. Padding tokens have beta = 0 and change nothing. May return `x` itself."""
    padding = -x.shape[1] % chunk
    if padding:
        x = torch.cat([x, x.new_zeros(x.shape[0], padding, *x.shape[2:])], 1)
    return rearrange(x, "n (c i) h ... -> c (n h) i ...", i=chunk).contiguous()


def _join(x: Tensor, n: int, h: int, t: int) -> Tensor:
    return rearrange(x, "c (n h) i ... -> n (c i) h ...", n=n, h=h)[:, :t].contiguous()
