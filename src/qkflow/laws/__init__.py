"""What every mechanism must obey, in float64, values and gradients: run them on a mechanism of your own.

>>> from qkflow.mechanisms import mechanism
>>> check(mechanism("standard"), only=["causality", "padding"])
[LawReport(law='causality', outcome='passed', detail=''), LawReport(law='padding', outcome='passed', detail='')]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from qkflow.errors import unknown
from qkflow.laws import modules, sequences
from qkflow.laws.cases import Bench, LawNotApplicable, LawViolation
from qkflow.mechanisms.base import Factory

__all__ = ["LAWS", "Bench", "LawReport", "LawViolation", "check"]

LAWS: Mapping[str, Callable[[Bench], None]] = {
    law.__name__: law
    for law in (
        sequences.causality,
        sequences.splitting,
        sequences.stepping,
        sequences.padding,
        sequences.packing,
        sequences.batching,
        sequences.carrying,
        modules.compilation,
        modules.declaration,
        modules.saving,
        modules.precision,
        modules.determinism,
        modules.mapping,
        modules.circuitry,
    )
}
"""Every general law by name; the first line of its docstring is its statement."""


@dataclass(frozen=True)
class LawReport:
    """How a mechanism stands to a law, with the smallest case in which it broke it."""

    law: str
    outcome: Literal["passed", "failed", "skipped"]
    detail: str = ""


def check(
    factory: Factory,
    *,
    only: Iterable[str] | None = None,
    width: int = 32,
    heads: int = 4,
    backend: str = "inductor",
    dtype: torch.dtype = torch.float64,
) -> list[LawReport]:
    """Try a mechanism on every law (or `only` some), smallest cases first; an exception of its own breaks the law.

    A mechanism that knows no float64 is tried with `dtype` float32, where 1e-4 is allowed in place of 1e-10.
    """
    bench = Bench(factory=factory, width=width, heads=heads, backend=backend, dtype=dtype)
    names = list(LAWS) if only is None else list(only)
    for name in names:
        if name not in LAWS:
            raise unknown("law", name, LAWS)
    return [_judge(name, bench) for name in names]


def _judge(name: str, bench: Bench) -> LawReport:
    try:
        LAWS[name](bench)
    except LawViolation as broken:
        return LawReport(name, "failed", str(broken))
    except LawNotApplicable as absent:
        return LawReport(name, "skipped", str(absent))
    except Exception as error:  # whatever a mechanism under test throws is its way of breaking the law
        lines = str(error).strip().splitlines() or [""]
        return LawReport(name, "failed", f"{type(error).__name__}: {lines[0]}")
    return LawReport(name, "passed")
