"""Measure the cost of Kuramoto attention: training steps, the attention core, memory by length, and decoding.

    python benchmarks/kuramoto.py [--quick] [--json FILE] [--threads N]

float32, two threads by default. A value is our time divided by the peer's, so 1.1 is 10% more: the median over rounds,
with quartiles.

- Training: a step with clipping and AdamW, with the learning rates of a phase stream, of models with as many parameters
  as the standard one.
- The core is the mechanism without its query map: angles to points, drift, delay, fused attention, tangent, step. The
  peer is torch's fused causal attention alone, with queries, keys and values of the width of the points (twice the
  width of a head), contiguous in its own layout. Backward goes to the angles and the parameters, for the peer to
  queries, keys and values. "with queries" adds the map that gates and shifts the queries. It is one matrix product;
  softmax attention has four, and the peer has none.
- Memory is the peak of forward and backward of one layer in a fresh process, above the memory with the inputs loaded.
  The allocator returns freed memory immediately. The target is to double with the length, and to stay below one matrix
  of length x length.
- Decoding: single-token steps after 512 tokens and those of the previous rounds.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkflow import Decoder, KuramotoConfig, mechanism, size
from qkflow.data import CorpusConfig
from qkflow.mechanisms.kuramoto import SynchronyMechanism
from qkflow.models import DecoderState, matched, parameters
from qkflow.training import TrainConfig
from qkflow.training.optim import build_optimizer

from timing import Measurement, parse_arguments, print_measurements, quartiles, relative_spread, time_alternately

ARMS = ("kuramoto", "kuramoto:frustrated=True")
BATCH, CONTEXT = 32, 256
TARGET = 1.15
MAX_GROWTH = 2.05
"""Slightly above 2, because torch's fused attention uses larger blocks from length 768 on."""
Function = Callable[[], object]


class Shape(NamedTuple):
    """The heads of a named size, and the same number of tokens at every length."""

    size: str
    length: int

    @property
    def batch(self) -> int:
        return BATCH * CONTEXT // self.length

    @property
    def heads(self) -> int:
        """The heads of a phase model of this size, half of those of standard attention; the peer has the same."""
        return KuramotoConfig().n_heads(size(self.size).heads)

    @property
    def points(self) -> int:
        """Width of the points of a head."""
        return 2 * size(self.size).width // self.heads

    def __str__(self) -> str:
        return (
            f"core at {self.size}: batch {self.batch}, heads {self.heads}, width {self.points}, length {self.length:,}"
        )


def divide(
    setting: str,
    pairs: Mapping[str, tuple[str, str]],
    times: Mapping[str, list[float]],
    target: float | None = None,
    *,
    tokens: int | None = None,
) -> list[Measurement]:
    """Divide the times of the first name of each pair by those of the second; with `tokens` per call, show rates."""
    control = relative_spread(times["control"])
    table = []
    for quantity, names in pairs.items():
        low, ratio, high = quartiles([a / b for a, b in zip(*(times[name] for name in names), strict=True)])
        ours, peer = (statistics.median(times[name]) for name in names)
        values = (1e3 * ours, 1e3 * peer, "ms") if tokens is None else (tokens / ours, tokens / peer, "tokens/s")
        table.append(Measurement(setting, quantity, ratio, (low, high), target, True, *values, control=control))
    return table


def training(name: str, rounds: int) -> list[Measurement]:
    n_parameters, tokens = parameters(size(name)), torch.randint(0, 256, (BATCH, CONTEXT + 1))
    functions: dict[str, Function] = {}
    pairs = {}
    for spec in ("standard", *ARMS):
        config = matched(size(name, mechanism=spec), n_parameters)
        functions[spec] = training_step(TrainConfig(data=CorpusConfig(), model=config, steps=1), tokens)
        if spec != "standard":
            pairs[f"{spec}, {parameters(config) / n_parameters - 1:+.2%} parameters"] = spec, "standard"
    setting = f"training at {name}: batch {BATCH}, length {CONTEXT}"
    times = time_alternately(functions, rounds=rounds, warmup=2)
    return divide(setting, pairs, times, TARGET, tokens=BATCH * CONTEXT)


def training_step(config: TrainConfig, tokens: Tensor) -> Function:
    """Return a training step: loss, gradients, clipping, AdamW."""
    torch.manual_seed(0)
    model = Decoder(config.model)
    optimizer = build_optimizer(model, config)

    def step() -> None:
        loss = F.cross_entropy(model(tokens[:, :-1])[0].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def core(shape: Shape, rounds: int) -> list[Measurement]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape.batch, shape.heads, shape.length, shape.points, requires_grad=True) for _ in range(3))
    table = []
    for name, make_pass in PASSES.items():
        functions = {"fused": make_pass(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v))}
        for spec in ARMS:
            with_queries = make_pass(*mechanism_call(spec, shape.size, shape.batch, shape.length))
            functions |= {spec: without_queries(with_queries), f"{spec}, with queries": with_queries}
        times = time_alternately(functions, rounds=rounds, warmup=2)
        for arm in [*functions][1:]:
            target = None if arm.endswith("with queries") else TARGET
            table += divide(str(shape), {f"{name}, {arm}": (arm, "fused")}, times, target)
    return table


def mechanism_call(spec: str, name: str, batch: int, length: int) -> tuple[Callable[[], Tensor], Sequence[Tensor]]:
    """Return a call of the mechanism at a named size, and the tensors that need gradients."""
    shape = size(name)
    torch.manual_seed(0)
    layer = mechanism(spec)(shape.width, shape.heads, 0, shape.layers)
    theta = torch.randn(batch, length, shape.width, requires_grad=True)
    return lambda: layer(theta)[0], (theta, *layer.parameters())


def forward(call: Callable[[], Tensor], leaves: Sequence[Tensor]) -> Function:
    return torch.no_grad()(call)


def forward_backward(call: Callable[[], Tensor], leaves: Sequence[Tensor]) -> Function:
    grad_output = torch.randn_like(call())
    return lambda: torch.autograd.grad(call(), leaves, grad_output, allow_unused=True)


PASSES = {"forward": forward, "forward+backward": forward_backward}


def without_queries(function: Function) -> Function:
    """Return the function with the points themselves as queries."""

    def call() -> None:
        with mock.patch.object(SynchronyMechanism, "_queries", lambda _, points: points):
            function()

    return call


def memory(lengths: Sequence[int]) -> list[Measurement]:
    """Measure the peak memory of forward and backward above the inputs, for a layer of size 1m."""
    if not Path("/proc/self/clear_refs").exists():
        return []
    table, setting = [], "peak memory of a layer at 1m: batch 2"
    # The allocator returns freed blocks of this size to the system immediately.
    environment = mock.patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_="65536")
    for spec in ARMS:
        with environment, ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
            peaks = executor.submit(peak_bytes, spec, lengths, torch.get_num_threads()).result()
        for i, length in enumerate(lengths[1:], 1):
            short, long = (peak / 1e6 for peak in peaks[i - 1 : i + 1])
            quantity = f"{spec}, {length:,} / {lengths[i - 1]:,}"
            table.append(Measurement(setting, quantity, long / short, None, MAX_GROWTH, True, long, short, "MB"))
        peak, matrix = peaks[-1] / 1e6, 4 * lengths[-1] ** 2 / 1e6
        quantity = f"{spec}, {lengths[-1]:,} / one matrix of length x length"
        table.append(Measurement(setting, quantity, peak / matrix, None, 1, True, peak, matrix, "MB"))
    return table


def peak_bytes(spec: str, lengths: Sequence[int], threads: int) -> list[int]:
    """Return the peaks in a new process. `getrusage` would return the peak of the parent if that is higher."""
    torch.set_num_threads(threads)
    forward_backward(*mechanism_call(spec, "1m", 2, 64))()
    peaks = []
    for length in lengths:
        function = forward_backward(*mechanism_call(spec, "1m", 2, length))
        Path("/proc/self/clear_refs").write_text("5")
        before = peak_resident()
        function()
        peaks.append(peak_resident() - before)
    return peaks


def peak_resident() -> int:
    """Return the peak resident memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def decoding(rounds: int, past: int = 512, tokens: int = 8) -> list[Measurement]:
    functions: dict[str, Function] = {}
    n_parameters, prompt = parameters(size("1m")), torch.randint(0, 256, (1, past))
    for spec in ("standard", *ARMS):
        torch.manual_seed(0)
        model = Decoder(matched(size("1m", mechanism=spec), n_parameters)).eval()
        with torch.inference_mode():
            _, state = model(prompt)
            _, state = model(prompt[:, :1], state)  # doubles the buffers
        functions[spec] = decode_tokens(model, prompt[:, :1], state, tokens)
    pairs = {spec: (spec, "standard") for spec in ARMS}
    times = time_alternately(functions, rounds=rounds, warmup=2)
    return divide(f"decoding at 1m: after {past} tokens", pairs, times, tokens=tokens)


def decode_tokens(model: Decoder, token: Tensor, state: DecoderState, tokens: int) -> Function:
    """Return a function that appends `tokens` tokens per call. Reusing an old state would copy it."""

    @torch.inference_mode()
    def decode() -> None:
        nonlocal state
        for _ in range(tokens):
            _, state = model(token, state)

    return decode


if __name__ == "__main__":
    args = parse_arguments(__doc__ or "")
    torch.set_num_threads(args.threads or 2)
    rounds = 3 if args.quick else 15
    table = []
    for name in ("1m",) if args.quick else ("1m", "5m"):
        table += training(name, rounds)
        for length in (256, 1024) if args.quick else (256, 1024, 2048):
            table += core(Shape(name, length), rounds)
    table += memory((2048, 4096, 8192) if args.quick else (512, 1024, 2048, 4096, 8192))
    table += decoding(5 * rounds)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print_measurements(table, args.json)
