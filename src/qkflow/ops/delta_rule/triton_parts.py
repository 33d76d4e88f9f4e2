"""What the Triton kernels of the delta rule are made of: tiles, products, decays, and the inverse inside a chunk.

A tile is a chunk of C tokens (or a block of the memory's rows) by a block of columns, with zeros outside of its tensor:
a token beyond the end has beta = 0 and changes nothing. All products are summed in float32. Operands in float32 are
taken apart into numbers of tensor cores' own, of which the three largest products keep nearly all digits.
"""
# Triton's language is checked by its own compiler
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# ruff: noqa: RET505 - what stands behind a return would be compiled as well

from __future__ import annotations

import triton
import triton.knobs
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels run as Python on a CPU (TRITON_INTERPRET=1), which multiplies no numbers of 16 bits."""
_NOTHING = tl.constexpr(-1000.0)
_BLOCK = tl.constexpr(16)
"""Tokens whose inverse is found by substitution; larger ones are joined from these by products."""


@triton.jit
def cast(x, like: tl.constexpr):
    """In another type, rounded to the nearest: the interpreter would cut bfloat16 off."""
    if INTERPRETED and like == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits & -0x10000).to(tl.float32, bitcast=True).to(like)
    else:
        return x.to(like)


@triton.jit
def product(a, b, like: tl.constexpr):
    """A b of operands in the values' type `like`: of what came from outside, and of memories."""
    if like == tl.float32 or INTERPRETED:
        return fine(cast(a, like), cast(b, like), tl.float32)
    else:
        return tl.dot(a.to(like), b.to(like))


@triton.jit
def fine(a, b, like: tl.constexpr):
    """A b of float32 operands, where a few digits would not do: inside a chunk, alike keys make large terms cancel."""
    if like == tl.float32 or INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="tf32x3")
    else:  # with a single product in tf32, which cuts off operands, gradients would be off by 3 percent
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="bf16x3")


@triton.jit
def read(base, row, stride, rows, col, cols: tl.constexpr):
    """A tile of a matrix whose rows lie `stride` apart."""
    there = (row[:, None] < rows) & (col[None, :] < cols)
    return tl.load(base + row[:, None] * stride + col[None, :], mask=there, other=0.0)


@triton.jit
def write(base, row, stride, rows, col, cols: tl.constexpr, what):
    """A tile back to where `read` would find it."""
    there = (row[:, None] < rows) & (col[None, :] < cols)
    tl.store(base + row[:, None] * stride + col[None, :], cast(what, base.dtype.element_ty), mask=there)


@triton.jit
def turned(base, row, rows: tl.constexpr, col, cols: tl.constexpr):
    """A tile [rows of the memory, values] of a state that lies as [v, k]."""
    there = (row[:, None] < rows) & (col[None, :] < cols)
    return tl.load(base + col[None, :] * rows + row[:, None], mask=there, other=0.0).to(tl.float32)


@triton.jit
def turn(base, row, rows: tl.constexpr, col, cols: tl.constexpr, what):
    """A tile of the memory back into a state that lies as [v, k]."""
    there = (row[:, None] < rows) & (col[None, :] < cols)
    tl.store(base + col[None, :] * rows + row[:, None], what, mask=there)


@triton.jit
def gate(base, at, i, stride, left):
    """A number a token; `base` may be None, for zeros."""
    if base is None:
        return tl.zeros_like(i).to(tl.float32)
    else:
        return tl.load(base + at + i * stride, mask=i < left, other=0.0).to(tl.float32)


@triton.jit
def summed(each):
    """G, the sums of log decays, each as two float32: differences of single ones would lose their digits."""
    kept = tl.maximum(each, _NOTHING, propagate_nan=tl.PropagateNan.ALL)
    G = tl.cumsum(kept.to(tl.float64), 0)
    high = G.to(tl.float32)
    return high, (G - high.to(tl.float64)).to(tl.float32)


@triton.jit
def at_end(x, C: tl.constexpr):
    """The number of the last token."""
    return tl.sum(tl.where(tl.arange(0, C) == C - 1, x, 0.0), 0)


@triton.jit
def decay(log_alpha, at, i, stride, left, C: tl.constexpr):
    """e^G, e^{G_C - G}, e^{G_C}, and G."""
    high, low = summed(gate(log_alpha, at, i, stride, left))
    last_high, last_low = at_end(high, C), at_end(low, C)
    rest = tl.exp(tl.minimum((last_high - high) + (last_low - low), 0.0))
    return tl.exp(high), rest, tl.exp(last_high), high, low


@triton.jit
def between(high, low, i):
    """D, with zeros above the diagonal."""
    apart = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    return tl.where(i[:, None] >= i[None, :], tl.exp(tl.minimum(apart, 0.0)), 0.0)


@triton.jit
def inverse(L, left, C: tl.constexpr):
    """(I + L)^{-1}, with L right below the diagonal: blocks of 16 by substitution, then pairs of them by products."""
    A = blocks(L, _BLOCK, 1, C)
    i = tl.arange(0, _BLOCK)
    A = tl.where(i[None, :, None] > i[None, None, :], -A, 0.0)
    T = A
    for r in range(2, tl.minimum(left, _BLOCK)):  # beyond the end it is I already
        here = i[None, :, None] == r
        row = tl.sum(tl.where(here, A, 0.0), 1)
        row += tl.sum(row[:, :, None] * T, 1)
        T = tl.where(here, row[:, None, :], T)
    T += tl.where(i[None, :, None] == i[None, None, :], 1.0, 0.0)
    if C >= 32:
        T = joined(T, L, 16, C)
    if C >= 64:
        T = joined(T, L, 32, C)
    return tl.reshape(T, (C, C))


@triton.jit
def blocks(L, size: tl.constexpr, wide: tl.constexpr, C: tl.constexpr):
    """Of each square on the diagonal, `wide` blocks of a `size` in width, the block at its lower left."""
    many: tl.constexpr = C // size
    b = tl.arange(0, many)
    wanted = (b[:, None] % wide == wide - 1) & (b[None, :] == b[:, None] - wide + 1)
    found = tl.where(wanted[:, None, :, None], tl.reshape(L, (many, size, many, size)), 0.0)
    return tl.sum(tl.reshape(tl.sum(found, 2), (many // wide, wide, size, size)), 1)


@triton.jit
def joined(T, L, size: tl.constexpr, C: tl.constexpr):
    """Inverses of pairs of blocks from those of the blocks: [[A, 0], [B, C]] has -C^{-1} B A^{-1} at its lower left."""
    pairs: tl.constexpr = C // size // 2
    T = tl.reshape(T, (pairs, 2, size, size))
    side = tl.arange(0, 2)
    first = tl.sum(tl.where(side[None, :, None, None] == 0, T, 0.0), 1)
    second = tl.sum(tl.where(side[None, :, None, None] == 1, T, 0.0), 1)
    low = fine(fine(second, blocks(L, size, 2, C), tl.float32), first, tl.float32)
    across = side[None, :, None, None, None] - side[None, None, None, :, None]
    made = tl.where(across == 0, T[:, :, :, None, :], tl.where(across == 1, -low[:, None, :, None, :], 0.0))
    return tl.reshape(made, (pairs, 2 * size, 2 * size))
