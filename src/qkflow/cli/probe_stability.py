"""What `qkflow probe` says of delta memories."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qkflow.formatting import MISSING, format_number
from qkflow.probes import StabilityLook
from qkflow.report.probed import Part
from qkflow.report.rows import Table

ROUNDING = 1e-6
"""A product that exceeds one by no more than this is not said to grow."""
_NOTE = (
    "A token's error is multiplied by 1 - beta a, which shrinks it if beta a is in (0, 2); rho is the largest such"
    " factor. |T| is the most by which a token can stretch a memory, then so many tokens in a row; |S| is the memory's"
    " size at the end; bound/error is how far the theorem's bound lies above the error, in the median."
)


def part(layers: Sequence[StabilityLook | None]) -> Part:
    """Everything said of delta memories."""
    return Part(name="stability", title="Stability", table=table(layers), verdict=verdict(layers), note=_NOTE)


def verdict(layers: Sequence[StabilityLook | None]) -> str:
    """In words, whether the memories are stable on this text, and no more than the figures say."""
    found = [layer for layer in layers if layer is not None]
    if not all(map(math.isfinite, (x for layer in found for x in _figures(layer)))):
        return "Some figures are not finite: the model has diverged, or its numbers are too large to look into."
    many = f"{len(found)} delta layer{'' if len(found) == 1 else 's'}"
    outside = sum(layer.steps.outside for layer in found) / len(found)
    if outside == 0:
        said = (
            f"On this text every token's error shrinks in each of {many} (rho at most {max(x.rho for x in found):.4g})"
        )
    else:
        hurt = sum(layer.steps.outside > 0 for layer in found)
        said = f"{100 * outside:.2g} % of the steps beta a lie outside (0, 2), in {hurt} of {many}: no shrinking there"
    grown = [layer for layer in found if any(each.most > 1 + ROUNDING for each in layer.growth)]
    if grown:
        most = max((each for layer in grown for each in layer.growth), key=lambda each: each.most)
        last = max((layer.growth[-1] for layer in grown), key=lambda each: each.most)
        long = "" if last.tokens == most.tokens else f" and {last.most:.3g} over {last.tokens}"
        growth = f"grow in {len(grown)} of them, up to {most.most:.3g} times over {most.tokens} tokens{long}"
        said = f"{said}{', but' if outside == 0 else '; and'} products of transitions {growth}"
    elif any(layer.growth for layer in found):
        said = f"{said}{', and' if outside == 0 else '; but'} no product of transitions grows"
    allowed = max(layer.allowed for layer in found)
    if allowed <= 1 + ROUNDING:
        return f"{said}. Over the whole text these gates let no queries and keys make a memory grow."
    return f"{said}. With these gates a memory could at worst grow {allowed:.3g} times a token."


def table(layers: Sequence[StabilityLook | None]) -> Table:
    """A row for each layer."""
    tokens = max((each.tokens for layer in layers if layer is not None for each in layer.growth), default=0)
    product = f"{tokens} tokens" if tokens else "product"
    columns = ("layer", "beta a: mean", "95 %", "rho", "|T|", product, "|S| end", "bound/error")
    rows = []
    for number, layer in enumerate(layers, start=1):
        if layer is None:
            rows.append((f"{number}", *[MISSING] * (len(columns) - 1)))
            continue
        rows.append(
            (
                f"{number}",
                format_number(layer.steps.mean),
                format_number(layer.steps.quantiles[-1]),
                format_number(layer.rho),
                format_number(layer.norm),
                _brief(layer.growth[-1].most) if layer.growth else MISSING,
                _brief(layer.memory[-1]),
                _brief(layer.slack),
            )
        )
    return Table(caption="How stable each layer's memory is", columns=columns, rows=tuple(rows))


def _brief(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else MISSING


def _figures(layer: StabilityLook) -> tuple[float, ...]:
    return layer.steps.mean, layer.rho, layer.norm, layer.allowed, layer.memory[-1], *(x.most for x in layer.growth)
