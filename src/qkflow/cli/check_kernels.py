"""`qkflow check --kernels`: which fast forms run here, how they were built, and how far from their references."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

from qkflow.laws.kernels import WITHIN, Agreement, agreements, own_device
from qkflow.ops.csrc import build
from qkflow.ops.delta_rule import choose_backend, triton_error


def try_kernels(console: Console) -> int:
    """Print what runs here and a line for each fast form; how many are off."""
    with console.status("loading the kernels"):
        facts = about()
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for name, fact in facts.items():
        table.add_row(name, fact)
    console.print(table, markup=False, highlight=False)
    with console.status("trying the kernels"):
        rows = agreements()
    console.print()
    console.print(compared(rows))
    return sum(not row.ok for row in rows)


def about() -> dict[str, str]:
    """Which form of the delta rule is taken on a CPU, and on a GPU if there is one, and where its library is from."""
    chosen, fault, info = choose_backend(torch.device("cpu")), build.load_error(), build.build_info()
    why = "asked for by QKFLOW_DELTA"
    if chosen == "cpu" or (chosen == "chunked" and info is None):
        why = "the fastest that runs here"
    facts = {"delta rule": f"{chosen}, {why}"}
    if (device := own_device()).type == "cuda":
        facts["on the GPU"] = f"{_on_a_gpu(device)} ({torch.cuda.get_device_name(device)})"
    if info is None:
        return facts | {"kernels in C": f"none: {fault}"}
    took = "there already" if info.seconds is None else f"built now, in {info.seconds:.1f} s"
    return facts | {
        "library": f"{info.library.name}, {took}",
        "folder": str(info.library.parent),
        "compiler": info.compiler,
        "threads": str(torch.get_num_threads()) if build.has_openmp() else "1 (the compiler has no OpenMP)",
    }


def _on_a_gpu(device: torch.device) -> str:
    fault = triton_error(device)
    return "triton, the fastest that runs here" if fault is None else f"chunked: Triton's kernels cannot run: {fault}"


def compared(rows: Sequence[Agreement]) -> Table:
    """One row a form and precision."""
    table = Table(box=None, pad_edge=False)
    for column in ("kernel", "precision", "values", "gradients", "allowed", ""):
        table.add_column(column, justify="right" if column in ("values", "gradients", "allowed") else "left")
    for row in rows:
        gradients = "\N{EN DASH}" if row.gradients is None else f"{row.gradients:.0e}"
        verdict = "[green]ok[/]" if row.ok else "[red]off[/]"
        table.add_row(
            row.kernel, row.precision, f"{row.values:.0e}", gradients, f"{WITHIN[row.precision]:.0e}", verdict
        )
    table.caption = "largest error on alike keys, as a part of the largest number"
    table.caption_justify = "left"
    return table
