"""Registers, spills and shared memory of the Triton kernels, by compiling them ahead of time; no GPU is needed.

The kernels are compiled with the tiles that a call with these widths and this dtype would use.
"""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qkflow.errors import UsageError
from qkflow.ops.delta_rule import triton_launch as kernels
from qkflow.ops.delta_rule.chunked import Saved
from qkflow.ops.delta_rule.inputs import DeltaInputs

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
    gates = [torch.empty(2, 100, 2, device="meta") for _ in range(3)]
    state = torch.empty(2, 2, value, key, device="meta")
    recorded: list[kernels.Launch] = []
    inputs = DeltaInputs(q, torch.empty_like(q), v, *gates)
    kernels.forward(inputs.map(lambda x: x[:, :1]), state, 1.0, 0, False, recorded.append)
    o, final, errors, checkpoints = kernels.forward(inputs, state, 1.0, 0, True, recorded.append)
    kernels.backward(o, final, inputs, Saved(o, errors, checkpoints), 1.0, 0, recorded.append)
    return {item.kernel.fn.__name__: item for item in recorded}


def names() -> list[str]:
    """Names of the kernels that a call launches."""
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
    options = kernels.options(item.tile)
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    registers, spills = _resources(compiled.asm["cubin"])
    kind = str(dtype).removeprefix("torch.")
    return KernelResources(
        kernel=name,
        key=key,
        value=value,
        dtype=kind,
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
        raise UsageError(f"cuobjdump reported no register count: {shown!r}")
    counts = dict(field.split(":") for field in line.split() if field.startswith(("REG:", "STACK:", "LOCAL:")))
    return int(counts["REG"]), int(counts["STACK"]) + int(counts["LOCAL"])
