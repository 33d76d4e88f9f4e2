"""Time the Triton kernels of the delta rule against those of flash-linear-attention, on a GPU.

    python benchmarks/delta_rule_gpu.py [--quick] [--json FILE]

bfloat16, heads of the widths of Q-Delta (128 and 256), forward alone and with backward. `chunk_gated_delta_rule` erases
along the key, so ours does in that comparison. `chunk_comba` takes the erase direction as a tensor p, here p = k +
lambda q. (The official kernel of Q-Delta, which is Comba's with rows and columns exchanged, differs from the published
equation: see `tests/unit/ops/delta_rule/test_equation.py`.) Outputs and gradients are compared before timing.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from qkflow.ops.delta_rule import delta_rule, triton_error

Rule = Callable[..., Tensor]
SHAPES = ((8, 2048, 6, 128, 256), (1, 32768, 6, 128, 256), (4, 4096, 6, 256, 256), (8, 2048, 16, 64, 64))
"""Batch, tokens, heads, key width, value width."""
TOLERANCE = 3e-2
"""Largest difference between two kernels in bfloat16, relative to the largest value."""


def make_inputs(shape: tuple[int, ...], erase: bool) -> list[Tensor]:
    """Return q, k, v, beta, log_alpha and optionally erase, distributed as in a mechanism."""
    b, t, h, key, value = shape
    torch.manual_seed(0)
    options = {"device": "cuda"}
    q, k = (F.normalize(torch.randn(b, t, h, key, **options), dim=-1).bfloat16() for _ in range(2))
    v = torch.randn(b, t, h, value, **options).bfloat16()
    beta, log_alpha = torch.rand(b, t, h, **options), -0.1 * torch.rand(b, t, h, **options)
    return [q, k, v, beta, log_alpha, *([(k + torch.rand(b, t, h, 1, **options) * q).bfloat16()] if erase else [])]


def ours(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_alpha: Tensor, erase: Tensor | None = None) -> Tensor:
    return delta_rule(q, k, v, beta, log_alpha, erase, backend="triton")[0]


def gated(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_alpha: Tensor) -> Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(q, k, v, log_alpha, beta)[0]


def comba(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_alpha: Tensor, p: Tensor) -> Tensor:
    from fla.ops.comba import chunk_comba

    return chunk_comba(q, k, v, p, log_alpha, beta)[0]


def forward(rule: Rule, inputs: Sequence[Tensor]) -> Callable[[], object]:
    return torch.no_grad()(lambda: rule(*inputs))


def forward_backward(rule: Rule, inputs: Sequence[Tensor]) -> Callable[[], object]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    grad_output = torch.randn_like(inputs[2])
    return lambda: torch.autograd.grad(rule(*leaves), leaves, grad_output)


def relative_difference(ours: Sequence[Tensor], peer: Sequence[Tensor]) -> float:
    pairs = zip(ours, peer, strict=True)
    return max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs)


def output_and_gradients(rule: Rule, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the output and the gradients of queries, keys and values."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    o = rule(*leaves)
    torch.manual_seed(1)
    return [o, *torch.autograd.grad(o, leaves[:3], torch.randn_like(o))]


def median_times(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return median milliseconds over alternating calls, after three calls that compile and tune."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(rounds + 3):
        for name, function in functions.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            if i >= 3:
                times[name].append(start.elapsed_time(end))
    return {name: statistics.median(milliseconds) for name, milliseconds in times.items()}


def compare(shape: tuple[int, ...], rounds: int) -> list[dict[str, object]]:
    plain, with_erase = make_inputs(shape, erase=False), make_inputs(shape, erase=True)
    rows: list[dict[str, object]] = []
    for peer, rule, our_inputs, peer_inputs, n_compared in (
        ("chunk_gated_delta_rule", gated, plain, plain, 4),
        ("chunk_comba", comba, with_erase, with_erase, 1),  # output only: its gradients stop at p
    ):
        difference = relative_difference(
            output_and_gradients(ours, our_inputs)[:n_compared], output_and_gradients(rule, peer_inputs)[:n_compared]
        )
        if not difference <= TOLERANCE:
            raise SystemExit(f"{peer} and ours differ by {difference:.1e} at {shape}")
        for quantity, make_call in (("forward", forward), ("forward+backward", forward_backward)):
            times = median_times({"ours": make_call(ours, our_inputs), "peer": make_call(rule, peer_inputs)}, rounds)
            rows.append({"shape": shape, "peer": peer, "quantity": quantity, "difference": difference, **times})
            ratio = times["peer"] / times["ours"]
            print(f"{shape!s:<28}{peer:<24}{quantity:<18}{times['ours']:8.2f} ms{times['peer']:8.2f} ms{ratio:7.2f} x")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device found; delta_rule.py is the benchmark for CPUs")
        return 1
    if error := triton_error(torch.device("cuda")):
        print(f"the Triton kernels cannot run: {error}")
        return 1
    try:
        import fla.ops  # noqa: F401
    except ImportError as error:
        print(f"{error}. Install flash-linear-attention: pip install fla-core")
        return 1
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; time of ours, time of the peer, their ratio\n")
    rows = [row for shape in SHAPES[: 1 if args.quick else None] for row in compare(shape, 5 if args.quick else 30)]
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
