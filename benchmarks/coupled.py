"""Measure the cost of a coupling in training and memory: a block with it against the same block without it.

    python benchmarks/coupled.py [--quick] [--json FILE]

The block is that of size 60m: width 512, 8 heads, feed-forward width 2112; 8 sequences of 512 tokens, fp32, AdamW. A
ratio is the cost with the coupling divided by the cost without: 1.05 is 5% more. "PyTorch operations" is the same
coupling without folded drift, fused kicks and reversible backward (`qkflow.ops.symplectic.naive`). Decoding is measured
by `generate.py`.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from qkflow import mechanism, size
from qkflow.mechanisms import coupling
from qkflow.models import Block
from qkflow.ops.symplectic.naive import drift_kick

from steps import Function, training_step
from tables import Row
from timing import compare, compare_memory, main, time_alternately

BATCH, CONTEXT = 8, 512
COUPLINGS = {"one step (`coupled`)": "coupled", "seven steps": "standard+hamiltonian:steps=7"}
IN_TORCH = "one step in PyTorch operations"


def make_block(spec: str) -> Block:
    shape = size("60m")
    torch.manual_seed(0)
    return Block(mechanism(spec)(shape.width, shape.heads, 0, shape.layers), shape.width, shape.hidden)


def block_step(block: nn.Module) -> Function:
    """Return a training step of one block, with gradients of the input."""
    x = torch.randn(BATCH, CONTEXT, 512, requires_grad=True)
    return training_step(block, lambda: block(x)[0].square().mean())


def with_torch_operations(step: Function) -> Function:
    """Return the step with the coupling in PyTorch operations."""

    def integrate(
        q: Tensor, k: Tensor, force: Any, dt: Tensor, coefficients: tuple[float, ...]
    ) -> tuple[Tensor, Tensor]:
        return drift_kick(q, k, force, dt, coefficients)

    def run() -> None:
        no_folding = mock.patch.object(coupling.DriftKick, "foldable_drift", return_value=None)
        with mock.patch.object(coupling, "integrate", integrate), no_folding:
            step()

    return run


def training(rounds: int, *, compiled: bool) -> list[Row]:
    blocks = {spec: make_block(spec) for spec in ("standard", *COUPLINGS.values())}
    functions = {spec: block_step(torch.compile(block) if compiled else block) for spec, block in blocks.items()}
    columns = dict(COUPLINGS)
    if not compiled:
        functions["torch"], columns[IN_TORCH] = with_torch_operations(block_step(blocks["coupled"])), "torch"
    times = time_alternately(functions, rounds=rounds)
    work, amount = f"training, {'compiled' if compiled else 'eager'}", BATCH * CONTEXT
    table = []
    for column, spec in columns.items():
        target = 1.03 if spec == "coupled" and not compiled else None
        table.append(compare("coupling", work, column, "time", times, spec, "standard", tokens=amount, at_most=target))
    return table


def peak_memory() -> list[Row]:
    """Compare the peak of allocated memory in a step, with parameters, gradients and optimizer state."""
    peaks: dict[str, float] = {}
    for spec in ("standard", *COUPLINGS.values()):
        block = make_block(spec)
        step = block_step(block)
        step()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
            step()
        allocated, peak = 0, 0
        for event in trace.profiler.kineto_results.events():  # pyright: ignore
            if event.name() == "[memory]":
                allocated += event.nbytes()
                peak = max(peak, allocated)
        peaks[spec] = (peak + 3 * 4 * sum(p.numel() for p in block.parameters())) / 1e6
    return [
        compare_memory("coupling", "peak memory", column, peaks[spec], peaks["standard"])
        for column, spec in COUPLINGS.items()
    ]


def measure(quick: bool) -> list[Row]:
    rounds = 3 if quick else 21
    return [*training(rounds, compiled=False), *training(rounds, compiled=True), *peak_memory()]


if __name__ == "__main__":
    main(__doc__, measure)
