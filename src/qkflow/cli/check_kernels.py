"""`qkflow check --kernels`: which kernels run on this machine, how they were built, and their error."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

from qkflow.laws.kernels import KERNEL_TOLERANCES, KernelCheck, default_device, run_kernel_checks
from qkflow.ops.csrc import build
from qkflow.ops.delta_rule import choose_backend, triton_error


def check_kernels(console: Console) -> int:
    """Print what runs on this machine and a line for each kernel. Returns the number of kernels that fail."""
    with console.status("loading the kernels"):
        facts = backend_facts()
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for name, fact in facts.items():
        table.add_row(name, fact)
    console.print(table, markup=False, highlight=False)
    with console.status("checking the kernels"):
        rows = run_kernel_checks()
    console.print()
    console.print(error_table(rows))
    return sum(not row.ok for row in rows)


def backend_facts() -> dict[str, str]:
    """Which backend of the delta rule runs on the CPU and the GPU, and how the C library was built."""
    backend, info = choose_backend(torch.device("cpu")), build.build_info()
    is_fastest = backend == "cpu" or (backend == "chunked" and info is None)
    facts = {"delta rule": f"{backend}, {'the fastest available' if is_fastest else 'set by QKFLOW_DELTA'}"}
    if (device := default_device()).type == "cuda":
        error = triton_error(device)
        gpu_backend = "triton, the fastest available" if error is None else f"chunked; Triton cannot run: {error}"
        facts["on the GPU"] = f"{gpu_backend} ({torch.cuda.get_device_name(device)})"
    if info is None:
        return facts | {"C kernels": f"none: {build.load_error()}"}
    origin = "from the cache" if info.seconds is None else f"built in {info.seconds:.1f} s"
    return facts | {
        "library": f"{info.library.name}, {origin}",
        "folder": str(info.library.parent),
        "compiler": info.compiler,
        "threads": str(torch.get_num_threads()) if build.has_openmp() else "1 (the compiler has no OpenMP)",
    }


def error_table(rows: Sequence[KernelCheck]) -> Table:
    """One row per kernel and precision."""
    table = Table(box=None, pad_edge=False)
    for column in ("kernel", "precision", "values", "gradients", "allowed", ""):
        table.add_column(column, justify="right" if column in ("values", "gradients", "allowed") else "left")
    for row in rows:
        gradients = "\N{EN DASH}" if row.gradients is None else f"{row.gradients:.0e}"
        verdict = "[green]ok[/]" if row.ok else "[red]failed[/]"
        table.add_row(
            row.kernel,
            row.precision,
            f"{row.values:.0e}",
            gradients,
            f"{KERNEL_TOLERANCES[row.precision]:.0e}",
            verdict,
        )
    table.caption = "largest error for similar keys, relative to the largest value"
    table.caption_justify = "left"
    return table
