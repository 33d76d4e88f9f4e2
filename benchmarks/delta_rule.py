"""Time the delta rule on a CPU against HF transformers, fused softmax attention and the peak of matrix products.

    python benchmarks/delta_rule.py [--quick] [--json FILE] [--threads N]
    python benchmarks/delta_rule.py --device cuda [--quick] [--json FILE]

On a GPU, `delta_rule_gpu.py` runs instead. On a CPU: float32, heads of width 64, two threads by default. "HF" is
`torch_chunk_gated_delta_rule`, which erases along the key, so ours does in that comparison; elsewhere ours has the
erase direction of Q-Delta. The chunked form of fla needs a GPU. "x times" is the peer's time divided by ours: the
median over rounds, with quartiles.

The share of peak is the rate of the declared FLOPs (chunks of 64) in the best round, divided by the best rate of a
matrix product of size 1,024 or 2,048 in the same run; its quartiles are over rounds. Memory is the peak of a fresh
process above its memory with the inputs loaded. The allocator returns freed memory immediately, so buffers of the C
kernels are included and freed memory is not.
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

import delta_rule_gpu
from peers import hf_gated_delta_rule
from timing import Measurement, parse_arguments, print_measurements, quartiles, relative_spread, time_alternately

WIDTH = 64
Rule = Callable[..., Tensor]
"""From the differentiable inputs to outputs of the shape of the values."""
Times = dict[str, list[float]]


class Shape(NamedTuple):
    batch: int
    heads: int
    length: int

    def __str__(self) -> str:
        return f"batch {self.batch}, heads {self.heads}, length {self.length:,}"


WIDE, LONG = Shape(4, 8, 1024), Shape(1, 4, 8192)


def delta(*inputs: Tensor, backend: str | None = None) -> Tensor:
    return delta_rule(*inputs, backend=backend)[0]  # pyright: ignore[reportArgumentType]: five or six tensors


def hf(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_alpha: Tensor) -> Tensor:
    return hf_gated_delta_rule()(q, k, v, log_alpha, beta)[0]


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


RULES: dict[str, Rule] = {"ours": delta, "HF": hf, "chunked": partial(delta, backend="chunked")}


def make_inputs(shape: Shape, *, erase: bool = False) -> list[Tensor]:
    """Return q, k, v, beta, log_alpha and optionally erase, distributed as in a mechanism."""
    torch.manual_seed(0)
    b, h, t = shape
    q, k = (F.normalize(torch.randn(b, t, h, WIDTH), dim=-1) for _ in range(2))
    v, beta, log_alpha = torch.randn(b, t, h, WIDTH), torch.rand(b, t, h), -0.1 * torch.rand(b, t, h)
    return [q, k, v, beta, log_alpha, *([k + torch.rand(b, t, h, 1) * q] if erase else [])]


def forward(rule: Rule, inputs: Sequence[Tensor]) -> Callable[[], Tensor]:
    return torch.no_grad()(lambda: rule(*inputs))


def forward_backward(rule: Rule, inputs: Sequence[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """Return a forward pass and a backward pass to every input."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    grad_output = torch.randn(inputs[2].shape)
    return lambda: torch.autograd.grad(rule(*leaves), leaves, grad_output)


PASSES = {"forward": forward, "forward+backward": forward_backward}


def check_equal(shape: Shape) -> None:
    """Check that ours and HF's have the same outputs and gradients."""
    inputs = make_inputs(shape)
    for make_call in PASSES.values():
        torch.manual_seed(1)
        ours = make_call(delta, inputs)()
        torch.manual_seed(1)
        peer = make_call(hf, inputs)()
        torch.testing.assert_close(ours, peer, rtol=1e-3, atol=1e-3)


def divide(
    setting: str,
    quantity: str,
    times: Times,
    names: tuple[str, str],
    target: float | None = None,
    *,
    lower_is_better: bool = False,
    calls: int = 1,
) -> Measurement:
    """Divide the times of the second name by those of the first; a function makes `calls` calls."""
    first, second = (times[name] for name in names)
    low, ratio, high = quartiles([b / a for a, b in zip(first, second, strict=True)])
    ours, peer = (1e3 * statistics.median(seconds) / calls for seconds in (first, second))
    control = relative_spread(times["control"])
    return Measurement(setting, quantity, ratio, (low, high), target, lower_is_better, ours, peer, control=control)


def against_hf(rounds: int) -> list[Measurement]:
    """Compare ours, ours with erase, `chunked` and HF, alternating with matrix products."""
    table: list[Measurement] = []
    squares = {n: (torch.randn(n, n), torch.empty(n, n)) for n in (1024, 2048)}
    for (name, make_call), share_target, chunked_target in zip(PASSES.items(), (0.60, 0.50), (None, 1.8), strict=True):
        functions: dict[str, Callable[[], object]] = {rule: make_call(RULES[rule], make_inputs(WIDE)) for rule in RULES}
        functions["erase"] = make_call(delta, make_inputs(WIDE, erase=True))
        functions |= {str(n): partial(torch.mm, x, x, out=y) for n, (x, y) in squares.items()}
        times = time_alternately(functions, rounds=rounds, warmup=2)
        table += [
            divide(str(WIDE), f"{name}: x times HF", times, ("ours", "HF"), 8),
            share_of_peak(f"{name}: share of matmul peak", times, functions["ours"], share_target),
            divide(str(WIDE), f"{name}: with erase / without", times, ("ours", "erase")),
            divide(str(WIDE), f"{name}, chunked: x times HF", times, ("chunked", "HF"), chunked_target),
        ]
    functions = {
        "ours": forward(delta, make_inputs(WIDE)),
        "naive": forward(partial(delta, backend="naive"), make_inputs(WIDE)),
    }
    times = time_alternately(functions, rounds=2)
    return [*table, divide(str(WIDE), "forward: x times naive", times, ("ours", "naive"))]


def share_of_peak(quantity: str, times: Times, function: Callable[[], object], target: float) -> Measurement:
    with FlopCounterMode(display=False) as counter:
        function()
    rates = [counter.get_total_flops() / seconds for seconds in times["ours"]]
    peaks = [max(2 * 1024**3 / a, 2 * 2048**3 / b) for a, b in zip(times["1024"], times["2048"], strict=True)]
    low, _, high = quartiles([rate / peak for rate, peak in zip(rates, peaks, strict=True)])
    ours, peer = max(rates) / 1e9, max(peaks) / 1e9
    return Measurement(str(WIDE), quantity, ours / peer, (low, high), target, ours=ours, peer=peer, unit="GFLOP/s")


def long_against_hf(rounds: int) -> list[Measurement]:
    times = time_alternately({name: forward_backward(RULES[name], make_inputs(LONG)) for name in RULES}, rounds=rounds)
    return [
        divide(str(LONG), "forward+backward: x times HF", times, ("ours", "HF"), 15),
        divide(str(LONG), "forward+backward, chunked: x times HF", times, ("chunked", "HF")),
    ]


def memory(shape: Shape) -> list[Measurement]:
    """Compare the peak memory of forward and backward above the inputs with HF's."""
    if not Path("/proc/self/clear_refs").exists():
        return []
    peaks = {}
    # The allocator returns freed blocks of this size to the system immediately.
    environment = mock.patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_="65536")
    for name in RULES:
        with environment, ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
            peaks[name] = executor.submit(peak_bytes, name, shape, torch.get_num_threads()).result()
    ours, chunked, hf = (peaks[name] / 1e6 for name in ("ours", "chunked", "HF"))
    setting = str(shape)
    return [
        Measurement(setting, "peak memory, ours / HF", ours / hf, None, 0.2, True, ours, hf, "MB"),
        Measurement(setting, "peak memory, chunked / HF", chunked / hf, None, None, True, chunked, hf, "MB"),
    ]


def peak_bytes(name: str, shape: Shape, threads: int) -> int:
    """Return the peak in a new process. `getrusage` would return the peak of the parent if that is higher."""
    torch.set_num_threads(threads)
    forward_backward(RULES[name], make_inputs(shape._replace(length=64)))()
    function = forward_backward(RULES[name], make_inputs(shape))
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_resident()
    function()
    return peak_resident() - before


def peak_resident() -> int:
    """Return the peak resident memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def against_softmax(lengths: Sequence[int], rounds: int) -> list[Measurement]:
    """Compare with fused softmax attention: the same tokens and heads; its inputs are contiguous in its own layout."""
    table = []
    for length in lengths:
        shape = Shape(4096 // length, 8, length)
        inputs = make_inputs(shape, erase=True)
        q, k, v = (x.transpose(1, 2).contiguous() for x in inputs[:3])
        functions = {"ours": forward_backward(delta, inputs), "softmax": forward_backward(softmax, (q, k, v))}
        times = time_alternately(functions, rounds=rounds, warmup=2)
        target = 1.0 if length >= 512 else None
        table.append(divide(str(shape), "forward+backward: x times fused softmax", times, ("ours", "softmax"), target))
    return table


def growth(rounds: int) -> list[Measurement]:
    """Compare two lengths, the second four times the first."""
    functions = {
        str(t): forward_backward(delta, make_inputs(LONG._replace(length=t), erase=True)) for t in (8192, 32768)
    }
    setting = f"batch {LONG.batch}, heads {LONG.heads}"
    times = time_alternately(functions, rounds=rounds)
    return [divide(setting, "length 32,768 / 8,192", times, ("8192", "32768"), 4.2, lower_is_better=True)]


def decoding(rounds: int, tokens: int = 16) -> list[Measurement]:
    """Compare single-token steps after 1,000 and after 30,000 tokens."""
    torch.manual_seed(0)
    model = Decoder(size("1m", mechanism="qdelta")).eval()
    prompt = torch.randint(0, 256, (1, 30_000))
    functions, states = {}, {}
    for length in (1_000, 30_000):
        with torch.inference_mode():
            _, states[length] = model(prompt[:, :length])
        functions[str(length)] = decode_tokens(model, prompt[:, :1], states[length], tokens)
    times = time_alternately(functions, rounds=rounds, warmup=2)
    setting = "qdelta at size 1m, one token"
    short, long = (state.nbytes / 1e3 for state in states.values())
    return [
        divide(
            setting,
            "time at 30,000 / 1,000",
            times,
            ("1000", "30000"),
            1.1,
            lower_is_better=True,
            calls=tokens,
        ),
        Measurement(setting, "state at 30,000 / 1,000", long / short, None, 1, True, short, long, "kB"),
    ]


def decode_tokens(model: Decoder, token: Tensor, state: object, tokens: int) -> Callable[[], None]:
    @torch.inference_mode()
    def decode() -> None:
        current = state
        for _ in range(tokens):
            _, current = model(token, current)

    return decode


if __name__ == "__main__":
    if "cuda" in sys.argv[1:] or "--device=cuda" in sys.argv[1:]:
        sys.exit(delta_rule_gpu.main())
    args = parse_arguments(__doc__ or "")
    torch.set_num_threads(args.threads or 2)
    rounds = 3 if args.quick else 15
    check_equal(WIDE)
    table = against_hf(rounds)
    table += memory(WIDE)
    table += long_against_hf(1 if args.quick else 5)
    table += [] if args.quick else memory(LONG)
    table += against_softmax((512, 1024) if args.quick else (256, 512, 1024, 2048, 4096), rounds)
    table += growth(2 if args.quick else 7)
    table += decoding(3 * rounds)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, backend {choose_backend(torch.device('cpu'))}\n"
    )
    print_measurements(table, args.json)
