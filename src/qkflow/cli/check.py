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

from qkflow.cli.check_kernels import try_kernels
from qkflow.cli.options import flag
from qkflow.errors import UsageError, unknown
from qkflow.laws import LAWS, check
from qkflow.mechanisms import Factory, mechanism

_STYLES = {"passed": "green", "failed": "red", "skipped": "yellow"}


@dataclass(frozen=True, kw_only=True)
class Check:
    """Try a mechanism, yours or ours, on every law: causality, cache, padding, packing, compilation and so on.

    A broken law comes with the smallest case that breaks it, and the exit code is 1. With --kernels: what runs on this
    machine, how it was built, and how far it is from its reference; the exit code is 1 if it is too far.

    For example:
      qkflow check standard:window=16
      qkflow check mypackage.attention:MyAttention
      qkflow check mypackage.attention:MyAttention --law padding --law packing
      qkflow check --kernels
    """

    factory: Annotated[str | None, tyro.conf.Positional, flag("FACTORY")] = None
    """A mechanism's name, or package.module:name of what makes one when called as name(width, heads, layer, layers)."""
    kernels: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Whether to try the fast forms on this machine; without FACTORY, them alone."""
    law: Annotated[list[str], tyro.conf.UseAppendAction] = field(default_factory=list)
    """Only this law; may be given several times."""
    width: int = 32
    """Width of the stream it is tried with."""
    heads: int = 4
    """Heads it is tried with."""

    def run(self) -> int:
        """Print a line for each kernel and each law; 1 if any is off or broken."""
        console = Console()
        if self.factory is None and (self.law or not self.kernels):
            raise UsageError("nothing to try the laws on: give FACTORY, such as standard, or --kernels alone")
        for name in self.law:
            if name not in LAWS:
                raise unknown("law", name, LAWS)
        factory = None if self.factory is None else find_factory(self.factory)
        off = try_kernels(console) if self.kernels else 0
        broken = 0 if factory is None else self._try_laws(factory, console)
        return 1 if off or broken else 0

    def _try_laws(self, factory: Factory, console: Console) -> int:
        """Print a line for each law; how many are broken."""
        factory(self.width, self.heads, layer=0, layers=1)  # what cannot be built at all is not the laws' business
        table = Table("law", "", "smallest case that breaks it", box=None, pad_edge=False)
        broken = 0
        for name in self.law or LAWS:
            with console.status(f"trying {name}"):
                (verdict,) = check(factory, only=[name], width=self.width, heads=self.heads)
            broken += verdict.outcome == "failed"
            table.add_row(name, f"[{_STYLES[verdict.outcome]}]{verdict.outcome}[/]", Text(verdict.detail))
        console.print(table)
        return broken


def find_factory(name: str) -> Factory:
    """A mechanism by name, or by where it lies; modules of the present folder are found too."""
    module_name, colon, attribute = name.partition(":")
    if not colon or "=" in attribute:
        return mechanism(name)
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        value = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # whatever the module throws while it is imported
        if isinstance(error, AttributeError) and module_name in sys.modules:
            raise UsageError(
                f"{module_name} has no {attribute!r}: give package.module:name of what it defines"
            ) from error
        raise UsageError(
            f"cannot import {module_name!r} ({error}): give package.module:name as Python imports it"
        ) from error
    if not callable(value):
        raise UsageError(
            f"{name} is {type(value).__name__}: expected something to call as name(width, heads, layer, layers)"
        )
    return cast(Factory, value)
