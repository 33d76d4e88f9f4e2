"""Compile every Triton kernel of the delta rule ahead of time, without a GPU, and print the resources it uses.

    python benchmarks/triton_resources.py [--quick] [--json FILE] [--workers N]

Key and value widths 64, 128 and 256; float32, bfloat16 and float16; sm_80 (A100) and sm_90 (H100); each with the tiles
that a call would select. One line per kernel: registers per thread, spilled bytes and shared memory per program, each
the maximum over all cases, and the worst case. `--quick` compiles only the smallest and largest widths.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import product
from pathlib import Path

import torch

from qkflow.ops.delta_rule.triton_resources import KERNELS, KernelResources, usage

WIDTHS, TYPES, TARGETS = (64, 128, 256), (torch.float32, torch.bfloat16, torch.float16), (80, 90)
Job = tuple[str, int, int, torch.dtype, int]


def jobs(quick: bool) -> list[Job]:
    widths, types = ((64, 256), TYPES[:2]) if quick else (WIDTHS, TYPES)
    pairs = [(width, width) for width in widths] if quick else list(product(widths, widths))
    return [(name, *pair, dtype, sm) for sm in TARGETS for dtype in types for pair in pairs for name in KERNELS]


def compile_kernel(job: Job) -> KernelResources:
    return usage(*job)


def table(resources: Sequence[KernelResources]) -> str:
    lines = [f"{'kernel':<18}{'cases':>6}{'registers':>11}{'spills':>8}{'shared':>10}  worst case"]
    for name in KERNELS:
        cases = [x for x in resources if x.kernel == name]
        worst = max(cases, key=lambda x: (x.spills, x.registers, x.shared))
        shared, case = max(x.shared for x in cases), f"{worst.key} x {worst.value} {worst.dtype} sm_{worst.target}"
        lines.append(
            f"{name:<18}{len(cases):>6}{worst.registers:>11}{worst.spills:>8}{shared / 1024:>6.1f} KiB  {case}"
        )
    spilled = [x for x in resources if x.spills]
    lines += [f"{len(resources)} kernels compiled, {len(spilled)} of them with spills"]
    lines += [f"  {x.kernel} {x.key} x {x.value} {x.dtype} sm_{x.target}: {x.spills} B" for x in spilled]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, mp_context=context) as pool:
        results = list(pool.map(compile_kernel, jobs(args.quick), chunksize=4))
    print(table(results))
    if args.json:
        args.json.write_text(json.dumps([asdict(x) for x in results], indent=1) + "\n")
