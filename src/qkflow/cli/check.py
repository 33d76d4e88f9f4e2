"""`qkflow check`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, cast

import torch
import tyro
from rich.table import Table
from rich.text import Text

from qkflow.cli.console import Console
from qkflow.cli.options import flag
from qkflow.errors import UsageError, unknown
from qkflow.laws import LAWS, check
from qkflow.laws.kernels import KERNEL_TOLERANCES, KernelCheck, default_device, run_kernel_checks
from qkflow.mechanisms import Factory, mechanism
from qkflow.ops import attention
from qkflow.ops.csrc import build
from qkflow.ops.delta_rule import choose_backend, triton_error

_STYLES = {"passed": "green", "failed": "red", "skipped": "yellow"}


@dataclass(frozen=True, kw_only=True)
class Check:
    """Check a mechanism of qkflow, or your own, against every law.

    A failed law is reported with the smallest failing case.

    With --kernels, compare the kernels of this machine with their references.

    The exit code is 1 if a law fails or the error of a kernel is too large.

    For example:
      qkflow check standard:window=16
      qkflow check mypackage.attention:MyAttention
      qkflow check mypackage.attention:MyAttention --law padding --law packing
      qkflow check --kernels
    """

    factory: Annotated[str | None, tyro.conf.Positional, flag("FACTORY")] = None
    """Name of a mechanism, or package.module:name of a callable name(width, heads, layer, layers) that returns one."""
    kernels: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Check the kernels of this machine; without FACTORY, only these."""
    law: Annotated[list[str], tyro.conf.UseAppendAction] = field(default_factory=list)
    """Check only this law."""
    width: int = 32
    """Model width of the test cases."""
    heads: int = 4
    """Heads of the test cases."""
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """torch.compile backend of the law of compilation; eager needs no compiler."""

    def run(self) -> int:
        """Print a line for each kernel and each law; 1 if any of them fails."""
        console = Console()
        if self.factory is None and (self.law or not self.kernels):
            raise UsageError("nothing to check: give FACTORY, such as standard, or --kernels alone")
        for name in self.law:
            if name not in LAWS:
                raise unknown("law", name, LAWS)
        factory = None if self.factory is None else find_factory(self.factory)
        failures = check_kernels(console) if self.kernels else 0
        failures += 0 if factory is None else self._check_laws(factory, console)
        return 1 if failures else 0

    def _check_laws(self, factory: Factory, console: Console) -> int:
        """Print a line for each law. Returns the number of failed laws."""
        table = Table("law", "", "smallest failing case", box=None, pad_edge=False)
        failed = 0
        for name in self.law or LAWS:
            with console.status(f"checking {name}"):
                (report,) = check(factory, only=[name], width=self.width, heads=self.heads, backend=self.backend)
            failed += report.outcome == "failed"
            table.add_row(name, f"[{_STYLES[report.outcome]}]{report.outcome}[/]", Text(report.detail))
        console.print(table)
        return failed


def find_factory(name: str) -> Factory:
    """A mechanism by its name, or a callable by package.module:name; the current directory is searched as well."""
    module_name, colon, attribute = name.partition(":")
    if not colon or "=" in attribute:
        return mechanism(name)
    if (directory := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, directory)
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # an imported module may raise anything
        if isinstance(error, AttributeError) and module_name in sys.modules:
            raise UsageError(f"{module_name} has no {attribute!r}: give package.module:name") from error
        raise UsageError(f"cannot import {module_name!r} ({error}): give package.module:name") from error
    if not callable(factory):
        raise UsageError(f"{name} is a {type(factory).__name__}: expected a callable name(width, heads, layer, layers)")
    return cast(Factory, factory)


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
    """Which backends run on the CPU and the GPU, and how the C library was built."""
    backend, info = choose_backend(torch.device("cpu")), build.build_info()
    is_fastest = backend == "cpu" or (backend == "chunked" and info is None)
    facts = {"delta rule": f"{backend}, {'the fastest available' if is_fastest else 'set by QKFLOW_DELTA'}"}
    x = torch.zeros(1, 1, 1, 32)
    backend = attention.choose_backend(x, x, x)
    is_fastest = backend == "cpu" or info is None
    facts["attention"] = f"{backend}, {'the fastest available' if is_fastest else 'set by QKFLOW_ATTENTION'}"
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
