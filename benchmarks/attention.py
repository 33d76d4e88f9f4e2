"""Softmax attention on a CPU: the C kernel against torch's fused attention, as a share of matmul peak, and its growth.

Each pair of functions runs alternately, together with a matrix product of 512 x 512. With one thread the clock is the
processor time of the thread, so that other processes on the machine matter less.

    python benchmarks/attention.py --threads 1
    python benchmarks/attention.py --threads 2
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from qkflow.ops.attention import attention

from timing import Measurement, parse_arguments, print_measurements, quartiles, relative_spread, time_alternately

TOKENS, HEADS = 4096, 8
PEAK = 512
"""Size of the matrix product whose speed is the peak."""
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, causal=True, backend="cpu")


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1).transpose(1, 2)


def forward(call: Call, inputs: list[Tensor]) -> None:
    with torch.no_grad():
        call(*inputs)


def forward_backward(call: Call, inputs: list[Tensor], weight: Tensor) -> None:
    torch.autograd.grad(call(*inputs), inputs, weight)


def make_inputs(batch: int, length: int, width: int, *, heads: int = HEADS, queries: int | None = None) -> list[Tensor]:
    lengths = (length if queries is None else queries, length, length)
    return [torch.randn(batch, t, heads, width).requires_grad_() for t in lengths]


def clock() -> Callable[[], float]:
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def against_torch(width: int, length: int, rounds: int) -> list[Measurement]:
    """Both passes: how many times as fast as torch, and the share of the speed of a matrix product."""
    batch = max(1, TOKENS // length)
    inputs, a = make_inputs(batch, length, width), torch.randn(PEAK, PEAK)
    weight = torch.randn(batch, length, HEADS, width)
    table, setting = [], f"width {width}, length {length}, batch {batch}, heads {HEADS}"
    products = {"forward": (partial(forward, inputs=inputs), 2)}
    products["forward+backward"] = (partial(forward_backward, inputs=inputs, weight=weight), 7)
    for name, (run, n_products) in products.items():
        functions = {"ours": partial(run, ours), "torch": partial(run, fused), "matmul": lambda: a @ a}
        times = time_alternately(functions, rounds=rounds, warmup=2, clock=clock())
        is_target = width == 32 and length <= 1024 and name != "forward"
        table.append(divide(setting, f"{name}: x times torch", times, ("ours", "torch"), 2.0 if is_target else 1.0))
        flops = 2 * n_products * batch * HEADS * length * (length + 1) / 2 * width
        per_flop = [m / (2 * PEAK**3) * flops / o for o, m in zip(times["ours"], times["matmul"], strict=True)]
        low, share, high = quartiles(per_flop)
        table.append(Measurement(setting, f"{name}: share of matmul peak", share, (low, high)))
    return table


def decoding(width: int, length: int, rounds: int) -> list[Measurement]:
    inputs = make_inputs(1, length, width, queries=1)
    functions = {"ours": partial(forward, ours, inputs), "torch": partial(forward, fused, inputs)}
    times = time_alternately(functions, rounds=20 * rounds, warmup=5, clock=clock())
    setting = f"width {width}, one query, {length} keys, heads {HEADS}"
    return [divide(setting, "forward: x times torch", times, ("ours", "torch"), 1.0)]


def growth(rounds: int, short: int = 1024, long: int = 4096) -> list[Measurement]:
    """Time and memory of a sequence four times as long."""
    functions = {}
    for length in (short, long):
        inputs, weight = make_inputs(1, length, 32), torch.randn(1, length, HEADS, 32)
        functions[str(length)] = partial(forward_backward, ours, inputs, weight)
    times = time_alternately(functions, rounds=rounds, clock=clock())
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        peaks = [mb for (mb,) in (pool.map(added_memory, [length], chunksize=1) for length in (4 * long, 16 * long))]
    ratio = peaks[1] / peaks[0]
    return [
        divide("growth", f"time at {long} / {short}", times, (str(short), str(long)), 17, lower_is_better=True),
        Measurement("growth", f"memory at {16 * long} / {4 * long}", ratio, None, 4.4, True, peaks[1], peaks[0], "MB"),
    ]


def added_memory(length: int) -> float:
    """Return the memory in MB that both passes need besides their inputs, in a process of its own."""
    torch.set_num_threads(1)
    forward_backward(ours, make_inputs(1, 64, 32, heads=1), torch.randn(1, 64, 1, 32))
    inputs, weight = make_inputs(1, length, 32, heads=1), torch.randn(1, length, 1, 32)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_resident()
    forward_backward(ours, inputs, weight)
    return (peak_resident() - before) / 1e6


def peak_resident() -> int:
    """Return the peak resident memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def divide(
    setting: str,
    quantity: str,
    times: dict[str, list[float]],
    names: tuple[str, str],
    target: float,
    *,
    lower_is_better: bool = False,
) -> Measurement:
    """Divide the times of the second name by those of the first."""
    first, second = (times[name] for name in names)
    low, ratio, high = quartiles([b / a for a, b in zip(first, second, strict=True)])
    own, peer = (1e3 * statistics.median(seconds) for seconds in (first, second))
    control = relative_spread(times["control"])
    return Measurement(setting, quantity, ratio, (low, high), target, lower_is_better, own, peer, control=control)


if __name__ == "__main__":
    args = parse_arguments(__doc__ or "")
    rounds = 3 if args.quick else 15
    lengths = (256, 1024) if args.quick else (256, 1024, 4096)
    table = [row for width in (32, 64) for length in lengths for row in against_torch(width, length, rounds)]
    table += [row for width in (32, 64) for length in (512, 8192) for row in decoding(width, length, rounds)]
    table += [] if args.quick else growth(5)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print_measurements(table, args.json)
