"""`qkflow check`."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, cast

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qkflow.cli.check_kernels import check_kernels
from qkflow.cli.options import flag
from qkflow.errors import UsageError, unknown
from qkflow.laws import LAWS, check
from qkflow.mechanisms import Factory, mechanism

_STYLES = {"passed": "green", "failed": "red", "skipped": "yellow"}


@dataclass(frozen=True, kw_only=True)
class Check:
    """Check a mechanism, ours or yours, against every law.

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
        factory(self.width, self.heads, layer=0, layers=1)  # raises what is wrong with the arguments
        table = Table("law", "", "smallest failing case", box=None, pad_edge=False)
        failed = 0
        for name in self.law or LAWS:
            with console.status(f"checking {name}"):
                (report,) = check(factory, only=[name], width=self.width, heads=self.heads)
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
