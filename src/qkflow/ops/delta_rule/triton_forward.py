r"""The delta rule forward in Triton: three kernels over chunks, and one for a few tokens. `chunked.py` has the algebra.

| kernel    | a program is for              | gives                                                             |
|-----------|-------------------------------|-------------------------------------------------------------------|
| `inside`  | a chunk                       | T = (I + M diag(\beta))^{-1}, then T diag(e^G) X and T V           |
| `states`  | a row, head, block of values  | N and H, from chunk to chunk, with H in registers                  |
| `outputs` | a chunk, block of values      | O                                                                  |
| `few`     | a row, head, block of values  | the recurrence itself, token by token                              |

Tensors lie as [n t h ...], memories between chunks as [n h chunk k v]; `K`, `V` are widths, `B..` those of blocks.
"""

# Triton's language is checked by its own compiler
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# ruff: noqa: RUF005, SIM108 - Triton is not the whole of Python
from __future__ import annotations

import triton
import triton.language as tl

from qkflow.ops.delta_rule.triton_parts import (
    between,
    cast,
    decay,
    fine,
    gate,
    inverse,
    product,
    read,
    turn,
    turned,
    write,
)


@triton.jit
def place(m, c, t, h, C: tl.constexpr):
    """Where chunk c of row and head m begins, in tokens and heads, and how many tokens are left from there."""
    row, head = m // h, m % h
    return (row.to(tl.int64) * t + c * C) * h + head, t - c * C


@triton.jit
def inside(
    q, k, v, beta, log_alpha, lam, by, ahead, t, h,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """What every chunk can do without the memory before it."""
    like: tl.constexpr = v.dtype.element_ty
    chunks = tl.cdiv(t, C)
    m, c = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    at, left = place(m, c, t, h, C)
    i = tl.arange(0, C)
    grown, _, _, high, low = decay(log_alpha, at, i, h, left, C)
    mix = gate(lam, at, i, h, left)
    M = tl.zeros((C, C), tl.float32)
    P = tl.zeros((C, C), tl.float32)
    for first in range(0, K, BK):
        col = first + tl.arange(0, BK)
        key = read(k + at * K, i, h * K, left, col, K)
        M += product(key, tl.trans(key), like)
        if lam is not None:
            P += product(read(q + at * K, i, h * K, left, col, K), tl.trans(key), like)
    if lam is not None:  # apart: their sum would have to be rounded before it could be multiplied
        M += mix[:, None] * P
    T = inverse(M * between(high, low, i) * gate(beta, at, i, h, left)[None, :], left, C)
    faded = T * grown[None, :]
    for first in range(0, K, BK):
        col = first + tl.arange(0, BK)
        x = read(k + at * K, i, h * K, left, col, K).to(tl.float32)
        if lam is not None:
            x += mix[:, None] * read(q + at * K, i, h * K, left, col, K)
        write(by + at * K, i, h * K, left, col, K, fine(faded, x, like))
    for first in range(0, V, BV):
        col = first + tl.arange(0, BV)
        value = read(v + at * V, i, h * V, left, col, V)
        write(ahead + at * V, i, h * V, left, col, V, fine(T, value, like))


@triton.jit
def states(
    k, beta, log_alpha, state, by, errors, marks, final, t, h,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The memory from chunk to chunk; `errors` holds T V before, and N after."""
    like: tl.constexpr = by.dtype.element_ty
    blocks: tl.constexpr = (K + BK - 1) // BK
    chunks, m = tl.cdiv(t, C), tl.program_id(0)
    i, row, col = tl.arange(0, C), tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    memory = m.to(tl.int64) * K * V
    H = ()
    for j in tl.static_range(blocks):
        if state is None:
            H = H + (tl.zeros((BK, BV), tl.float32),)
        else:
            H = H + (turned(state + memory, j * BK + row, K, col, V),)
    for c in range(chunks):
        at, left = place(m, c, t, h, C)
        mark = marks + (m.to(tl.int64) * (chunks + 1) + c) * K * V
        found = tl.zeros((C, BV), tl.float32)
        for j in tl.static_range(blocks):
            write(mark, j * BK + row, V, K, col, V, H[j])
            found += product(read(by + at * K, i, h * K, left, j * BK + row, K), H[j], like)
        N = read(errors + at * V, i, h * V, left, col, V) - found
        write(errors + at * V, i, h * V, left, col, V, N)
        _, rest, last, _, _ = decay(log_alpha, at, i, h, left, C)
        U = N * (gate(beta, at, i, h, left) * rest)[:, None]
        after = ()
        for j in tl.static_range(blocks):
            key = read(k + at * K, i, h * K, left, j * BK + row, K)
            after = after + (H[j] * last + fine(tl.trans(key), U, like),)
        H = after
    mark = marks + (m.to(tl.int64) * (chunks + 1) + chunks) * K * V
    for j in tl.static_range(blocks):
        write(mark, j * BK + row, V, K, col, V, H[j])
        turn(final + memory, j * BK + row, K, col, V, H[j])


@triton.jit
def outputs(
    q, k, beta, log_alpha, errors, marks, o, scale, t, h,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """What every chunk reads: of the memory before it, and of what it writes itself."""
    like: tl.constexpr = o.dtype.element_ty
    chunks = tl.cdiv(t, C)
    m, c = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    at, left = place(m, c, t, h, C)
    i, col = tl.arange(0, C), tl.program_id(1) * BV + tl.arange(0, BV)
    mark = marks + (m.to(tl.int64) * (chunks + 1) + c) * K * V
    P, past = tl.zeros((C, C), tl.float32), tl.zeros((C, BV), tl.float32)
    for first in range(0, K, BK):
        row = first + tl.arange(0, BK)
        query = read(q + at * K, i, h * K, left, row, K)
        P += product(query, tl.trans(read(k + at * K, i, h * K, left, row, K)), like)
        past += product(query, read(mark, row, V, K, col, V), like)
    grown, _, _, high, low = decay(log_alpha, at, i, h, left, C)
    P *= between(high, low, i) * gate(beta, at, i, h, left)[None, :]
    N = read(errors + at * V, i, h * V, left, col, V)
    write(o + at * V, i, h * V, left, col, V, scale * (past * grown[:, None] + fine(P, N, like)))


@triton.jit
def few(
    q, k, v, beta, log_alpha, lam, state, o, final, scale, t, h,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """A few tokens, one by one, from a memory in registers; `BK` is as wide as the keys."""
    m = tl.program_id(0)
    row, col = tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    memory = m.to(tl.int64) * K * V
    if state is None:
        S = tl.zeros((BV, BK), tl.float32)
    else:
        S = read(state + memory, col, K, V, row, K)
    for i in range(t):
        at, _ = place(m, i, t, h, 1)
        query = tl.load(q + at * K + row, mask=row < K, other=0.0).to(tl.float32)
        key = tl.load(k + at * K + row, mask=row < K, other=0.0).to(tl.float32)
        value = tl.load(v + at * V + col, mask=col < V, other=0.0).to(tl.float32)
        x = key
        if lam is not None:
            x += tl.load(lam + at) * query
        if log_alpha is not None:
            S *= tl.exp(tl.load(log_alpha + at))
        error = value - tl.sum(S * x[None, :], 1)
        S += (tl.load(beta + at) * error)[:, None] * key[None, :]
        read_out = scale * tl.sum(S * query[None, :], 1)
        tl.store(o + at * V + col, cast(read_out, o.dtype.element_ty), mask=col < V)
    write(final + memory, col, K, V, row, K, S)
