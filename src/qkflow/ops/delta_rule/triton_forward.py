r"""Triton forward kernels of the delta rule; `chunked.py` has the equations.

| kernel          | one program per              | computes                                                    |
|-----------------|------------------------------|-------------------------------------------------------------|
| `intra_chunk`   | chunk                        | T = (I + M diag(\beta))^{-1}, then T diag(e^G) X and T V     |
| `chunk_states`  | row, head, block of values   | N and H, from chunk to chunk, with H in registers            |
| `chunk_outputs` | chunk, block of values       | O                                                            |
| `recurrent`     | row, head, block of values   | the recurrence, token by token, for a few tokens             |

Tensors are [n t h ...] and states between chunks [n h chunk k v]. `K` and `V` are widths, `BK` and `BV` block widths.
"""

# Triton code is checked by Triton's own compiler
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# ruff: noqa: RUF005, SIM108 - Triton supports a subset of Python
from __future__ import annotations

import triton
import triton.language as tl

from qkflow.ops.delta_rule.triton_tiles import (
    cast,
    decay_matrix,
    dot_f32,
    dot_like,
    load_decays,
    load_erase,
    load_gate,
    load_tile,
    load_transposed,
    store_tile,
    store_transposed,
    unit_lower_inverse,
)


@triton.jit
def chunk_position(m, c, t, h, C: tl.constexpr):
    """Index of the first token of chunk c (m counts rows and heads), and the number of tokens from there on."""
    row, head = m // h, m % h
    return (row.to(tl.int64) * t + c * C) * h + head, t - c * C


@triton.jit
def program_chunk(t, h, C: tl.constexpr):
    """Number of chunks, the row-and-head index and chunk of this program, and the position of the chunk."""
    chunks = tl.cdiv(t, C)
    m, c = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    start, remaining = chunk_position(m, c, t, h, C)
    return chunks, m, c, start, remaining


@triton.jit
def intra_chunk(
    k, v, beta, log_alpha, erase, x_solved, v_solved, t, h,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The part of a chunk that does not depend on the state before it."""
    like: tl.constexpr = v.dtype.element_ty
    _, _, _, start, remaining = program_chunk(t, h, C)
    i = tl.arange(0, C)
    decay, _, _, high, low = load_decays(log_alpha, start, i, h, remaining, C)
    M = tl.zeros((C, C), tl.float32)
    for first in range(0, K, BK):
        col = first + tl.arange(0, BK)
        key = load_tile(k + start * K, i, h * K, remaining, col, K)
        M += dot_like(load_erase(erase, k, start, i, h, remaining, col, K), tl.trans(key), like)
    T = unit_lower_inverse(
        M * decay_matrix(high, low, i) * load_gate(beta, start, i, h, remaining)[None, :], remaining, C
    )
    T_decayed = T * decay[None, :]
    for first in range(0, K, BK):
        col = first + tl.arange(0, BK)
        x = load_erase(erase, k, start, i, h, remaining, col, K)
        store_tile(x_solved + start * K, i, h * K, remaining, col, K, dot_f32(T_decayed, x, like))
    for first in range(0, V, BV):
        col = first + tl.arange(0, BV)
        value = load_tile(v + start * V, i, h * V, remaining, col, V)
        store_tile(v_solved + start * V, i, h * V, remaining, col, V, dot_f32(T, value, like))


@triton.jit
def chunk_states(
    k, beta, log_alpha, state, x_solved, errors, checkpoints, final, t, h,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The state from chunk to chunk; `errors` holds T V on entry and N on return."""
    like: tl.constexpr = x_solved.dtype.element_ty
    blocks: tl.constexpr = (K + BK - 1) // BK
    chunks, m = tl.cdiv(t, C), tl.program_id(0)
    i, row, col = tl.arange(0, C), tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    memory = m.to(tl.int64) * K * V
    H = ()
    for j in tl.static_range(blocks):
        if state is None:
            H = H + (tl.zeros((BK, BV), tl.float32),)
        else:
            H = H + (load_transposed(state + memory, j * BK + row, K, col, V),)
    for c in range(chunks):
        start, remaining = chunk_position(m, c, t, h, C)
        checkpoint = checkpoints + (m.to(tl.int64) * (chunks + 1) + c) * K * V
        prediction = tl.zeros((C, BV), tl.float32)
        for j in tl.static_range(blocks):
            store_tile(checkpoint, j * BK + row, V, K, col, V, H[j])
            prediction += dot_like(load_tile(x_solved + start * K, i, h * K, remaining, j * BK + row, K), H[j], like)
        N = load_tile(errors + start * V, i, h * V, remaining, col, V) - prediction
        store_tile(errors + start * V, i, h * V, remaining, col, V, N)
        _, decay_to_end, last, _, _ = load_decays(log_alpha, start, i, h, remaining, C)
        U = N * (load_gate(beta, start, i, h, remaining) * decay_to_end)[:, None]
        after = ()
        for j in tl.static_range(blocks):
            key = load_tile(k + start * K, i, h * K, remaining, j * BK + row, K)
            after = after + (H[j] * last + dot_f32(tl.trans(key), U, like),)
        H = after
    checkpoint = checkpoints + (m.to(tl.int64) * (chunks + 1) + chunks) * K * V
    for j in tl.static_range(blocks):
        store_tile(checkpoint, j * BK + row, V, K, col, V, H[j])
        store_transposed(final + memory, j * BK + row, K, col, V, H[j])


@triton.jit
def chunk_outputs(
    q, k, beta, log_alpha, errors, checkpoints, o, scale, t, h,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The outputs of a chunk, from the state before it and from its own writes."""
    like: tl.constexpr = o.dtype.element_ty
    chunks, m, c, start, remaining = program_chunk(t, h, C)
    i, col = tl.arange(0, C), tl.program_id(1) * BV + tl.arange(0, BV)
    checkpoint = checkpoints + (m.to(tl.int64) * (chunks + 1) + c) * K * V
    P, past = tl.zeros((C, C), tl.float32), tl.zeros((C, BV), tl.float32)
    for first in range(0, K, BK):
        row = first + tl.arange(0, BK)
        query = load_tile(q + start * K, i, h * K, remaining, row, K)
        P += dot_like(query, tl.trans(load_tile(k + start * K, i, h * K, remaining, row, K)), like)
        past += dot_like(query, load_tile(checkpoint, row, V, K, col, V), like)
    decay, _, _, high, low = load_decays(log_alpha, start, i, h, remaining, C)
    P *= decay_matrix(high, low, i) * load_gate(beta, start, i, h, remaining)[None, :]
    N = load_tile(errors + start * V, i, h * V, remaining, col, V)
    store_tile(o + start * V, i, h * V, remaining, col, V, scale * (past * decay[:, None] + dot_f32(P, N, like)))


@triton.jit
def recurrent(
    q, k, v, beta, log_alpha, erase, state, o, final, scale, t, h,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """A few tokens, one by one, with the state in registers; `BK` covers the whole key."""
    m = tl.program_id(0)
    row, col = tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    memory = m.to(tl.int64) * K * V
    if state is None:
        S = tl.zeros((BV, BK), tl.float32)
    else:
        S = load_tile(state + memory, col, K, V, row, K)
    for i in range(t):
        start, _ = chunk_position(m, i, t, h, 1)
        query = tl.load(q + start * K + row, mask=row < K, other=0.0).to(tl.float32)
        key = tl.load(k + start * K + row, mask=row < K, other=0.0).to(tl.float32)
        value = tl.load(v + start * V + col, mask=col < V, other=0.0).to(tl.float32)
        x = key
        if erase is not None:
            x = tl.load(erase + start * K + row, mask=row < K, other=0.0).to(tl.float32)
        if log_alpha is not None:
            S *= tl.exp(tl.load(log_alpha + start))
        error = value - tl.sum(S * x[None, :], 1)
        S += (tl.load(beta + start) * error)[:, None] * key[None, :]
        read_out = scale * tl.sum(S * query[None, :], 1)
        tl.store(o + start * V + col, cast(read_out, o.dtype.element_ty), mask=col < V)
    store_tile(final + memory, col, K, V, row, K, S)
