"""What a coupling costs: a block with it against the same block without, in training, memory and decoding.

    python benchmarks/coupled.py [--quick] [--json FILE]

The block is that of size 60m: width 512, 8 heads, feed-forward 2112; 8 windows of 512 tokens, fp32, AdamW. A ratio is
how many times the block without coupling takes: 1.05 is 5 % more. "plain" is the same motion written in ordinary
operations (`qkflow.ops.symplectic.naive`), without folded drift, fused kicks or a backward that walks back.
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
from qkflow.mechanisms import coupled
from qkflow.models import Block
from qkflow.ops.symplectic.naive import drift_kick

from side_by_side import arguments, quartiles, race

BATCH, CONTEXT = 8, 512
SEVEN = "standard+hamiltonian:steps=7"
LEAPFROG = "standard+hamiltonian:integrator=leapfrog"
OTHERS = ("standard+euler", "standard+uncoupled", "standard+nonlinear-query", "standard+affine")


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    what: str
    arm: str
    ratio: float
    quartiles: tuple[float, float]
    control: float | None
    """Quartile distance of a matmul's time over its median; None where nothing was timed."""


def block(spec: str) -> Block:
    shape = size("60m")
    torch.manual_seed(0)
    return Block(mechanism(spec)(shape.width, shape.heads, 0, shape.layers), shape.width, shape.hidden)


def training(layer: nn.Module, parameters: Sequence[Tensor], x: Tensor) -> Callable[[], None]:
    """A whole step of one block: forward, backward to the parameters and to the input, AdamW."""
    optimiser = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def step() -> None:
        given = x.detach().requires_grad_()
        layer(given)[0].square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def plain(step: Callable[[], None]) -> Callable[[], None]:
    """The step with the coupling in ordinary operations."""

    def ordinary(q: Tensor, k: Tensor, force: Any, dt: Tensor, parts: tuple[float, ...]) -> tuple[Tensor, Tensor]:
        return drift_kick(q, k, force, dt, parts)

    def slow() -> None:
        unfolded = mock.patch.object(coupled.DriftKick, "foldable_drift", return_value=None)
        with mock.patch.object(coupled, "integrate", ordinary), unfolded:
            step()

    return slow


def lines(what: str, times: dict[str, list[float]]) -> list[Line]:
    low, middle, high = quartiles(times.pop("control"))
    base, *others = times
    found = []
    for arm in others:
        first, ratio, third = quartiles([a / b for a, b in zip(times[arm], times[base], strict=True)])
        found.append(Line(what, arm, ratio, (first, third), (high - low) / middle))
    return found


def speed(specs: Sequence[str], rounds: int, *, compiled: bool) -> list[Line]:
    x = torch.randn(BATCH, CONTEXT, 512)
    work: dict[str, Callable[[], None]] = {}
    for spec in ("standard", *specs):
        layer = block(spec)
        run = torch.compile(layer) if compiled else layer
        work[spec] = training(run, list(layer.parameters()), x)
        if spec == "coupled" and not compiled:
            work["coupled, plain"] = plain(training(layer, list(layer.parameters()), x))
    return lines("training, compiled" if compiled else "training, eager", race(work, rounds=rounds, warm=2))


def memory(specs: Sequence[str]) -> list[Line]:
    """Peak of what is allocated in a step, with parameters, gradients and AdamW's state."""
    x = torch.randn(BATCH, CONTEXT, 512)
    peaks: dict[str, float] = {}
    for spec in ("standard", *specs):
        layer = block(spec)
        step = training(layer, list(layer.parameters()), x)
        step()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            step()
        now, peak = 0, 0
        for event in seen.profiler.kineto_results.events():  # pyright: ignore
            if event.name() == "[memory]":
                now += event.nbytes()
                peak = max(peak, now)
        peaks[spec] = peak + 3 * 4 * sum(p.numel() for p in layer.parameters())
    base = peaks["standard"]
    return [Line("peak memory", spec, peaks[spec] / base, (peaks[spec] / base,) * 2, None) for spec in specs]


def decoding(specs: Sequence[str], rounds: int) -> list[Line]:
    """A token at a time behind 512 others, through eight such blocks; the head is small, so that it hides nothing."""
    work: dict[str, Callable[[], None]] = {}
    for spec in ("standard", *specs):
        torch.manual_seed(0)
        model = Decoder(size("60m", vocabulary=257, mechanism=spec)).eval()
        prompt = torch.randint(0, 256, (1, CONTEXT))
        with torch.inference_mode():
            _, state = model(prompt)
            _, state = model(prompt[:, :1], state)  # which makes room for as many tokens again
        work[spec] = decode(model, prompt[:, :1], state)
    return lines("decoding", race(work, rounds=rounds, warm=2))


def decode(model: Decoder, token: Tensor, state: Any, tokens: int = 8) -> Callable[[], None]:
    def do() -> None:
        now = state
        with torch.inference_mode():
            for _ in range(tokens):
                _, now = model(token, now)

    return do


if __name__ == "__main__":
    args = arguments(__doc__ or "")
    rounds = 5 if args.quick else 21
    table = speed(("coupled", SEVEN, LEAPFROG, *(() if args.quick else OTHERS)), rounds, compiled=False)
    table += memory(("coupled", SEVEN, LEAPFROG, *OTHERS))
    table += decoding(("coupled", SEVEN, *(() if args.quick else OTHERS)), 3 * rounds)
    table += speed(("coupled", SEVEN), rounds, compiled=True)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print(f"{'':18}  {'':40}  ratio  (quartiles)      control")
    for line in table:
        spread = f"({line.quartiles[0]:.3f} to {line.quartiles[1]:.3f})"
        control = "" if line.control is None else f"±{line.control:.0%}"
        print(f"{line.what:18}  {line.arm:40}  {line.ratio:5.3f}  {spread:<17}{control}")
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(line) for line in table], indent=2) + "\n")
