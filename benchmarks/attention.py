"""Time softmax attention on a CPU: the C kernel against torch's fused attention and matmul peak, and its growth.

    python benchmarks/attention.py [--quick] [--json FILE] [--threads N]

One thread by default. Causal, 8 heads, 4,096 tokens per call. The share of peak is the rate of the FLOPs of visible
pairs (2 matrix products forward, 7 with backward) divided by that of a matrix product of 512 x 512 in the same round.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from qkflow.ops.attention import attention

import memory
from steps import PASSES, Function, forward, forward_backward
from tables import Row
from timing import compare, compare_memory, main, share_of_peak, time_alternately

TOKENS, HEADS = 4096, 8
PEAK = 512
"""Size of the matrix product whose speed is the peak."""
N_PRODUCTS = {"forward": 2, "forward and backward": 7}
CALLS = 20
"""Calls per round in decoding."""


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, causal=True, backend="cpu")


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1).transpose(1, 2)


def make_inputs(batch: int, length: int, width: int, *, heads: int = HEADS, queries: int | None = None) -> list[Tensor]:
    lengths = (length if queries is None else queries, length, length)
    return [torch.randn(batch, t, heads, width).requires_grad_() for t in lengths]


def against_torch(width: int, length: int, rounds: int) -> list[Row]:
    """How many times as fast as torch, and the share of the speed of a matrix product."""
    batch = max(1, TOKENS // length)
    inputs, a = make_inputs(batch, length, width), torch.randn(PEAK, PEAK)
    work, speeds, shares = f"width {width}, length {length:,}", [], []
    for name, make_pass in PASSES.items():
        functions = {rule.__name__: make_pass(partial(rule, *inputs), inputs) for rule in (ours, fused)}
        times = time_alternately({**functions, "matmul": lambda: a @ a}, rounds=rounds)
        target = 2.0 if width == 32 and length <= 1024 and name != "forward" else 1.0
        speeds.append(compare("attention", work, name, "speed", times, "ours", "fused", at_least=target))
        flops = 2 * N_PRODUCTS[name] * batch * HEADS * length * (length + 1) / 2 * width
        peaks = [2 * PEAK**3 / seconds for seconds in times["matmul"]]
        shares.append(share_of_peak("attention", work, f"share of peak, {name}", times, "ours", flops, peaks))
    return [*speeds, *shares]


def decoding(width: int, length: int, rounds: int) -> Row:
    """One query."""
    inputs = make_inputs(1, length, width, queries=1)

    def repeat(function: Function) -> Function:
        return lambda: [function() for _ in range(CALLS)]

    functions = {rule.__name__: repeat(forward(partial(rule, *inputs), inputs)) for rule in (ours, fused)}
    times = time_alternately(functions, rounds=rounds)
    work = f"width {width}, {length:,} keys"
    return compare(
        "attention-decoding",
        work,
        "PyTorch's fused attention",
        "speed",
        times,
        "ours",
        "fused",
        calls=CALLS,
        at_least=1.0,
    )


def both_passes(length: int, heads: int = 1) -> Function:
    inputs = make_inputs(1, length, 32, heads=heads)
    return forward_backward(partial(ours, *inputs), inputs)


def growth(rounds: int) -> list[Row]:
    """Time and memory of a sequence four times as long."""
    times = time_alternately({str(t): both_passes(t, HEADS) for t in (1024, 4096)}, rounds=rounds)
    work, against = "time of causal attention, forward and backward", "4,096 and 1,024 tokens"
    table = [compare("growth", work, against, "time", times, "4096", "1024", at_most=17)]
    if memory.IS_SUPPORTED:
        short, long = memory.peak_megabytes(both_passes, 64, (8_192, 32_768))
        work, against = "memory of causal attention, forward and backward", "32,768 and 8,192 tokens"
        table.append(compare_memory("growth", work, against, long, short, at_most=4.4))
    return table


def measure(quick: bool) -> list[Row]:
    table = []
    for width in (32, 64):
        for length in (256, 1024, 4096):
            table += against_torch(width, length, 3 if quick else 15)
    for width in (32, 64):
        table += [decoding(width, length, 15 if quick else 60) for length in (512, 8192)]
    return table + growth(2 if quick else 7)


if __name__ == "__main__":
    main(__doc__, measure, threads=1)
