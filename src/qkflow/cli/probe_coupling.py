"""What `qkflow probe` says of couplings."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qkflow.formatting import MISSING, format_number
from qkflow.probes import CouplingLook
from qkflow.report.probed import Part
from qkflow.report.rows import Table

FAINT = 0.01
"""Below this part of the identity, a dependence is called hardly there."""
_NOTE = (
    "|dk'/dq| says how much of a moved key depends on its query, |dq'/dk| the other way round; 1 is the size of the"
    " identity. Energy drift is how far a pair strays from the energy it began with, where the force has a potential."
)


def part(layers: Sequence[CouplingLook | None]) -> Part:
    """Everything said of couplings."""
    return Part(name="coupling", title="Couplings", table=table(layers), verdict=verdict(layers), note=_NOTE)


def verdict(layers: Sequence[CouplingLook | None]) -> str:
    """In words, whether anything passes between queries and keys, and no more than the figures say."""
    found = [layer for layer in layers if layer is not None]
    coupled = [layer for layer in found if not layer.control]
    if not coupled:
        names = " and ".join(dict.fromkeys(layer.dynamics for layer in found))
        return f"A control ({names}): nothing passes between queries and keys, by construction."
    keys = [layer.strength.key_on_query for layer in coupled]
    queries = [layer.strength.query_on_key for layer in coupled]
    if not all(map(math.isfinite, keys + queries)):
        return "Some figures are not finite: the model has diverged, or its numbers are too large to look into."
    many = f"{len(coupled)} coupled layer{'' if len(coupled) == 1 else 's'}"
    used, taken = sum(size >= FAINT for size in keys), sum(size >= FAINT for size in queries)
    if not used and not taken:
        return f"Hardly used on this text: in none of {many} does |dk'/dq| or |dq'/dk| reach {FAINT}."
    if not used and all(layer.dt is not None for layer in coupled):
        return (
            f"No sign that the coupling is used on this text: in none of {many} does |dk'/dq| reach {FAINT}. What is"
            " left is nearly a drift of queries along their keys, which a plain projection could do as well."
        )
    always = any(layer.energy is not None for layer in coupled)
    return (
        f"On this text keys depend on their queries in {used} of {many} (|dk'/dq| at least {FAINT}, up to"
        f" {max(keys):.2g}), queries on their keys in {taken} (|dq'/dk| up to {max(queries):.2g})."
        f"{' A potential does this from the start, before any training.' if always else ''}"
        " That the coupling moves them does not say that it helps: qkflow compare does."
    )


def table(layers: Sequence[CouplingLook | None]) -> Table:
    """A row for each layer."""
    columns = ("layer", "dynamics", "dt (start → now)", "|dk'/dq|", "|dq'/dk|", "energy drift")
    rows = []
    for number, layer in enumerate(layers, start=1):
        if layer is None:
            rows.append((f"{number}", *[MISSING] * 5))
            continue
        dt = MISSING if layer.dt is None else f"{layer.dt_start:g} → {format_number(layer.dt)}"
        sizes = format_number(layer.strength.key_on_query), format_number(layer.strength.query_on_key)
        drift = MISSING if layer.energy is None else f"{layer.energy.drift:.2g}"
        rows.append((f"{number}", layer.dynamics, dt, *sizes, drift))
    return Table(caption="What each layer's coupling passes on", columns=columns, rows=tuple(rows), words=(0, 1))
