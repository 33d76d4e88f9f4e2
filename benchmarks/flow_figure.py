"""The figure of `flow.py`: networks (solid) and the reduced flow (dashed)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qkflow.report.palette import LIGHT
from qkflow.theory.gradient_flow import FlowConfig, integrate_flow

WIDTH, TOP, BOTTOM = 300, 74, 330
LEFTS = (56, 386, 716)
X, Y = (1.3, 0.0025), (0.3, 1.0)
PANELS = (
    ("CACO-flow", "CACO, the flow's assumptions met", ("r = 1", "r = 2", "r = 5")),
    ("CACO", "CACO, the published task", ("r = 1", "r = 2", "r = 5")),
    ("FAFO", "FAFO, the published task", ("r = 1", "r = 10", "r = 20")),
)
COLOURS = (LIGHT["arm0"], LIGHT["arm1"], LIGHT["arm2"])


def synthetic_flow(r: float) -> FlowConfig:
    """Return the flow of the synthetic task: 22 of 62 tokens are informative on average, and there are four labels.

    b is not fitted: see docs/results/flow.md.
    """
    return FlowConfig(informative=22, uninformative=40, classes=4, b=25.0, r=r)


def draw(results: Mapping[str, dict[str, Any]], out: Path) -> None:
    """Write the figure."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1040 390" width="1040" height="390"'
        f' font-family="system-ui, sans-serif" font-size="12" fill="{LIGHT["ink"]}" role="img">',
        "<title>Attention on the class's tokens against the loss: networks and the reduced flow</title>",
        f'<rect width="1040" height="390" fill="{LIGHT["paper"]}"/>',
        _text(LEFTS[0] - 40, 22, "Attention on the class's tokens as the loss falls", size=16, weight="600"),
        _text(
            LEFTS[0] - 40,
            42,
            "solid: one-layer networks, mean and range of five seeds; dashed: the reduced flow",
        ),
    ]
    for left, (name, title, arms) in zip(LEFTS, PANELS, strict=True):
        parts += [_text(left, TOP - 10, title, weight="600"), *_axes(left)]
        for colour, arm in zip(COLOURS, arms, strict=True):
            parts += _arm(left, results[name], arm, colour)
    out.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def _arm(left: int, result: Mapping[str, Any], arm: str, colour: str) -> list[str]:
    i = result["arms"].index(arm)
    grid = np.geomspace(*X, 80)
    rows = np.array([_mass_at_loss(grid, *pair) for pair in zip(result["loss"][i], result["mass"][i], strict=True)])
    is_reached = np.isfinite(rows).all(0)
    rows, grid = rows[:, is_reached], grid[is_reached]
    band = [*zip(grid, rows.min(0), strict=True), *reversed([*zip(grid, rows.max(0), strict=True)])]
    path = integrate_flow(synthetic_flow(float(arm.removeprefix("r = "))), loss=X[1], points=120)
    lines = [
        f'<polygon points="{_points(left, band)}" fill="{colour}" fill-opacity="0.18"/>',
        f'<polyline points="{_points(left, zip(grid, rows.mean(0), strict=True))}" fill="none" stroke="{colour}"'
        ' stroke-width="2"/>',
    ]
    shown = path.loss <= X[0]
    dashed = _points(left, zip(path.loss[shown], path.alpha[shown], strict=True))
    lines.append(f'<polyline points="{dashed}" fill="none" stroke="{colour}" stroke-dasharray="5 4"/>')
    x, y = _pixel(left, grid[-1], rows.mean(0)[-1])
    is_inside = x < left + WIDTH - 50
    is_above = not is_inside and arm != "r = 1"
    position = (x + 4, y + 12) if is_inside else (left + WIDTH, y - 8 if is_above else y + 16)
    lines.append(_text(*position, arm, anchor="start" if is_inside else "end", fill=colour, weight="600"))
    return lines


def _mass_at_loss(levels: np.ndarray, loss: Sequence[float], mass: Sequence[float]) -> np.ndarray:
    """Return the mass when the loss first reaches each level; NaN if it never does."""
    first = np.minimum.accumulate(loss)
    interpolated = np.interp(-np.log(levels), -np.log(first), mass)
    return np.where(levels >= first[-1], interpolated, np.nan)


def _axes(left: int) -> list[str]:
    lines = []
    for level in (1.0, 0.3, 0.1, 0.03, 0.01, 0.003):
        x, _ = _pixel(left, level, Y[0])
        lines.append(f'<path d="M{x:.1f} {TOP}V{BOTTOM}" stroke="{LIGHT["grid"]}"/>')
        lines.append(_text(x, BOTTOM + 18, f"{level:g}", anchor="middle"))
    for mass in (0.4, 0.6, 0.8, 1.0):
        _, y = _pixel(left, X[0], mass)
        lines.append(f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="{LIGHT["grid"]}"/>')
        lines.append(_text(left - 8, y + 4, f"{mass:g}", anchor="end"))
    lines.append(f'<path d="M{left} {TOP}V{BOTTOM}h{WIDTH}" fill="none" stroke="{LIGHT["soft"]}"/>')
    lines.append(_text(left + WIDTH / 2, BOTTOM + 40, "loss (nats)", anchor="middle", fill=LIGHT["soft"]))
    return lines


def _pixel(left: int, loss: float, mass: float) -> tuple[float, float]:
    across = (np.log(X[0]) - np.log(loss)) / (np.log(X[0]) - np.log(X[1]))
    return left + WIDTH * float(across), BOTTOM - (BOTTOM - TOP) * (mass - Y[0]) / (Y[1] - Y[0])


def _points(left: int, pairs: Any) -> str:
    return " ".join("{:.1f},{:.1f}".format(*_pixel(left, loss, mass)) for loss, mass in pairs)


def _text(x: float, y: float, content: str, **style: str | int) -> str:
    names = {"size": "font-size", "weight": "font-weight", "anchor": "text-anchor"}
    attributes = "".join(f' {names.get(name, name)}="{value}"' for name, value in style.items())
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{content}</text>'
