"""Building blocks of the Triton kernels: tiles, products, decays and the triangular inverse of a chunk.

A tile is a chunk of C tokens (or a block of the state's rows) by a block of columns, with zeros outside its tensor: a
token past the end has beta = 0 and changes nothing. Products accumulate in float32. Float32 operands are split into
tensor-core numbers, and the three largest partial products keep nearly all digits.
"""
# Triton code is checked by Triton's own compiler
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# ruff: noqa: RET505 - code after a return would be compiled as well

from __future__ import annotations

import triton
import triton.knobs
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether the kernels run in the interpreter (TRITON_INTERPRET=1), which has no 16-bit products."""
_MIN_LOG_DECAY = tl.constexpr(-1000.0)
_BLOCK = tl.constexpr(16)
"""Size of the blocks inverted by substitution; larger inverses are joined from them by products."""


@triton.jit
def cast(x, like: tl.constexpr):
    """Cast with rounding to nearest; the interpreter would truncate bfloat16."""
    if INTERPRETED and like == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits & -0x10000).to(tl.float32, bitcast=True).to(like)
    else:
        return x.to(like)


@triton.jit
def dot_like(a, b, like: tl.constexpr):
    """A b with operands in the dtype of the values, for inputs and states."""
    if like == tl.float32 or INTERPRETED:
        return dot_f32(cast(a, like), cast(b, like), tl.float32)
    else:
        return tl.dot(a.to(like), b.to(like))


@triton.jit
def dot_f32(a, b, like: tl.constexpr):
    """A b with float32 operands, for products inside a chunk, where similar keys make large terms cancel."""
    if like == tl.float32 or INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="tf32x3")
    else:  # a single tf32 product, which truncates its operands, would give errors of 3% in the gradients
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="bf16x3")


@triton.jit
def load_tile(base, row, stride, rows, col, cols: tl.constexpr):
    """Load a tile of a matrix with row stride `stride`."""
    mask = (row[:, None] < rows) & (col[None, :] < cols)
    return tl.load(base + row[:, None] * stride + col[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(base, row, stride, rows, col, cols: tl.constexpr, values):
    """Store a tile; the inverse of `load_tile`."""
    mask = (row[:, None] < rows) & (col[None, :] < cols)
    tl.store(base + row[:, None] * stride + col[None, :], cast(values, base.dtype.element_ty), mask=mask)


@triton.jit
def load_erase(erase, k, start, i, h, remaining, col, K: tl.constexpr):
    """Load a tile of the erase directions, which are the keys if `erase` is None."""
    if erase is None:
        return load_tile(k + start * K, i, h * K, remaining, col, K)
    else:
        return load_tile(erase + start * K, i, h * K, remaining, col, K)


@triton.jit
def load_transposed(base, row, rows: tl.constexpr, col, cols: tl.constexpr):
    """Load a [k, v] tile of a state stored as [v, k]."""
    mask = (row[:, None] < rows) & (col[None, :] < cols)
    return tl.load(base + col[None, :] * rows + row[:, None], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_transposed(base, row, rows: tl.constexpr, col, cols: tl.constexpr, values):
    """Store a [k, v] tile into a state stored as [v, k]."""
    mask = (row[:, None] < rows) & (col[None, :] < cols)
    tl.store(base + col[None, :] * rows + row[:, None], values, mask=mask)


@triton.jit
def load_gate(base, start, i, stride, remaining):
    """Load one number per token; zeros if `base` is None."""
    if base is None:
        return tl.zeros_like(i).to(tl.float32)
    else:
        return tl.load(base + start + i * stride, mask=i < remaining, other=0.0).to(tl.float32)


@triton.jit
def cumulative_log_decay(each):
    """G as pairs of float32 numbers (high and low part): differences of single float32 sums would cancel."""
    kept = tl.maximum(each, _MIN_LOG_DECAY, propagate_nan=tl.PropagateNan.ALL)
    G = tl.cumsum(kept.to(tl.float64), 0)
    high = G.to(tl.float32)
    return high, (G - high.to(tl.float64)).to(tl.float32)


@triton.jit
def at_last_token(x, C: tl.constexpr):
    """The entry of the last token."""
    return tl.sum(tl.where(tl.arange(0, C) == C - 1, x, 0.0), 0)


@triton.jit
def load_decays(log_alpha, start, i, stride, remaining, C: tl.constexpr):
    """e^G, e^{G_C - G}, e^{G_C}, and G as high and low part."""
    high, low = cumulative_log_decay(load_gate(log_alpha, start, i, stride, remaining))
    last_high, last_low = at_last_token(high, C), at_last_token(low, C)
    decay_to_end = tl.exp(tl.minimum((last_high - high) + (last_low - low), 0.0))
    return tl.exp(high), decay_to_end, tl.exp(last_high), high, low


@triton.jit
def decay_matrix(high, low, i):
    """D, zero above the diagonal."""
    difference = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    return tl.where(i[:, None] >= i[None, :], tl.exp(tl.minimum(difference, 0.0)), 0.0)


@triton.jit
def unit_lower_inverse(L, remaining, C: tl.constexpr):
    """(I + L)^{-1} for L valid below the diagonal: blocks of 16 by substitution, then joined by products."""
    A = lower_left_blocks(L, _BLOCK, 1, C)
    i = tl.arange(0, _BLOCK)
    A = tl.where(i[None, :, None] > i[None, None, :], -A, 0.0)
    T = A
    for r in range(2, tl.minimum(remaining, _BLOCK)):  # rows past the end are already those of I
        is_row = i[None, :, None] == r
        row = tl.sum(tl.where(is_row, A, 0.0), 1)
        row += tl.sum(row[:, :, None] * T, 1)
        T = tl.where(is_row, row[:, None, :], T)
    T += tl.where(i[None, :, None] == i[None, None, :], 1.0, 0.0)
    if C >= 32:
        T = join_inverses(T, L, 16, C)
    if C >= 64:
        T = join_inverses(T, L, 32, C)
    return tl.reshape(T, (C, C))


@triton.jit
def lower_left_blocks(L, size: tl.constexpr, n_wide: tl.constexpr, C: tl.constexpr):
    """The lower-left block of each diagonal square of n_wide x n_wide blocks."""
    n_blocks: tl.constexpr = C // size
    b = tl.arange(0, n_blocks)
    is_lower_left = (b[:, None] % n_wide == n_wide - 1) & (b[None, :] == b[:, None] - n_wide + 1)
    selected = tl.where(is_lower_left[:, None, :, None], tl.reshape(L, (n_blocks, size, n_blocks, size)), 0.0)
    return tl.sum(tl.reshape(tl.sum(selected, 2), (n_blocks // n_wide, n_wide, size, size)), 1)


@triton.jit
def join_inverses(T, L, size: tl.constexpr, C: tl.constexpr):
    """Join inverses in pairs: the inverse of [[A, 0], [B, C]] has -C^{-1} B A^{-1} at its lower left."""
    pairs: tl.constexpr = C // size // 2
    T = tl.reshape(T, (pairs, 2, size, size))
    side = tl.arange(0, 2)
    first = tl.sum(tl.where(side[None, :, None, None] == 0, T, 0.0), 1)
    second = tl.sum(tl.where(side[None, :, None, None] == 1, T, 0.0), 1)
    low = dot_f32(dot_f32(second, lower_left_blocks(L, size, 2, C), tl.float32), first, tl.float32)
    offset = side[None, :, None, None, None] - side[None, None, None, :, None]
    joined = tl.where(offset == 0, T[:, :, :, None, :], tl.where(offset == 1, -low[:, None, :, None, :], 0.0))
    return tl.reshape(joined, (pairs, 2 * size, 2 * size))
