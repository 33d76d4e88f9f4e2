"""What it costs that tokens are phases: training steps, the attention core, memory along the length, and decoding.

    python benchmarks/kuramoto.py [--quick] [--json FILE] [--threads N]

float32, two threads unless told. A figure is how many times as long ours takes as its peer, 1.1 being 10 % more: the
median of the rounds, with quartiles.

- Training: whole steps (clipping, and AdamW with rates of their own for phases) of models with as many parameters as
  the standard one.
- The core is all of the mechanism but what makes queries: angles to points, drift, delay, fused attention, tangent,
  step. Its peer is torch's fused attention alone, causal, with queries, keys and values as wide as the points (twice
  the width of a head) and laid out as it likes them. Backward goes to the angles and to what the mechanism learns, for
  the peer to queries, keys and values. "with queries" adds the map that gates and shifts them, a matrix product, of
  which softmax attention has four and its peer here none.
- Memory is the peak of the process in forward and backward of one layer above what it has with the inputs in hand, in a
  fresh process where freed memory goes back at once. It is to double with the length, and to stay below one matrix of
  length by length.
- Decoding: a token at a time, behind 512 others and those of the rounds before.
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

from side_by_side import Line, arguments, quartiles, race, tell

ARMS = ("kuramoto", "kuramoto:frustrated=True")
BATCH, CONTEXT = 32, 256
GOAL = 1.15
TWICE = 2.05
"""Torch's fused attention works in larger blocks from length 768 on, which tells at 1,024 over 512."""
Work = Callable[[], object]


class Shape(NamedTuple):
    """Heads as those of a named size; as many tokens at every length."""

    size: str
    length: int

    @property
    def batch(self) -> int:
        return BATCH * CONTEXT // self.length

    @property
    def heads(self) -> int:
        """Those that a phase model of this size has, half of standard attention's: its peer here has the same."""
        return KuramotoConfig().heads_of(size(self.size).heads)

    @property
    def points(self) -> int:
        """Numbers of a head's points."""
        return 2 * size(self.size).width // self.heads

    def __str__(self) -> str:
        return (
            f"core at {self.size}: batch {self.batch}, heads {self.heads}, width {self.points}, length {self.length:,}"
        )


def against(
    where: str,
    pairs: Mapping[str, tuple[str, str]],
    times: Mapping[str, list[float]],
    goal: float | None = None,
    *,
    tokens: int | None = None,
) -> list[Line]:
    """Ours and its peer, round by round, for each pair of them; `tokens` in each call tell rates instead of times."""
    first, middle, third = quartiles(times["control"])
    found = []
    for what, names in pairs.items():
        low, ratio, high = quartiles([a / b for a, b in zip(*(times[name] for name in names), strict=True)])
        ours, peer = (statistics.median(times[name]) for name in names)
        told = (1e3 * ours, 1e3 * peer, "ms") if tokens is None else (tokens / ours, tokens / peer, "tokens/s")
        found.append(Line(where, what, ratio, (low, high), goal, True, *told, control=(third - first) / middle))
    return found


def training(name: str, rounds: int) -> list[Line]:
    target, tokens = parameters(size(name)), torch.randint(0, 256, (BATCH, CONTEXT + 1))
    work: dict[str, Work] = {}
    pairs = {}
    for spec in ("standard", *ARMS):
        config = matched(size(name, mechanism=spec), target)
        work[spec] = step(TrainConfig(data=CorpusConfig(), model=config, steps=1), tokens)
        if spec != "standard":
            pairs[f"{spec}, {parameters(config) / target - 1:+.2%} parameters"] = spec, "standard"
    where = f"training at {name}: batch {BATCH}, length {CONTEXT}"
    return against(where, pairs, race(work, rounds=rounds, warm=2), GOAL, tokens=BATCH * CONTEXT)


def step(config: TrainConfig, tokens: Tensor) -> Work:
    """A whole training step: loss, gradients, clipping, AdamW."""
    torch.manual_seed(0)
    model = Decoder(config.model)
    optimiser = build_optimizer(model, config)

    def do() -> None:
        loss = F.cross_entropy(model(tokens[:, :-1])[0].flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()

    return do


def core(shape: Shape, rounds: int) -> list[Line]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape.batch, shape.heads, shape.length, shape.points, requires_grad=True) for _ in range(3))
    found = []
    for name, make in PASSES.items():
        work = {"fused": make(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v))}
        for spec in ARMS:
            whole = make(*through(spec, shape.size, shape.batch, shape.length))
            work |= {spec: without_queries(whole), f"{spec}, with queries": whole}
        times = race(work, rounds=rounds, warm=2)
        for what in [*work][1:]:
            goal = None if what.endswith("with queries") else GOAL
            found += against(str(shape), {f"{name}, {what}": (what, "fused")}, times, goal)
    return found


def through(spec: str, name: str, batch: int, length: int) -> tuple[Callable[[], Tensor], Sequence[Tensor]]:
    """A call of the mechanism as it is at a named size, and all that its backward goes to."""
    shape = size(name)
    torch.manual_seed(0)
    mixer = mechanism(spec)(shape.width, shape.heads, 0, shape.layers)
    theta = torch.randn(batch, length, shape.width, requires_grad=True)
    return lambda: mixer(theta)[0], (theta, *mixer.parameters())


def forward(call: Callable[[], Tensor], leaves: Sequence[Tensor]) -> Work:
    return torch.no_grad()(call)


def both(call: Callable[[], Tensor], leaves: Sequence[Tensor]) -> Work:
    go = torch.randn_like(call())
    return lambda: torch.autograd.grad(call(), leaves, go, allow_unused=True)


PASSES = {"forward": forward, "forward+backward": both}


def without_queries(work: Work) -> Work:
    """With points for queries, as they are."""

    def do() -> None:
        with mock.patch.object(SynchronyMechanism, "_queries", lambda _, points: points):
            work()

    return do


def memory(lengths: Sequence[int]) -> list[Line]:
    """Peak of forward and backward above the inputs, of a layer as it is at 1m."""
    if not Path("/proc/self/clear_refs").exists():
        return []
    found, where = [], "peak memory of a layer at 1m: batch 2"
    exact = mock.patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_="65536")  # what is freed leaves the process at once
    for spec in ARMS:
        with exact, ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
            peaks = fresh.submit(peak_bytes, spec, lengths, torch.get_num_threads()).result()
        for i, length in enumerate(lengths[1:], 1):
            less, more = (peak / 1e6 for peak in peaks[i - 1 : i + 1])
            what = f"{spec}, {length:,} over {lengths[i - 1]:,}"
            found.append(Line(where, what, more / less, None, TWICE, True, more, less, "MB"))
        most, square = peaks[-1] / 1e6, 4 * lengths[-1] ** 2 / 1e6
        what = f"{spec}, over one matrix of {lengths[-1]:,} squared"
        found.append(Line(where, what, most / square, None, 1, True, most, square, "MB"))
    return found


def peak_bytes(spec: str, lengths: Sequence[int], threads: int) -> list[int]:
    """In a process of its own; not by `getrusage`, which tells the parent's peak where that is higher."""
    torch.set_num_threads(threads)
    both(*through(spec, "1m", 2, 64))()
    peaks = []
    for length in lengths:
        work = both(*through(spec, "1m", 2, length))
        Path("/proc/self/clear_refs").write_text("5")
        before = high_water()
        work()
        peaks.append(high_water() - before)
    return peaks


def high_water() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def decoding(rounds: int, past: int = 512, tokens: int = 8) -> list[Line]:
    work: dict[str, Work] = {}
    target, prompt = parameters(size("1m")), torch.randint(0, 256, (1, past))
    for spec in ("standard", *ARMS):
        torch.manual_seed(0)
        model = Decoder(matched(size("1m", mechanism=spec), target)).eval()
        with torch.inference_mode():
            _, state = model(prompt)
            _, state = model(prompt[:, :1], state)  # which makes room for as many tokens again
        work[spec] = decode(model, prompt[:, :1], state, tokens)
    pairs = {spec: (spec, "standard") for spec in ARMS}
    return against(f"decoding at 1m: behind {past} tokens", pairs, race(work, rounds=rounds, warm=2), tokens=tokens)


def decode(model: Decoder, token: Tensor, state: DecoderState, tokens: int) -> Work:
    """So many tokens more at every call: a state that is continued twice would be copied."""

    @torch.inference_mode()
    def do() -> None:
        nonlocal state
        for _ in range(tokens):
            _, state = model(token, state)

    return do


if __name__ == "__main__":
    args = arguments(__doc__ or "")
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
    tell(table, args.json)
