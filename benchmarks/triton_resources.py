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
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qkflow.ops.delta_rule import triton_launch as kernels
from qkflow.ops.delta_rule.chunked import Saved
from qkflow.ops.delta_rule.inputs import DeltaInputs

WIDTHS, TYPES, TARGETS = (64, 128, 256), (torch.float32, torch.bfloat16, torch.float16), (80, 90)
Job = tuple[str, int, int, torch.dtype, int]
FORWARD = ("recurrent", "intra_chunk", "chunk_states", "chunk_outputs")
BACKWARD = ("intra_chunk_backward", "chunk_states_backward", "scores_backward", "inputs_backward", "decay_backward")
KERNELS = FORWARD + BACKWARD
"""All kernels, in launch order."""
_TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


@dataclass(frozen=True, kw_only=True)
class KernelResources:
    """Resources of one compiled kernel."""

    kernel: str
    key: int
    value: int
    dtype: str
    target: int
    """Compute capability: 80 for A100, 90 for H100."""
    registers: int
    """Per thread, at most 255."""
    spills: int
    """Spilled bytes per thread."""
    shared: int
    """Bytes of shared memory per program."""
    warps: int


def launches(key: int, value: int, dtype: torch.dtype) -> dict[str, kernels.Launch]:
    """The launches of a forward and backward pass with every optional input, by kernel name."""
    shape = {"device": "meta", "dtype": dtype}
    q, v = torch.empty(2, 100, 2, key, **shape), torch.empty(2, 100, 2, value, **shape)
    beta, log_alpha = (torch.empty(2, 100, 2, device="meta") for _ in range(2))
    state = torch.empty(2, 2, value, key, device="meta")
    recorded: list[kernels.Launch] = []
    inputs = DeltaInputs(q, torch.empty_like(q), v, beta, log_alpha, torch.empty_like(q))
    kernels.forward(inputs.map(lambda x: x[:, :1]), state, 1.0, 0, False, recorded.append)
    o, final, errors, checkpoints = kernels.forward(inputs, state, 1.0, 0, True, recorded.append)
    kernels.backward(o, final, inputs, Saved(o, errors, checkpoints), 1.0, 0, recorded.append)
    return {item.kernel.fn.__name__: item for item in recorded}


def launched_kernels() -> list[str]:
    return list(launches(64, 64, torch.float32))


def usage(name: str, key: int, value: int, dtype: torch.dtype, target: int) -> KernelResources:
    """Compile a kernel for a compute capability and read its resources from the binary."""
    item = launches(key, value, dtype)[name]
    types = {x: _type(y) for x, y in item.arguments.items()}
    absent = {x: None for x, y in item.arguments.items() if y is None}
    names = item.kernel.arg_names
    # as in a launch: tensors are aligned to 16 bytes
    aligned = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(names) if types.get(x, "")[:1] == "*"}
    source = ASTSource(
        fn=item.kernel,
        signature={x: types.get(x, "constexpr") for x in names},
        constexprs={**absent, **item.constants},
        attrs=aligned,
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=kernels.options(item.tile))
    registers, spills = _resources(compiled.asm["cubin"])
    return KernelResources(
        kernel=name,
        key=key,
        value=value,
        dtype=str(dtype).removeprefix("torch."),
        target=target,
        registers=registers,
        spills=spills,
        shared=compiled.metadata.shared,
        warps=item.tile.warps,
    )


def _type(x: Any) -> str:
    if x is None:
        return "constexpr"
    if isinstance(x, Tensor):
        return _TYPES[x.dtype]
    return "fp32" if isinstance(x, float) else "i32"


def _resources(binary: bytes) -> tuple[int, int]:
    """Registers, and bytes of local memory and stack, from NVIDIA's cuobjdump."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder) / "kernel.cubin").write_bytes(binary)
        shown = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    line = next((line for line in shown.splitlines() if "REG:" in line), None)
    if line is None:
        raise ValueError(f"cuobjdump reported no register count: {shown!r}")
    counts = dict(field.split(":") for field in line.split() if field.startswith(("REG:", "STACK:", "LOCAL:")))
    return int(counts["REG"]), int(counts["STACK"]) + int(counts["LOCAL"])


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
