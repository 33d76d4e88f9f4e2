"""The laws that every mechanism must satisfy, in float64, for values and gradients, and `check` to test your own.

>>> from qkflow.mechanisms import mechanism
>>> check(mechanism("standard"), only=["causality", "padding"])
[LawReport(law='causality', outcome='passed', detail=''), LawReport(law='padding', outcome='passed', detail='')]
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from qkflow.errors import UsageError, out_of_memory, unknown
from qkflow.laws import modules, sequences
from qkflow.laws.comparison import LawContext, LawNotApplicable, LawViolation
from qkflow.mechanisms.base import Factory

__all__ = ["LAWS", "LawContext", "LawReport", "LawViolation", "check"]

LAWS: Mapping[str, Callable[[LawContext], None]] = {
    law.__name__: law
    for law in (
        sequences.causality,
        sequences.permutation,
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

    A factory that cannot build a layer raises a `UsageError`.

    For a mechanism without float64, use `dtype=torch.float32`, with a tolerance of 1e-4 instead of 1e-10. `backend` is
    the torch.compile backend.
    """
    context = LawContext(factory=factory, width=width, heads=heads, backend=backend, dtype=dtype)
    names = list(LAWS) if only is None else list(only)
    for name in names:
        if name not in LAWS:
            raise unknown("law", name, LAWS)
    check_factory(factory, width, heads)
    return [_check_law(name, context) for name in names]


def check_factory(factory: Factory, width: int, heads: int) -> None:
    """Raise a `UsageError` unless the factory builds a layer that takes a state and a layout.

    Otherwise the laws would all fail for the same reason, which has nothing to do with them.
    """
    if width < 1 or heads < 1:
        raise UsageError(f"width and heads must be at least 1, got {width} and {heads}")
    name = getattr(factory, "__name__", type(factory).__name__)
    try:
        with torch.random.fork_rng(devices=()):
            layer: object = factory(width, heads, layer=0, layers=1)
    except UsageError:
        raise
    except Exception as error:  # it may raise anything
        if out_of_memory(error) is not None:
            raise
        message = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise UsageError(
            f"cannot build a layer: {name}({width}, {heads}, layer=0, layers=1) raised {message}"
        ) from error
    if not isinstance(layer, nn.Module):
        raise UsageError(
            f"{name}({width}, {heads}, layer=0, layers=1) returned {type(layer).__name__}, expected an nn.Module"
        )
    try:
        signature = inspect.signature(layer.forward)
    except (TypeError, ValueError):  # not written in Python
        return
    try:
        signature.bind(None, state=None, layout=None)
    except TypeError as error:
        raise UsageError(
            f"{type(layer).__name__}.forward({', '.join(signature.parameters)}) cannot be called as"
            f" forward(x, state=None, layout=None): {error}"
        ) from error


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
