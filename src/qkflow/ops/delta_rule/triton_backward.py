r"""Triton backward kernels of the delta rule; `chunked.py` has the equations, with bars for gradients.

| kernel                  | one program per            | computes                                                |
|-------------------------|----------------------------|---------------------------------------------------------|
| `intra_chunk_backward`  | chunk                      | T^\top diag(\beta) times \tilde K and times P^\top \bar O |
| `chunk_states_backward` | row, head, block of values | \bar N = \bar V and \bar H, from chunk to chunk          |
| `scores_backward`       | chunk                      | E and F                                                 |
| `inputs_backward`       | chunk, block of keys       | \bar Q, \bar K, \bar\beta, \bar X                        |
| `decay_backward`        | chunk                      | \bar G, summed to the gradients of the log decays       |

With E = \sigma tril(\bar O N^\top \odot D) and F = tril(\bar N N^\top \odot D, -1), both without \beta, a token's row
of Y collects the gradients of its key as written:

    Y = E^\top Q - F^\top X + diag(e^{G_C - G}) N \bar H'^\top
    \bar X = -F diag(\beta) K - diag(e^G) \bar N H^\top,  \bar K = diag(\beta) Y,  \bar\beta_i = k_i \cdot y_i
    \bar Q = E diag(\beta) K + \sigma diag(e^G) \bar O H^\top

Without an erase direction, x = k and \bar X is added to \bar K.

No two programs add to the same number; the host sums over blocks, so results are deterministic.
"""
# Triton code is checked by Triton's own compiler
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# ruff: noqa: RUF005 - Triton supports a subset of Python

from __future__ import annotations

import triton
import triton.language as tl

from qkflow.ops.delta_rule.triton_forward import chunk_position, program_chunk
from qkflow.ops.delta_rule.triton_tiles import (
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
def intra_chunk_backward(
    q, k, beta, log_alpha, erase, go, x_solved, v_solved, scale, t, h,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The part of a chunk that does not depend on the gradient of the state after it."""
    like: tl.constexpr = x_solved.dtype.element_ty
    _, _, _, start, remaining = program_chunk(t, h, C)
    i = tl.arange(0, C)
    _, decay_to_end, _, high, low = load_decays(log_alpha, start, i, h, remaining, C)
    beta_i = load_gate(beta, start, i, h, remaining)
    M, P = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    for first in range(0, K, BK):
        col = first + tl.arange(0, BK)
        key, query = (
            load_tile(k + start * K, i, h * K, remaining, col, K),
            load_tile(q + start * K, i, h * K, remaining, col, K),
        )
        M += dot_like(load_erase(erase, k, start, i, h, remaining, col, K), tl.trans(key), like)
        P += dot_like(query, tl.trans(key), like)
    D = decay_matrix(high, low, i)
    T_back = tl.trans(unit_lower_inverse(M * D * beta_i[None, :], remaining, C)) * beta_i[None, :]
    P = tl.trans(P * D * scale)
    for first in range(0, V, BV):
        col = first + tl.arange(0, BV)
        gO = load_tile(go + start * V, i, h * V, remaining, col, V)
        store_tile(v_solved + start * V, i, h * V, remaining, col, V, dot_f32(T_back, dot_f32(P, gO, like), like))
    T_back *= decay_to_end[None, :]
    for first in range(0, K, BK):
        col = first + tl.arange(0, BK)
        key = load_tile(k + start * K, i, h * K, remaining, col, K)
        store_tile(x_solved + start * K, i, h * K, remaining, col, K, dot_f32(T_back, key, like))


@triton.jit
def chunk_states_backward(
    q, k, log_alpha, erase, go, gfinal, checkpoints, x_solved, gn, gv, gcheckpoints, gG_end, gstate, scale, t, h,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    r"""The state's gradient from chunk to chunk; `gn` holds the output of `intra_chunk_backward`, then \bar N."""
    like: tl.constexpr = x_solved.dtype.element_ty
    blocks: tl.constexpr = (K + BK - 1) // BK
    chunks, m = tl.cdiv(t, C), tl.program_id(0)
    i, row, col = tl.arange(0, C), tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    memory = m.to(tl.int64) * K * V
    gH = ()
    for j in tl.static_range(blocks):
        if gfinal is None:
            gH = gH + (tl.zeros((BK, BV), tl.float32),)
        else:
            gH = gH + (load_transposed(gfinal + memory, j * BK + row, K, col, V),)
    for step in range(chunks):
        c = chunks - 1 - step
        start, remaining = chunk_position(m, c, t, h, C)
        checkpoint = (m.to(tl.int64) * chunks + c) * K * V
        gN = load_tile(gn + start * V, i, h * V, remaining, col, V)
        end = 0.0
        for j in tl.static_range(blocks):
            store_tile(gcheckpoints + checkpoint, j * BK + row, V, K, col, V, gH[j])
            if log_alpha is not None:
                H_after = load_tile(checkpoints + checkpoint + (m.to(tl.int64) + 1) * K * V, j * BK + row, V, K, col, V)
                end += tl.sum(H_after * gH[j])
            gN += dot_like(load_tile(x_solved + start * K, i, h * K, remaining, j * BK + row, K), gH[j], like)
        if log_alpha is not None:
            tl.store(gG_end + (tl.program_id(1) * tl.num_programs(0) + m).to(tl.int64) * chunks + c, end)
        store_tile(gn + start * V, i, h * V, remaining, col, V, gN)
        if gv is not None:
            store_tile(gv + start * V, i, h * V, remaining, col, V, gN)
        decay, _, last, _, _ = load_decays(log_alpha, start, i, h, remaining, C)
        gO = load_tile(go + start * V, i, h * V, remaining, col, V) * (scale * decay)[:, None]
        gN *= decay[:, None]
        previous = ()
        for j in tl.static_range(blocks):
            query = load_tile(q + start * K, i, h * K, remaining, j * BK + row, K)
            x = load_erase(erase, k, start, i, h, remaining, j * BK + row, K)
            gH_j = gH[j] * last + dot_f32(tl.trans(query), gO, like) - dot_f32(tl.trans(x), gN, like)
            previous = previous + (gH_j,)
        gH = previous
    for j in tl.static_range(blocks):
        store_transposed(gstate + memory, j * BK + row, K, col, V, gH[j])


@triton.jit
def scores_backward(
    log_alpha, go, errors, gn, E, F, scale, t, h,
    V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """E and F of a chunk."""
    like: tl.constexpr = go.dtype.element_ty
    _, _, _, start, remaining = program_chunk(t, h, C)
    i = tl.arange(0, C)
    read_out, corrected = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    for first in range(0, V, BV):
        col = first + tl.arange(0, BV)
        N = tl.trans(load_tile(errors + start * V, i, h * V, remaining, col, V))
        read_out += dot_f32(load_tile(go + start * V, i, h * V, remaining, col, V), N, like)
        corrected += dot_f32(load_tile(gn + start * V, i, h * V, remaining, col, V), N, like)
    _, _, _, high, low = load_decays(log_alpha, start, i, h, remaining, C)
    D = decay_matrix(high, low, i)
    offset = tl.program_id(0).to(tl.int64) * C * C
    store_tile(E + offset, i, C, C, i, C, read_out * D * scale)
    store_tile(F + offset, i, C, C, i, C, tl.where(i[:, None] > i[None, :], corrected * D, 0.0))


@triton.jit
def inputs_backward(
    q, k, beta, log_alpha, erase, go, errors, checkpoints, gn, gcheckpoints, E, F,
    gq, gk, gbeta, gerase, gG_read, scale, t, h,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, keys, erase directions and beta, for one block of keys."""
    like: tl.constexpr = go.dtype.element_ty
    chunks, m, c, start, remaining = program_chunk(t, h, C)
    i, row = tl.arange(0, C), tl.program_id(1) * BK + tl.arange(0, BK)
    checkpoint = (m.to(tl.int64) * chunks + c) * K * V
    gQ, gX, Y = tl.zeros((C, BK), tl.float32), tl.zeros((C, BK), tl.float32), tl.zeros((C, BK), tl.float32)
    for first in range(0, V, BV):
        col = first + tl.arange(0, BV)
        H = tl.trans(load_tile(checkpoints + checkpoint + m.to(tl.int64) * K * V, row, V, K, col, V))
        gQ += dot_like(load_tile(go + start * V, i, h * V, remaining, col, V), H, like)
        gX += dot_like(load_tile(gn + start * V, i, h * V, remaining, col, V), H, like)
        gH = tl.trans(load_tile(gcheckpoints + checkpoint, row, V, K, col, V))
        Y += dot_f32(load_tile(errors + start * V, i, h * V, remaining, col, V), gH, like)
    decay, decay_to_end, _, _, _ = load_decays(log_alpha, start, i, h, remaining, C)
    gQ *= (scale * decay)[:, None]
    gX *= -decay[:, None]
    Y *= decay_to_end[:, None]
    offset = tl.program_id(0).to(tl.int64) * C * C
    for first in range(0, tl.minimum(remaining, C), BC):
        j = first + tl.arange(0, BC)
        key = load_tile(k + start * K, j, h * K, remaining, row, K).to(tl.float32)
        query = load_tile(q + start * K, j, h * K, remaining, row, K).to(tl.float32)
        Y += dot_f32(tl.trans(load_tile(E + offset, j, C, C, i, C)), query, like)
        x = load_erase(erase, k, start, j, h, remaining, row, K)
        Y -= dot_f32(tl.trans(load_tile(F + offset, j, C, C, i, C)), x, like)
        key *= load_gate(beta, start, j, h, remaining)[:, None]
        gQ += dot_f32(load_tile(E + offset, i, C, C, j, C), key, like)
        gX -= dot_f32(load_tile(F + offset, i, C, C, j, C), key, like)
    block = tl.program_id(1) * (tl.num_programs(0) // chunks).to(tl.int64) * t + start
    query = load_tile(q + start * K, i, h * K, remaining, row, K)
    if log_alpha is not None:
        tl.store(gG_read + block + i * h, tl.sum(gQ * query, 1), mask=i < remaining)
    store_tile(gq + start * K, i, h * K, remaining, row, K, gQ)
    key = load_tile(k + start * K, i, h * K, remaining, row, K)
    tl.store(gbeta + block + i * h, tl.sum(key * Y, 1), mask=i < remaining)
    gK = Y * load_gate(beta, start, i, h, remaining)[:, None]
    if erase is None:
        gK += gX
    else:
        store_tile(gerase + start * K, i, h * K, remaining, row, K, gX)
    store_tile(gk + start * K, i, h * K, remaining, row, K, gK)


@triton.jit
def decay_backward(
    v, gn, gG_read, gG_end, galpha, t, h,
    V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr,
):  # fmt: skip
    r"""Equation (7) of `chunked.py`, with \bar o_i \cdot o_i computed as q_i \cdot \bar q_i through the read-out.

    `gG_read` has one term per block of keys, and `gG_end` one per block of values.
    """
    chunks, _, _, start, remaining = program_chunk(t, h, C)
    i = tl.arange(0, C)
    gG = tl.zeros((C,), tl.float32)
    for block in tl.static_range(NK):
        gG += load_gate(gG_read + block * (tl.num_programs(0) // chunks).to(tl.int64) * t, start, i, h, remaining)
    for first in range(0, V, BV):
        col = first + tl.arange(0, BV)
        value = load_tile(v + start * V, i, h * V, remaining, col, V)
        gG -= tl.sum(value * load_tile(gn + start * V, i, h * V, remaining, col, V), 1)
    end = 0.0
    for block in tl.static_range(NV):
        end += tl.load(gG_end + block * tl.num_programs(0).to(tl.int64) + tl.program_id(0))
    gG += tl.where(i == C - 1, end, 0.0)
    tl.store(galpha + start + i * h, tl.cumsum(gG, 0, reverse=True), mask=i < remaining)
