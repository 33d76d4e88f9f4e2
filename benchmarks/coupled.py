"""The cost of a coupling in training, memory and decoding: a block with it against the same block without it.

    python benchmarks/coupling.py [--quick] [--json FILE]

The block is that of size 60m: width 512, 8 heads, feed-forward width 2112; 8 sequences of 512 tokens, fp32, AdamW. A
ratio is the cost with the coupling divided by the cost without: 1.05 is 5% more. "plain" is the same coupling in
PyTorch operations (`qkflow.ops.symplectic.naive`), without folded drift, fused kicks and reversible backward.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from qkflow import Decoder, mechanism, size
from qkflow.mechanisms import coupling
from qkflow.models import Block
from qkflow.ops.symplectic.naive import drift_kick

from timing import parse_arguments, quartiles, relative_spread, time_alternately

BATCH, CONTEXT = 8, 512
SEVEN_STEPS = "standard+hamiltonian:steps=7"
LEAPFROG = "standard+hamiltonian:integrator=leapfrog"
OTHERS = ("standard+euler", "standard+uncoupled", "standard+residual-query", "standard+affine")


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    quantity: str
    arm: str
    ratio: float
    quartiles: tuple[float, float]
    control: float | None
    """Relative spread of the time of a matrix product; None if no time was measured."""


def make_block(spec: str) -> Block:
    shape = size("60m")
    torch.manual_seed(0)
    return Block(mechanism(spec)(shape.width, shape.heads, 0, shape.layers), shape.width, shape.hidden)


def training_step(layer: nn.Module, parameters: Sequence[Tensor], x: Tensor) -> Callable[[], None]:
    """Return a training step of one block: forward, backward to the parameters and the input, AdamW."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def step() -> None:
        inputs = x.detach().requires_grad_()
        layer(inputs)[0].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def with_plain_operations(step: Callable[[], None]) -> Callable[[], None]:
    """Return the step with the coupling in PyTorch operations."""

    def integrate(
        q: Tensor, k: Tensor, force: Any, dt: Tensor, coefficients: tuple[float, ...]
    ) -> tuple[Tensor, Tensor]:
        return drift_kick(q, k, force, dt, coefficients)

    def plain_step() -> None:
        no_folding = mock.patch.object(coupling.DriftKick, "foldable_drift", return_value=None)
        with mock.patch.object(coupling, "integrate", integrate), no_folding:
            step()

    return plain_step


def ratios(quantity: str, times: dict[str, list[float]]) -> list[Row]:
    """Divide the times of each arm by those of the first one."""
    control = relative_spread(times.pop("control"))
    baseline, *arms = times
    table = []
    for arm in arms:
        low, ratio, high = quartiles([a / b for a, b in zip(times[arm], times[baseline], strict=True)])
        table.append(Row(quantity, arm, ratio, (low, high), control))
    return table


def speed(specs: Sequence[str], rounds: int, *, compiled: bool) -> list[Row]:
    x = torch.randn(BATCH, CONTEXT, 512)
    functions: dict[str, Callable[[], None]] = {}
    for spec in ("standard", *specs):
        layer = make_block(spec)
        module = torch.compile(layer) if compiled else layer
        functions[spec] = training_step(module, list(layer.parameters()), x)
        if spec == "coupled" and not compiled:
            functions["coupled, plain"] = with_plain_operations(training_step(layer, list(layer.parameters()), x))
    times = time_alternately(functions, rounds=rounds, warmup=2)
    return ratios("training, compiled" if compiled else "training, eager", times)


def memory(specs: Sequence[str]) -> list[Row]:
    """Compare the peak of allocated memory in a step, with parameters, gradients and optimizer state."""
    x = torch.randn(BATCH, CONTEXT, 512)
    peaks: dict[str, float] = {}
    for spec in ("standard", *specs):
        layer = make_block(spec)
        step = training_step(layer, list(layer.parameters()), x)
        step()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
            step()
        allocated, peak = 0, 0
        for event in trace.profiler.kineto_results.events():  # pyright: ignore
            if event.name() == "[memory]":
                allocated += event.nbytes()
                peak = max(peak, allocated)
        peaks[spec] = peak + 3 * 4 * sum(p.numel() for p in layer.parameters())
    baseline = peaks["standard"]
    return [Row("peak memory", spec, peaks[spec] / baseline, (peaks[spec] / baseline,) * 2, None) for spec in specs]


def decoding(specs: Sequence[str], rounds: int) -> list[Row]:
    """Compare single-token steps after 512 tokens, in eight such blocks with a small vocabulary."""
    functions: dict[str, Callable[[], None]] = {}
    for spec in ("standard", *specs):
        torch.manual_seed(0)
        model = Decoder(size("60m", vocabulary=257, mechanism=spec)).eval()
        prompt = torch.randint(0, 256, (1, CONTEXT))
        with torch.inference_mode():
            _, state = model(prompt)
            _, state = model(prompt[:, :1], state)  # doubles the buffers
        functions[spec] = decode_tokens(model, prompt[:, :1], state)
    return ratios("decoding", time_alternately(functions, rounds=rounds, warmup=2))


def decode_tokens(model: Decoder, token: Tensor, state: Any, tokens: int = 8) -> Callable[[], None]:
    def decode() -> None:
        current = state
        with torch.inference_mode():
            for _ in range(tokens):
                _, current = model(token, current)

    return decode


if __name__ == "__main__":
    args = parse_arguments(__doc__ or "")
    rounds = 5 if args.quick else 21
    table = speed(("coupled", SEVEN_STEPS, LEAPFROG, *(() if args.quick else OTHERS)), rounds, compiled=False)
    table += memory(("coupled", SEVEN_STEPS, LEAPFROG, *OTHERS))
    table += decoding(("coupled", SEVEN_STEPS, *(() if args.quick else OTHERS)), 3 * rounds)
    table += speed(("coupled", SEVEN_STEPS), rounds, compiled=True)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print(f"{'':18}  {'':40}  ratio  (quartiles)      control")
    for row in table:
        spread = f"({row.quartiles[0]:.3f} to {row.quartiles[1]:.3f})"
        control = "" if row.control is None else f"±{row.control:.0%}"
        print(f"{row.quantity:18}  {row.arm:40}  {row.ratio:5.3f}  {spread:<17}{control}")
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in table], indent=2) + "\n")
