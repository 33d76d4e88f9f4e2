r"""Scores of the delta rule in which every key channel decays at its own rate, without overflow.

Let \alpha_i be the decays of token i and G their cumulative logarithms, [C k]. The scores of a chunk are

    M_{ij} = \sum_c x_{ic} e^{G_{ic} - G_{jc}} k_{jc},   P_{ij} likewise with q_{ic}              (1)

With one decay per head, e^{G_i - G_j} is a factor of the score. With one per channel it is not, and to split it as
(x_i e^{G_i}) \cdot (k_j e^{-G_j}) overflows: e^{-G} is e^{640} after 64 tokens of log decay -10. It must be split about
a reference R between j and i, so that both exponents are at most zero:

    M_{ij} = (x_i e^{G_i - R}) \cdot (k_j e^{R - G_j}),   G_i <= R <= G_j                          (2)

Halve the chunk: all pairs of a token i of the second half (L) and a token j of the first (F) have the same reference,
the end of the first half, so their block of M is one product. Then halve the halves, and so on. From the bottom up,
with blocks of s = 1, 2, 4, ... tokens, the factors are products of decays; there is no other exponential:

    a_i = product of the decays from the start of i's block to i,  d_j = product from after j to the end of j's block
    M_{LF} = (X a)_L (K d)_F^\top                                                                  (3)
    a_i <- a_i \Delta_F for i in L,  d_j <- d_j \Delta_L for j in F,   \Delta = a at a block's last token      (4)

After the last level a = e^G and d = e^{G_C - G}. No factor exceeds one, and a product of n decays takes log2(n) steps,
so rounding errors do not grow with the length. The gradients are products with the same factors:

    \bar X_L += a_L (\bar M_{LF} (K d)_F),   \bar K_F += d_F (\bar M_{LF}^\top (X a)_L),  likewise for P and Q    (5)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Level(NamedTuple):
    """The factors of the blocks of one size, [... blocks s k]."""

    a: Tensor
    """Of the second half of each pair of blocks."""
    d: Tensor
    """Of the first half."""


class ChannelDecay(NamedTuple):
    """The decays of all chunks, [... C k], C a power of two."""

    levels: tuple[Level, ...]
    decay: Tensor
    """e^G"""
    decay_to_end: Tensor
    """e^{G_C - G}"""


def channel_decay(alpha: Tensor) -> ChannelDecay:
    """Equation (4), from the decays of each token, [... C k].

    >>> decays = channel_decay(torch.tensor([[0.5], [0.5], [0.25], [1.0]]))
    >>> decays.decay.flatten().tolist(), decays.decay_to_end.flatten().tolist()
    ([0.5, 0.25, 0.0625, 0.0625], [0.125, 0.25, 1.0, 1.0])
    """
    chunk, levels = alpha.shape[-2], []
    a, d = alpha.clone(), torch.ones_like(alpha)
    for size in _sizes(chunk):
        first, second = _halves(a, size)
        levels.append(Level(second.clone(), _halves(d, size)[0].clone()))
        total_first, total_second = first[..., -1:, :].clone(), second[..., -1:, :].clone()
        second.mul_(total_first)
        _halves(d, size)[0].mul_(total_second)
    return ChannelDecay(tuple(levels), a, d)


def scores(x: Tensor, q: Tensor, k: Tensor, decays: ChannelDecay) -> tuple[Tensor, Tensor]:
    """M below its diagonal and P up to its diagonal, equation (3), [... C C]; zero elsewhere."""
    chunk = k.shape[-2]
    M, P = k.new_zeros(*k.shape[:-1], chunk), torch.diag_embed((q * k).sum(-1))
    for size, (a, d) in zip(_sizes(chunk), decays.levels, strict=True):
        keys = (_halves(k, size)[0] * d).mT
        _block(M, size).copy_((_halves(x, size)[1] * a) @ keys)
        _block(P, size).copy_((_halves(q, size)[1] * a) @ keys)
    return M, P


def scores_backward(
    gM: Tensor, gP: Tensor, x: Tensor, q: Tensor, k: Tensor, decays: ChannelDecay
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, q and k through the scores, equation (5); reads gM and gP where `scores` writes."""
    diagonal = gP.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    gx, gq, gk = torch.zeros_like(x), diagonal * k, diagonal * q
    for size, (a, d) in zip(_sizes(k.shape[-2]), decays.levels, strict=True):
        keys = _halves(k, size)[0] * d
        gM_block, gP_block = _block(gM, size).contiguous(), _block(gP, size).contiguous()
        _halves(gx, size)[1].addcmul_(a, gM_block @ keys)
        _halves(gq, size)[1].addcmul_(a, gP_block @ keys)
        reads = gM_block.mT @ (_halves(x, size)[1] * a) + gP_block.mT @ (_halves(q, size)[1] * a)
        _halves(gk, size)[0].addcmul_(d, reads)
    return gx, gq, gk


def _sizes(chunk: int) -> list[int]:
    return [1 << level for level in range(chunk.bit_length() - 1)]


def _halves(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Views of the first and the second block of each pair of blocks, [... pairs s k]."""
    pairs = x.unflatten(-2, (-1, 2, size))
    return pairs[..., 0, :, :], pairs[..., 1, :, :]


def _block(M: Tensor, size: int) -> Tensor:
    """A view of the rows of the second and the columns of the first block of each pair, [... pairs s s]."""
    n_pairs = M.shape[-1] // (2 * size)
    pairs = M.unflatten(-1, (n_pairs, 2, size)).unflatten(-4, (n_pairs, 2, size))  # [... pairs 2 s pairs 2 s]
    return pairs[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
