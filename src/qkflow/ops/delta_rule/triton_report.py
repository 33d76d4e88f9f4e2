"""What the Triton kernels take of a GPU, found out without one: registers, spills and shared memory, ahead of time.

The kernels are those that a call would run at these widths and in this type, with the tiles it would pick.
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
from qkflow.ops.delta_rule import triton as kernels
from qkflow.ops.delta_rule.chunked import Kept
from qkflow.ops.delta_rule.inputs import Inputs

FORWARD = ("few", "inside", "states", "outputs")
BACKWARD = ("inside_backward", "states_backward", "pairs_backward", "gradients", "decay_backward")
KERNELS = FORWARD + BACKWARD
"""By name, in the order of their launch."""
_TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What one kernel takes."""

    kernel: str
    key: int
    value: int
    dtype: str
    target: int
    """80 for A100s, 90 for H100s."""
    registers: int
    """Of a thread; 255 are the most."""
    spills: int
    """Bytes of a thread that did not fit into registers."""
    shared: int
    """Bytes of a program."""
    warps: int


def launches(key: int, value: int, dtype: torch.dtype) -> dict[str, kernels.Launch]:
    """Every kernel of the delta rule by name, with all options and as it would be launched."""
    shape = {"device": "meta", "dtype": dtype}
    q, v = torch.empty(2, 100, 2, key, **shape), torch.empty(2, 100, 2, value, **shape)
    gates = [torch.empty(2, 100, 2, device="meta") for _ in range(3)]
    state = torch.empty(2, 2, value, key, device="meta")
    found: list[kernels.Launch] = []
    given = Inputs(q, torch.empty_like(q), v, *gates)
    kernels.forward(given.map(lambda x: x[:, :1]), state, 1.0, 0, False, found.append)
    o, final, errors, marks = kernels.forward(given, state, 1.0, 0, True, found.append)
    kernels.backward(o, final, given, Kept(o, errors, marks), 1.0, 0, found.append)
    return {it.kernel.fn.__name__: it for it in found}


def names() -> list[str]:
    """Every kernel that a call launches."""
    return list(launches(64, 64, torch.float32))


def usage(name: str, key: int, value: int, dtype: torch.dtype, target: int) -> Usage:
    """Compile a kernel for a GPU of a generation, and read what it takes off the binary."""
    it = launches(key, value, dtype)[name]
    types = {x: _type(y) for x, y in it.given.items()}
    absent = {x: None for x, y in it.given.items() if y is None}
    names = it.kernel.arg_names
    # as a launch would find them: where tensors begin, vectors of 16 bytes do
    aligned = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(names) if types.get(x, "")[:1] == "*"}
    source = ASTSource(
        fn=it.kernel,
        signature={x: types.get(x, "constexpr") for x in names},
        constexprs={**absent, **it.constants},
        attrs=aligned,
    )
    options = kernels.options(it.tile)
    made = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    registers, spills = _resources(made.asm["cubin"])
    kind = str(dtype).removeprefix("torch.")
    return Usage(
        kernel=name,
        key=key,
        value=value,
        dtype=kind,
        target=target,
        registers=registers,
        spills=spills,
        shared=made.metadata.shared,
        warps=it.tile.warps,
    )


def _type(x: Any) -> str:
    if x is None:
        return "constexpr"
    if isinstance(x, Tensor):
        return _TYPES[x.dtype]
    return "fp32" if isinstance(x, float) else "i32"


def _resources(binary: bytes) -> tuple[int, int]:
    """Registers, and bytes of local memory and of the stack, as NVIDIA's tool tells them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder) / "kernel.cubin").write_bytes(binary)
        shown = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    line = next((line for line in shown.splitlines() if "REG:" in line), None)
    if line is None:
        raise UsageError(f"cuobjdump says nothing of registers: {shown!r}")
    counts = dict(part.split(":") for part in line.split() if part.startswith(("REG:", "STACK:", "LOCAL:")))
    return int(counts["REG"]), int(counts["STACK"]) + int(counts["LOCAL"])
