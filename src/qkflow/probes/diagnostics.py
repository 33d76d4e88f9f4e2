"""Diagnostics of a layer as plain data, which a report draws.

`diagnostics(mechanism, x)` dispatches on the class of the mechanism. A mechanism of your own inherits the diagnostics
of its base class; register a function to add others:

    @diagnostics.register(MyAttention)
    def _(mechanism, x):
        inherited = diagnostics.dispatch(StandardAttention)(mechanism, x)
        return (*inherited, Diagnostic(title="gate", ...))
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from typing import Literal

from qkflow.errors import UsageError
from qkflow.mechanisms.base import Mechanism, Stream
from qkflow.mechanisms.differential import DifferentialAttention
from qkflow.mechanisms.softmax import SoftmaxMechanism


@dataclass(frozen=True, kw_only=True)
class Diagnostic:
    """The data of one figure.

    Layers with the same title share a figure: side by side if `x` is a single point, otherwise one at a time.

    >>> Diagnostic(title="gate", kind="bars", x=("head 1", "head 2"), series=("g",), values=((0.2, 0.9),)).values[0][1]
    0.9
    """

    title: str
    kind: Literal["lines", "bars", "heat", "wheel"]
    """A line or a row of bars per series; a heat map with one row per series; or a circle per series, with a point at
    each angle in radians."""
    x: tuple[str | float, ...]
    """Names, or numbers in increasing order. A single point is one number per layer."""
    series: tuple[str, ...]
    """Names of the series."""
    values: tuple[tuple[float, ...], ...]
    """One row per series, one number per `x`; numbers that are not finite are not drawn."""
    x_label: str = ""
    y_label: str = ""
    note: str = ""
    """A sentence that explains the figure."""

    def __post_init__(self) -> None:
        shape = (len(self.values), *sorted({len(row) for row in self.values}))
        if shape != (len(self.series), len(self.x)) or not self.series or not self.x:
            raise UsageError(
                f"diagnostic {self.title!r} has rows of {[len(row) for row in self.values]} values, expected"
                f" {len(self.series)} rows (one per series, at least one) of {len(self.x)} (one per x, at least one)"
            )


@singledispatch
def diagnostics(mechanism: Mechanism, x: Stream) -> tuple[Diagnostic, ...]:
    """Return the diagnostics of a mechanism on the input `x`; none unless registered for its class."""
    return ()


@diagnostics.register(DifferentialAttention)
def _differential(mechanism: DifferentialAttention, x: Stream) -> tuple[Diagnostic, ...]:
    lam = Diagnostic(
        title="lambda, the weight of the subtracted map",
        kind="bars",
        x=("lambda",),
        series=("learned", "initial"),
        values=((float(mechanism.lam.detach()),), (mechanism.lambda_init,)),
        y_label="lambda",
        note="Rows of the attention map sum to 1 - lambda; at 0 the second map has no effect.",
    )
    return (*diagnostics.dispatch(SoftmaxMechanism)(mechanism, x), lam)
