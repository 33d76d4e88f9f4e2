r"""The delta rule backward in Triton: five kernels over chunks. `chunked.py` has the algebra, with bars for gradients.

| kernel            | a program is for             | gives                                                            |
|-------------------|------------------------------|------------------------------------------------------------------|
| `inside_backward` | a chunk                      | T^\top diag(\beta) \tilde K and T^\top diag(\beta) P^\top \bar O  |
| `states_backward` | a row, head, block of values | \bar N = \bar V and \bar H, from chunk to chunk                  |
| `pairs_backward`  | a chunk                      | E and F                                                          |
| `gradients`       | a chunk, block of keys       | \bar Q, \bar K, \bar\beta, \bar\lambda                           |
| `decay_backward`  | a chunk                      | \bar G summed back to the log decays                             |

With E = \sigma tril(\bar O N^\top \odot D) and F = tril(\bar N N^\top \odot D, -1), both before \beta, all that goes
back to a token's key as it was written is one row of Y, whence its gradient and that of \beta:

    Y = E^\top Q - F^\top X + diag(e^{G_C - G}) N \bar H'^\top
    \bar X = -F diag(\beta) K - diag(e^G) \bar N H^\top,  \bar K = diag(\beta) Y + \bar X,  \bar\beta_i = k_i \cdot y_i
    \bar Q = E diag(\beta) K + \sigma diag(e^G) \bar O H^\top + diag(\lambda) \bar X

No two programs add to the same number: sums over blocks of keys are left to the host, so that bits never change.
"""
# Triton's language is checked by its own compiler
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# ruff: noqa: RUF005 - Triton is not the whole of Python

from __future__ import annotations

import triton
import triton.language as tl

from qkflow.ops.delta_rule.triton_forward import place
from qkflow.ops.delta_rule.triton_parts import between, decay, fine, gate, inverse, product, read, turn, turned, write


@triton.jit
def inside_backward(
    q, k, beta, log_alpha, lam, go, by, ahead, scale, t, h,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """What every chunk can do without the gradient of the memory after it."""
    like: tl.constexpr = by.dtype.element_ty
    chunks = tl.cdiv(t, C)
    m, c = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    at, left = place(m, c, t, h, C)
    i = tl.arange(0, C)
    _, rest, _, high, low = decay(log_alpha, at, i, h, left, C)
    mix, strength = gate(lam, at, i, h, left), gate(beta, at, i, h, left)
    M, P = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    for first in range(0, K, BK):
        col = first + tl.arange(0, BK)
        key, query = read(k + at * K, i, h * K, left, col, K), read(q + at * K, i, h * K, left, col, K)
        M += product(key, tl.trans(key), like)
        P += product(query, tl.trans(key), like)
    if lam is not None:
        M += mix[:, None] * P
    D = between(high, low, i)
    back = tl.trans(inverse(M * D * strength[None, :], left, C)) * strength[None, :]
    P = tl.trans(P * D * scale)
    for first in range(0, V, BV):
        col = first + tl.arange(0, BV)
        given = read(go + at * V, i, h * V, left, col, V)
        write(ahead + at * V, i, h * V, left, col, V, fine(back, fine(P, given, like), like))
    back *= rest[None, :]
    for first in range(0, K, BK):
        col = first + tl.arange(0, BK)
        key = read(k + at * K, i, h * K, left, col, K)
        write(by + at * K, i, h * K, left, col, K, fine(back, key, like))


@triton.jit
def states_backward(
    q, k, log_alpha, lam, go, gfinal, marks, by, gn, gv, gmarks, ends, gstate, scale, t, h,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    r"""The memory's gradient from chunk to chunk; `gn` holds what is known ahead before, and \bar N after."""
    like: tl.constexpr = by.dtype.element_ty
    blocks: tl.constexpr = (K + BK - 1) // BK
    chunks, m = tl.cdiv(t, C), tl.program_id(0)
    i, row, col = tl.arange(0, C), tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    memory = m.to(tl.int64) * K * V
    gH = ()
    for j in tl.static_range(blocks):
        if gfinal is None:
            gH = gH + (tl.zeros((BK, BV), tl.float32),)
        else:
            gH = gH + (turned(gfinal + memory, j * BK + row, K, col, V),)
    for back in range(chunks):
        c = chunks - 1 - back
        at, left = place(m, c, t, h, C)
        mark = (m.to(tl.int64) * chunks + c) * K * V
        gN = read(gn + at * V, i, h * V, left, col, V)
        end = 0.0
        for j in tl.static_range(blocks):
            write(gmarks + mark, j * BK + row, V, K, col, V, gH[j])
            if log_alpha is not None:
                after = read(marks + mark + (m.to(tl.int64) + 1) * K * V, j * BK + row, V, K, col, V)
                end += tl.sum(after * gH[j])
            gN += product(read(by + at * K, i, h * K, left, j * BK + row, K), gH[j], like)
        if log_alpha is not None:
            tl.store(ends + (tl.program_id(1) * tl.num_programs(0) + m).to(tl.int64) * chunks + c, end)
        write(gn + at * V, i, h * V, left, col, V, gN)
        if gv is not None:
            write(gv + at * V, i, h * V, left, col, V, gN)
        grown, _, last, _, _ = decay(log_alpha, at, i, h, left, C)
        gO = read(go + at * V, i, h * V, left, col, V) * (scale * grown)[:, None]
        gN *= grown[:, None]
        mix = gate(lam, at, i, h, left)
        before = ()
        for j in tl.static_range(blocks):
            key = read(k + at * K, i, h * K, left, j * BK + row, K)
            query = read(q + at * K, i, h * K, left, j * BK + row, K)
            x = key.to(tl.float32)
            if lam is not None:
                x += mix[:, None] * query
            new = gH[j] * last + fine(tl.trans(query), gO, like) - fine(tl.trans(x), gN, like)
            before = before + (new,)
        gH = before
    for j in tl.static_range(blocks):
        turn(gstate + memory, j * BK + row, K, col, V, gH[j])


@triton.jit
def pairs_backward(
    log_alpha, go, errors, gn, E, F, scale, t, h,
    V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """E and F of a chunk."""
    like: tl.constexpr = go.dtype.element_ty
    chunks = tl.cdiv(t, C)
    m, c = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    at, left = place(m, c, t, h, C)
    i = tl.arange(0, C)
    read_out, corrected = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    for first in range(0, V, BV):
        col = first + tl.arange(0, BV)
        N = tl.trans(read(errors + at * V, i, h * V, left, col, V))
        read_out += fine(read(go + at * V, i, h * V, left, col, V), N, like)
        corrected += fine(read(gn + at * V, i, h * V, left, col, V), N, like)
    _, _, _, high, low = decay(log_alpha, at, i, h, left, C)
    D = between(high, low, i)
    here = tl.program_id(0).to(tl.int64) * C * C
    write(E + here, i, C, C, i, C, read_out * D * scale)
    write(F + here, i, C, C, i, C, tl.where(i[:, None] > i[None, :], corrected * D, 0.0))


@triton.jit
def gradients(
    q, k, beta, log_alpha, lam, go, errors, marks, gn, gmarks, E, F, gq, gk, gbeta, glam, reads, scale, t, h,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """All else that takes products, for one block of keys."""
    like: tl.constexpr = go.dtype.element_ty
    chunks = tl.cdiv(t, C)
    m, c = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    at, left = place(m, c, t, h, C)
    i, row = tl.arange(0, C), tl.program_id(1) * BK + tl.arange(0, BK)
    mark = (m.to(tl.int64) * chunks + c) * K * V
    gQ, gX, Y = tl.zeros((C, BK), tl.float32), tl.zeros((C, BK), tl.float32), tl.zeros((C, BK), tl.float32)
    for first in range(0, V, BV):
        col = first + tl.arange(0, BV)
        H = tl.trans(read(marks + mark + m.to(tl.int64) * K * V, row, V, K, col, V))
        gQ += product(read(go + at * V, i, h * V, left, col, V), H, like)
        gX += product(read(gn + at * V, i, h * V, left, col, V), H, like)
        gH = tl.trans(read(gmarks + mark, row, V, K, col, V))
        Y += fine(read(errors + at * V, i, h * V, left, col, V), gH, like)
    grown, rest, _, _, _ = decay(log_alpha, at, i, h, left, C)
    gQ *= (scale * grown)[:, None]
    gX *= -grown[:, None]
    Y *= rest[:, None]
    here = tl.program_id(0).to(tl.int64) * C * C
    for first in range(0, tl.minimum(left, C), BC):
        j = first + tl.arange(0, BC)
        key = read(k + at * K, j, h * K, left, row, K).to(tl.float32)
        query = read(q + at * K, j, h * K, left, row, K).to(tl.float32)
        Y += fine(tl.trans(read(E + here, j, C, C, i, C)), query, like)
        x = key
        if lam is not None:
            x += gate(lam, at, j, h, left)[:, None] * query
        Y -= fine(tl.trans(read(F + here, j, C, C, i, C)), x, like)
        key *= gate(beta, at, j, h, left)[:, None]
        gQ += fine(read(E + here, i, C, C, j, C), key, like)
        gX -= fine(read(F + here, i, C, C, j, C), key, like)
    part = tl.program_id(1) * (tl.num_programs(0) // chunks).to(tl.int64) * t + at
    query = read(q + at * K, i, h * K, left, row, K)
    if log_alpha is not None:
        tl.store(reads + part + i * h, tl.sum(gQ * query, 1), mask=i < left)
    if lam is not None:
        tl.store(glam + part + i * h, tl.sum(gX * query, 1), mask=i < left)
        gQ += gate(lam, at, i, h, left)[:, None] * gX
    write(gq + at * K, i, h * K, left, row, K, gQ)
    key = read(k + at * K, i, h * K, left, row, K)
    tl.store(gbeta + part + i * h, tl.sum(key * Y, 1), mask=i < left)
    write(gk + at * K, i, h * K, left, row, K, Y * gate(beta, at, i, h, left)[:, None] + gX)


@triton.jit
def decay_backward(
    v, gn, reads, ends, galpha, t, h,
    V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr,
):  # fmt: skip
    r"""The symmetry of decays, with \bar o_i \cdot o_i as q_i times its gradient by that, summed from the chunk's end.

    `reads` has a part for each block of keys, and `ends` for each of values.
    """
    chunks = tl.cdiv(t, C)
    m, c = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    at, left = place(m, c, t, h, C)
    i = tl.arange(0, C)
    each = tl.zeros((C,), tl.float32)
    for part in tl.static_range(NK):
        each += gate(reads + part * (tl.num_programs(0) // chunks).to(tl.int64) * t, at, i, h, left)
    for first in range(0, V, BV):
        col = first + tl.arange(0, BV)
        value = read(v + at * V, i, h * V, left, col, V)
        each -= tl.sum(value * read(gn + at * V, i, h * V, left, col, V), 1)
    end = 0.0
    for part in tl.static_range(NV):
        end += tl.load(ends + part * tl.num_programs(0).to(tl.int64) + tl.program_id(0))
    each += tl.where(i == C - 1, end, 0.0)
    tl.store(galpha + at + i * h, tl.cumsum(each, 0, reverse=True), mask=i < left)
