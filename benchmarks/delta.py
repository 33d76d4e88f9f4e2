"""The delta rule against HF transformers', against fused softmax attention, and against what the machine can multiply.

    python benchmarks/delta.py [--quick] [--json FILE] [--threads N]
    python benchmarks/delta.py --device cuda [--quick] [--json FILE]

On a GPU it is another race, of kernels in Triton: `delta_on_gpus.py`. On a CPU: float32, heads 64 wide, two threads
unless told. "HF" is `torch_chunk_gated_delta_rule`, which knows no lambda: against it ours has none either; elsewhere
ours is the whole of Q-Delta. fla's form by chunks needs a GPU, and cannot take part. "x times" is how many times as
long the peer takes: the median of the rounds, with quartiles.

The share of peak is the declared products (chunks of 64) in the best round, over the best rate of a matrix product of
1,024 or 2,048 in the same run; its quartiles are over rounds, each with the matrix products of its own. Memory is the
peak of the process above what it has with the inputs in hand, in a fresh process for each, where freed memory goes back
at once: buffers of C count, leftovers of the allocator do not.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from qkflow import Decoder, size
from qkflow.ops.delta_rule import choose_backend, delta_rule

import delta_on_gpus
from peers import hf_gated_delta_rule
from side_by_side import Line, arguments, quartiles, race, tell

WIDTH = 64
Rule = Callable[..., Tensor]
"""Tensors that want gradients to outputs of the shape of the values."""
Times = dict[str, list[float]]


class Shape(NamedTuple):
    batch: int
    heads: int
    length: int

    def __str__(self) -> str:
        return f"batch {self.batch}, heads {self.heads}, length {self.length:,}"


MANY, LONG = Shape(4, 8, 1024), Shape(1, 4, 8192)


def delta(*given: Tensor, backend: str | None = None) -> Tensor:
    return delta_rule(*given, backend=backend)[0]  # pyright: ignore[reportArgumentType]: five or six, all tensors


def hf(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_alpha: Tensor) -> Tensor:
    return hf_gated_delta_rule()(q, k, v, log_alpha, beta)[0]


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


RULES: dict[str, Rule] = {"ours": delta, "HF": hf, "chunked": partial(delta, backend="chunked")}


def tensors(shape: Shape, *, lam: bool = False) -> list[Tensor]:
    """q, k, v, beta, log_alpha and, if asked for, lam, distributed as a mechanism would."""
    torch.manual_seed(0)
    b, h, t = shape
    q, k = (F.normalize(torch.randn(b, t, h, WIDTH), dim=-1) for _ in range(2))
    v, beta, log_alpha = torch.randn(b, t, h, WIDTH), torch.rand(b, t, h), -0.1 * torch.rand(b, t, h)
    return [q, k, v, beta, log_alpha, *([torch.rand(b, t, h)] if lam else [])]


def forward(rule: Rule, given: Sequence[Tensor]) -> Callable[[], Tensor]:
    return torch.no_grad()(lambda: rule(*given))


def both(rule: Rule, given: Sequence[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """Forward, and backward to every input."""
    leaves = [x.clone().requires_grad_() for x in given]
    go = torch.randn(given[2].shape)
    return lambda: torch.autograd.grad(rule(*leaves), leaves, go)


PASSES = {"forward": forward, "forward+backward": both}


def agree(shape: Shape) -> None:
    """What is raced must do the same: outputs, and gradients."""
    given = tensors(shape)
    for make in PASSES.values():
        torch.manual_seed(1)
        mine = make(delta, given)()
        torch.manual_seed(1)
        theirs = make(hf, given)()
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def compared(
    where: str, what: str, times: Times, goal: float | None = None, *, less: bool = False, calls: int = 1
) -> Line:
    """How many times as long the second competitor takes as the first, which is to be much unless `less`."""
    under, over = (times[name] for name in [*times][:2])
    low, ratio, high = quartiles([a / b for a, b in zip(over, under, strict=True)])
    first, middle, third = quartiles(times["control"])
    ours, peer = (1e3 * statistics.median(seconds) / calls for seconds in (under, over))
    return Line(where, what, ratio, (low, high), goal, less, ours, peer, control=(third - first) / middle)


def pair(times: Times, *names: str) -> Times:
    return {name: times[name] for name in (*names, "control")}


def against_hf(rounds: int) -> list[Line]:
    """The first setting: ours, ours with lambda, the plain form and HF's, with matrix products among them."""
    found: list[Line] = []
    squares = {n: (torch.randn(n, n), torch.empty(n, n)) for n in (1024, 2048)}
    for (name, make), share, plain in zip(PASSES.items(), (0.60, 0.50), (None, 1.8), strict=True):
        work: dict[str, Callable[[], object]] = {rule: make(RULES[rule], tensors(MANY)) for rule in RULES}
        work["lambda"] = make(delta, tensors(MANY, lam=True))
        work |= {str(n): partial(torch.mm, x, x, out=y) for n, (x, y) in squares.items()}
        times = race(work, rounds=rounds, warm=2)
        found += [
            compared(str(MANY), f"{name}: x times HF", pair(times, "ours", "HF"), 8),
            share_of_peak(f"{name}: share of matmul peak", times, work["ours"], share),
            compared(str(MANY), f"{name}: with lambda over without", pair(times, "ours", "lambda")),
            compared(str(MANY), f"{name}, chunked.py: x times HF", pair(times, "chunked", "HF"), plain),
        ]
    slow = {name: forward(partial(delta, backend=name), tensors(MANY)) for name in (None, "reference")}
    times = race({name or "ours": work for name, work in slow.items()}, rounds=2)
    return [*found, compared(str(MANY), "forward: x times reference.py", times)]


def share_of_peak(what: str, times: Times, work: Callable[[], object], goal: float) -> Line:
    with FlopCounterMode(display=False) as counted:
        work()
    rates = [counted.get_total_flops() / seconds for seconds in times["ours"]]
    peaks = [max(2 * 1024**3 / a, 2 * 2048**3 / b) for a, b in zip(times["1024"], times["2048"], strict=True)]
    low, _, high = quartiles([rate / peak for rate, peak in zip(rates, peaks, strict=True)])
    ours, peer = max(rates) / 1e9, max(peaks) / 1e9
    return Line(str(MANY), what, ours / peer, (low, high), goal, ours=ours, peer=peer, unit="GFLOP/s")


def long_against_hf(rounds: int) -> list[Line]:
    times = race({name: both(RULES[name], tensors(LONG)) for name in RULES}, rounds=rounds)
    return [
        compared(str(LONG), "forward+backward: x times HF", pair(times, "ours", "HF"), 15),
        compared(str(LONG), "forward+backward, chunked.py: x times HF", pair(times, "chunked", "HF")),
    ]


def memory(shape: Shape) -> list[Line]:
    """Peak of forward and backward above the inputs, ours over HF's."""
    if not Path("/proc/self/clear_refs").exists():
        return []
    found = {}
    exact = mock.patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_="65536")  # what is freed leaves the process at once
    for name in RULES:
        with exact, ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
            found[name] = fresh.submit(peak_bytes, name, shape, torch.get_num_threads()).result()
    mine, peer = found["ours"] / 1e6, found["HF"] / 1e6
    where, plain = str(shape), found["chunked"] / 1e6
    return [
        Line(where, "peak memory, ours over HF", mine / peer, None, 0.2, True, mine, peer, "MB"),
        Line(where, "peak memory, chunked.py over HF", plain / peer, None, None, True, plain, peer, "MB"),
    ]


def peak_bytes(name: str, shape: Shape, threads: int) -> int:
    """In a process of its own; not by `getrusage`, which tells the parent's peak where that is higher."""
    torch.set_num_threads(threads)
    both(RULES[name], tensors(shape._replace(length=64)))()
    work = both(RULES[name], tensors(shape))
    Path("/proc/self/clear_refs").write_text("5")
    before = high_water()
    work()
    return high_water() - before


def high_water() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def against_softmax(lengths: Sequence[int], rounds: int) -> list[Line]:
    """As many tokens and heads for both; softmax gets its inputs laid out as it wants them."""
    found = []
    for length in lengths:
        shape = Shape(4096 // length, 8, length)
        given = tensors(shape, lam=True)
        q, k, v = (x.transpose(1, 2).contiguous() for x in given[:3])
        times = race({"ours": both(delta, given), "softmax": both(softmax, (q, k, v))}, rounds=rounds, warm=2)
        what, goal = "forward+backward: x times fused softmax", 1.0 if length >= 512 else None
        found.append(compared(str(shape), what, times, goal))
    return found


def growth(rounds: int) -> list[Line]:
    """Four times the length."""
    work = {str(t): both(delta, tensors(LONG._replace(length=t), lam=True)) for t in (8192, 32768)}
    where = f"batch {LONG.batch}, heads {LONG.heads}"
    return [compared(where, "length 32,768 over 8,192", race(work, rounds=rounds), 4.2, less=True)]


def decoding(rounds: int, tokens: int = 16) -> list[Line]:
    """A token at a time, after a short and after a long past."""
    torch.manual_seed(0)
    model = Decoder(size("1m", mechanism="qdelta")).eval()
    prompt = torch.randint(0, 256, (1, 30_000))
    work, states = {}, {}
    for length in (1_000, 30_000):
        with torch.inference_mode():
            _, states[length] = model(prompt[:, :length])
        work[str(length)] = decode(model, prompt[:, :1], states[length], tokens)
    times = race(work, rounds=rounds, warm=2)
    where = "qdelta at size 1m, one token"
    short, far = (state.nbytes / 1e3 for state in states.values())
    return [
        compared(where, "time at 30,000 over 1,000", times, 1.1, less=True, calls=tokens),
        Line(where, "state at 30,000 over 1,000", far / short, None, 1, True, short, far, "kB"),
    ]


def decode(model: Decoder, token: Tensor, state: object, tokens: int) -> Callable[[], None]:
    @torch.inference_mode()
    def do() -> None:
        now = state
        for _ in range(tokens):
            _, now = model(token, now)

    return do


if __name__ == "__main__":
    if "cuda" in sys.argv[1:] or "--device=cuda" in sys.argv[1:]:
        sys.exit(delta_on_gpus.main())
    args = arguments(__doc__ or "")
    torch.set_num_threads(args.threads or 2)
    rounds = 3 if args.quick else 15
    agree(MANY)
    table = against_hf(rounds)
    table += memory(MANY)
    table += long_against_hf(1 if args.quick else 5)
    table += [] if args.quick else memory(LONG)
    table += against_softmax((512, 1024) if args.quick else (256, 512, 1024, 2048, 4096), rounds)
    table += growth(2 if args.quick else 7)
    table += decoding(3 * rounds)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, backend {choose_backend(torch.device('cpu'))}\n"
    )
    tell(table, args.json)
