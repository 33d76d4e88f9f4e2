"""The laws that every mechanism must satisfy, in float64, for values and gradients, and `check` to test your own.

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
from qkflow.laws.comparison import LawContext, LawNotApplicable, LawViolation
from qkflow.mechanisms.base import Factory

__all__ = ["LAWS", "LawContext", "LawReport", "LawViolation", "check"]

LAWS: Mapping[str, Callable[[LawContext], None]] = {
    law.__name__: law
    for law in (
        sequences.causality,
        sequences.splitting,
        sequences.decoding,
        sequences.padding,
        sequences.packing,
        sequences.batching,
        sequences.states,
        modules.compilation,
        modules.cost,
        modules.state_dict,
        modules.precision,
        modules.determinism,
        modules.attention_map,
        modules.circuits,
    )
}
"""All laws by name; the first line of each docstring states the law."""


@dataclass(frozen=True)
class LawReport:
    """The result of checking one law."""

    law: str
    outcome: Literal["passed", "failed", "skipped"]
    """Skipped if the mechanism lacks the method that the law is about."""
    detail: str = ""
    """The smallest failing case, or the reason for skipping."""


def check(
    factory: Factory,
    *,
    only: Iterable[str] | None = None,
    width: int = 32,
    heads: int = 4,
    backend: str = "inductor",
    dtype: torch.dtype = torch.float64,
) -> list[LawReport]:
    """Check a mechanism against all laws (or `only` some), smallest cases first. An exception counts as a failure.

    For a mechanism without float64, use `dtype=torch.float32`, with a tolerance of 1e-4 instead of 1e-10. `backend` is
    the torch.compile backend.
    """
    context = LawContext(factory=factory, width=width, heads=heads, backend=backend, dtype=dtype)
    names = list(LAWS) if only is None else list(only)
    for name in names:
        if name not in LAWS:
            raise unknown("law", name, LAWS)
    return [_check_law(name, context) for name in names]


def _check_law(name: str, context: LawContext) -> LawReport:
    try:
        LAWS[name](context)
    except LawViolation as violation:
        return LawReport(name, "failed", str(violation))
    except LawNotApplicable as reason:
        return LawReport(name, "skipped", str(reason))
    except Exception as error:  # a mechanism under test may raise anything
        lines = str(error).strip().splitlines() or [""]
        return LawReport(name, "failed", f"{type(error).__name__}: {lines[0]}")
    return LawReport(name, "passed")
