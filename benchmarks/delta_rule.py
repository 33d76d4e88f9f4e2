"""Time the delta rule on a CPU against HF transformers, fused softmax attention and the peak of matrix products.

    python benchmarks/delta_rule.py [--quick] [--json FILE] [--threads N]

float32, heads of width 64, two threads by default. The peer of transformers is `torch_chunk_gated_delta_rule`, which
erases along the key, so ours does in that comparison; elsewhere ours has the erase direction of Q-Delta. The chunked
form of fla needs a GPU: `delta_rule_gpu.py`.

The share of peak is the rate of the declared FLOPs (chunks of 64) divided by the rate of the faster of two matrix
products (1,024 and 2,048) in the same round.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from qkflow.ops.delta_rule import delta_rule

import memory
from peers import hf_gated_delta_rule
from steps import PASSES, Function, forward_backward
from tables import Row
from timing import compare, compare_memory, main, share_of_peak, time_alternately

WIDTH = 64


class Shape(NamedTuple):
    batch: int
    length: int
    heads: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.length:,} tokens, {self.heads} heads"


WIDE, LONG = Shape(4, 1024, 8), Shape(1, 8192, 4)


def delta(*inputs: Tensor, backend: str | None = None) -> Tensor:
    return delta_rule(*inputs, backend=backend)[0]  # pyright: ignore[reportArgumentType]: five or six tensors


def hf(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_alpha: Tensor) -> Tensor:
    return hf_gated_delta_rule()(q, k, v, log_alpha, beta)[0]


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


RULES: dict[str, Callable[..., Tensor]] = {"C": delta, "PyTorch": partial(delta, backend="chunked"), "HF": hf}


def make_inputs(shape: Shape, *, erase: bool = False) -> list[Tensor]:
    """Return q, k, v, beta, log_alpha and optionally erase, distributed as in a mechanism."""
    torch.manual_seed(0)
    b, t, h = shape
    q, k = (F.normalize(torch.randn(b, t, h, WIDTH), dim=-1) for _ in range(2))
    v, beta, log_alpha = torch.randn(b, t, h, WIDTH), torch.rand(b, t, h), -0.1 * torch.rand(b, t, h)
    inputs = [q, k, v, beta, log_alpha, *([k + torch.rand(b, t, h, 1) * q] if erase else [])]
    return [x.requires_grad_() for x in inputs]


def check_equal(shape: Shape) -> None:
    """Check that ours and HF's have the same outputs and gradients."""
    inputs = make_inputs(shape)
    weight = torch.randn(inputs[2].shape)
    outputs = [rule(*inputs) for rule in (delta, hf)]
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(*(torch.autograd.grad(o, inputs, weight) for o in outputs), rtol=1e-3, atol=1e-3)


def against_hf(shape: Shape, passes: dict[str, tuple[float, float | None]], rounds: int) -> list[Row]:
    """Compare with HF, alternating with matrix products; the targets of a pass are a speed and a share of peak."""
    squares = {n: (torch.randn(n, n), torch.empty(n, n)) for n in (1024, 2048)}
    table: list[Row] = []
    for name, (target, share_target) in passes.items():
        inputs = make_inputs(shape)
        functions = {rule: PASSES[name](partial(RULES[rule], *inputs), inputs) for rule in RULES}
        products = {str(n): partial(torch.mm, x, x, out=y) for n, (x, y) in squares.items()}
        times = time_alternately({**functions, **products}, rounds=rounds, warmup=1)
        work = f"{name}, {shape}"
        table.append(compare("delta-rule", work, "transformers", "speed", times, "C", "HF", at_least=target))
        if share_target is not None:
            seconds = zip(times["1024"], times["2048"], strict=True)
            peaks = [max(2 * 1024**3 / a, 2 * 2048**3 / b) for a, b in seconds]
            flops = count_flops(functions["C"])
            table.append(
                share_of_peak("delta-rule", work, "matmul peak", times, "C", flops, peaks, at_least=share_target)
            )
        work = f"{name}, PyTorch operations, {shape}"
        table.append(compare("delta-rule", work, "transformers", "speed", times, "PyTorch", "HF"))
    return table


def count_flops(function: Function) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def both_passes(case: tuple[str, Shape]) -> Function:
    name, shape = case
    inputs = make_inputs(shape)
    return forward_backward(partial(RULES[name], *inputs), inputs)


def memory_against_hf(shape: Shape) -> list[Row]:
    """Compare the peak memory of forward and backward above the inputs."""
    if not memory.IS_SUPPORTED:
        return []
    peaks = {
        name: memory.peak_megabytes(both_passes, (name, shape._replace(length=64)), [(name, shape)])[0]
        for name in ("C", "HF")
    }
    work = f"memory, forward and backward, {shape}"
    return [compare_memory("delta-rule", work, "transformers", peaks["C"], peaks["HF"], at_most=0.2)]


def against_softmax(length: int, rounds: int) -> Row:
    """Compare with fused softmax attention: the same tokens and heads; its inputs are contiguous in its own layout."""
    shape = Shape(4096 // length, length, 8)
    inputs = make_inputs(shape, erase=True)
    qkv = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in inputs[:3]]
    functions = {
        "ours": forward_backward(partial(delta, *inputs), inputs),
        "softmax": forward_backward(partial(softmax, *qkv), qkv),
    }
    times = time_alternately(functions, rounds=rounds)
    return compare(
        "delta-rule",
        f"forward and backward, {shape}",
        "PyTorch's fused softmax attention",
        "speed",
        times,
        "ours",
        "softmax",
        at_least=1.0,
    )


def growth(rounds: int) -> Row:
    """Compare two lengths, the second four times the first."""
    functions = {}
    for length in (8192, 32768):
        inputs = make_inputs(LONG._replace(length=length), erase=True)
        functions[str(length)] = forward_backward(partial(delta, *inputs), inputs)
    times = time_alternately(functions, rounds=rounds, warmup=1)
    work, against = "time of the delta rule, forward and backward", "32,768 and 8,192 tokens"
    return compare("growth", work, against, "time", times, "32768", "8192", at_most=4.2)


def measure(quick: bool) -> list[Row]:
    check_equal(WIDE)
    table = against_hf(WIDE, {"forward": (8, 0.60), "forward and backward": (8, 0.50)}, 3 if quick else 15)
    table += against_hf(LONG, {"forward and backward": (15, None)}, 1 if quick else 5)
    table += memory_against_hf(WIDE)
    table += [against_softmax(length, 3 if quick else 15) for length in (512, 1024, 4096)]
    return [*table, growth(2 if quick else 7)]


if __name__ == "__main__":
    main(__doc__, measure)
