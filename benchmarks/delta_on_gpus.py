"""The delta rule in Triton against flash-linear-attention's kernels, on a GPU: what `delta.py --device cuda` runs.

bfloat16, heads as wide as Q-Delta's (128 and 256), forward and forward with backward. `chunk_gated_delta_rule` knows no
lambda: against it ours has none either. `chunk_comba` reads the memory by a third stream p of its own: with p = k +
lambda q its equation is ours, so it is given that, made beforehand, while ours makes it inside and owes a gradient to
lambda besides. (Q-Delta's official kernel, which is Comba's with rows and columns exchanged, is not the published
equation: see `tests/unit/ops/delta_rule/test_laws.py`.) Values and gradients are compared before anything is raced.
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
"""Rows, tokens, heads, widths of keys and of values."""
WITHIN = 3e-2
"""How far two kernels in bfloat16 may be apart, of the largest number."""


def tensors(shape: tuple[int, ...], lam: bool) -> list[Tensor]:
    """q, k, v, beta, log_alpha and, if asked for, lam, distributed as a mechanism would."""
    b, t, h, key, value = shape
    torch.manual_seed(0)
    options = {"device": "cuda"}
    q, k = (F.normalize(torch.randn(b, t, h, key, **options), dim=-1).bfloat16() for _ in range(2))
    v = torch.randn(b, t, h, value, **options).bfloat16()
    beta, log_alpha, mix = (
        torch.rand(b, t, h, **options),
        -0.1 * torch.rand(b, t, h, **options),
        torch.rand(b, t, h, **options),
    )
    return [q, k, v, beta, log_alpha, *([mix] if lam else [])]


def ours(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_alpha: Tensor, lam: Tensor | None = None) -> Tensor:
    return delta_rule(q, k, v, beta, log_alpha, lam, backend="triton")[0]


def gated(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_alpha: Tensor) -> Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(q, k, v, log_alpha, beta)[0]


def comba(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_alpha: Tensor, p: Tensor) -> Tensor:
    from fla.ops.comba import chunk_comba

    return chunk_comba(q, k, v, p, log_alpha, beta)[0]


def forward(rule: Rule, given: Sequence[Tensor]) -> Callable[[], object]:
    return torch.no_grad()(lambda: rule(*given))


def both(rule: Rule, given: Sequence[Tensor]) -> Callable[[], object]:
    leaves = [x.clone().requires_grad_() for x in given]
    go = torch.randn_like(given[2])
    return lambda: torch.autograd.grad(rule(*leaves), leaves, go)


def apart(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    pairs = zip(mine, theirs, strict=True)
    return max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs)


def outcome(rule: Rule, given: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, and gradients of queries, keys and values."""
    leaves = [x.clone().requires_grad_() for x in given]
    o = rule(*leaves)
    torch.manual_seed(1)
    return [o, *torch.autograd.grad(o, leaves[:3], torch.randn_like(o))]


def race(work: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds, taking turns; compiled and tuned beforehand."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(rounds + 3):
        for name, do in work.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            do()
            end.record()
            torch.cuda.synchronize()
            if turn >= 3:
                times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(found) for name, found in times.items()}


def compared(shape: tuple[int, ...], rounds: int) -> list[dict[str, object]]:
    plain, mixed = tensors(shape, lam=False), tensors(shape, lam=True)
    *five, lam = mixed
    with_p = [*five, (five[1] + lam[..., None] * five[0]).bfloat16()]
    rows: list[dict[str, object]] = []
    for peer, rule, mine, theirs, count in (
        ("chunk_gated_delta_rule", gated, plain, plain, 4),
        ("chunk_comba", comba, mixed, with_p, 1),  # its gradients stop at p
    ):
        off = apart(outcome(ours, mine)[:count], outcome(rule, theirs)[:count])
        if not off <= WITHIN:
            raise SystemExit(f"{peer} and ours are {off:.1e} apart at {shape}: nothing to race")
        for what, make in (("forward", forward), ("forward+backward", both)):
            found = race({"ours": make(ours, mine), "peer": make(rule, theirs)}, rounds)
            row = {"shape": shape, "peer": peer, "what": what, "apart": off, **found}
            rows.append(row)
            ratio = found["peer"] / found["ours"]
            print(f"{shape!s:<28}{peer:<24}{what:<18}{found['ours']:8.2f} ms{found['peer']:8.2f} ms{ratio:7.2f} x")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda"], required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch sees no GPU here: this race needs one; without --device cuda the CPU's is run")
        return 1
    if fault := triton_error(torch.device("cuda")):
        print(f"the kernels in Triton cannot run: {fault}")
        return 1
    try:
        import fla.ops  # noqa: F401
    except ImportError as missing:
        print(f"{missing}: flash-linear-attention comes with  pip install fla-core")
        return 1
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ours, the peer, how many times as long it takes\n"
    )
    rows = [row for shape in SHAPES[: 1 if args.quick else None] for row in compared(shape, 5 if args.quick else 30)]
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0
