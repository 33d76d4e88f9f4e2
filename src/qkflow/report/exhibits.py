"""What mechanisms have to show of their own, drawn: layers side by side, or one at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qkflow.mechanisms.base import Exhibit
from qkflow.report.figures import label
from qkflow.report.palette import colour, dash, ink, marker
from qkflow.report.rows import Table
from qkflow.report.wording import fixed, visible

_PATTERNS = ("", "/", ".", "x", "-", "|")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Exhibits that belong together."""

    title: str
    note: str
    arms: tuple[str, ...]
    """Whose it is."""
    layers: tuple[int, ...]
    """The layers to choose from; none where they lie side by side."""
    figures: tuple[dict[str, Any], ...]
    """One for each of those layers, or a single one."""
    table: Table
    """The same numbers."""


def exhibit_groups(shown: Mapping[str, Sequence[tuple[Exhibit, ...]]], arms: Sequence[str]) -> list[Group]:
    """Group the exhibits of all arms (`shown`: by arm and by layer) and draw them; `arms` gives each its colour."""
    together: dict[tuple[str, str, str], list[tuple[str, int, Exhibit]]] = {}
    for arm, layers in shown.items():
        for layer, exhibits in enumerate(layers, start=1):
            for item in exhibits:
                alone = "" if len(item.x) == 1 and item.kind != "heat" else arm
                together.setdefault((item.title, item.kind, alone), []).append((arm, layer, item))
    return [_group(parts, arms, side_by_side=not key[2]) for key, parts in together.items()]


def _group(parts: Sequence[tuple[str, int, Exhibit]], arms: Sequence[str], *, side_by_side: bool) -> Group:
    first = parts[0][2]
    layers = () if side_by_side else tuple(layer for _, layer, _ in parts)
    figures = [_by_layer(parts, arms)] if side_by_side else [_one(item, arms.index(arm)) for arm, _, item in parts]
    return Group(
        title=first.title,
        note=first.note,
        arms=tuple(dict.fromkeys(arm for arm, _, _ in parts)),
        layers=layers,
        figures=tuple(figures),
        table=_table(parts),
    )


def _by_layer(parts: Sequence[tuple[str, int, Exhibit]], arms: Sequence[str]) -> dict[str, Any]:
    first, traces = parts[0][2], []
    for arm in dict.fromkeys(name for name, _, _ in parts):
        own = [(layer, item) for name, layer, item in parts if name == arm]
        for row, series in enumerate(own[0][1].series):
            x = [f"layer {layer}" for layer, _ in own]
            values = [item.values[row][0] if row < len(item.values) else None for _, item in own]
            traces.append(_series(first.kind, arms.index(arm), row, x, values, f"{arm}: {series}"))
    return {"data": traces, "layout": _layout(first.y_label, "")}


def _one(item: Exhibit, arm: int) -> dict[str, Any]:
    x = [label(value, 24) if isinstance(value, str) else value for value in item.x]
    if item.kind != "heat":
        rows = zip(item.series, item.values, strict=True)
        traces = [_series(item.kind, arm, row, x, values, series) for row, (series, values) in enumerate(rows)]
        return {"data": traces, "layout": _layout(item.y_label, item.x_label)}
    cells = [[_known(value) for value in row] for row in item.values]
    largest = max((abs(value) for row in cells for value in row if value is not None), default=0.0)
    heat = {
        "type": "heatmap",
        "x": x,
        "y": [label(series, 24) for series in item.series],
        "z": cells,
        "zmin": -largest or -1.0,
        "zmax": largest or 1.0,
        "colorscale": [[0, ink("less")], [0.5, ink("paper")], [1, ink("more")]],
        "colorbar": {"title": {"text": label(item.y_label, 24)}, "thickness": 10},
        "hovertemplate": "%{y}, %{x}: %{z:.4g}<extra></extra>",
    }
    layout = _layout("", item.x_label)
    layout["yaxis"] |= {"autorange": "reversed", "automargin": True}
    return {"data": [heat], "layout": layout}


def _series(
    kind: str, arm: int, row: int, x: Sequence[Any], values: Sequence[float | None], name: str
) -> dict[str, Any]:
    base = {"x": list(x), "y": [_known(value) for value in values], "name": label(name), "showlegend": True}
    hover = {"hovertemplate": "%{x}: %{y:.4g}<extra></extra>", "meta": {"arm": arm}}
    if kind == "bars":
        pattern = {"shape": _PATTERNS[row % len(_PATTERNS)], "fillmode": "replace", "size": 6, "solidity": 0.35}
        outline = {"color": ink(colour(arm)), "width": 1.5}
        return {
            "type": "bar",
            **base,
            **hover,
            "marker": {"color": ink(colour(arm)), "pattern": pattern, "line": outline},
        }
    look = {"line": {"color": ink(colour(arm), 1.0 if row == 0 else 0.6), "dash": dash(row), "width": 2}}
    points = {"symbol": marker(row), "size": 6}
    return {"type": "scatter", "mode": "lines+markers", **base, **hover, **look, "marker": points}


def _layout(y_title: str, x_title: str) -> dict[str, Any]:
    return {
        "height": 340,
        "margin": {"l": 58, "r": 12, "t": 12, "b": 48},
        "barmode": "group",
        "bargap": 0.35,
        "showlegend": True,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "xaxis": {"title": {"text": label(x_title, 60)}},
        "yaxis": {"title": {"text": label(y_title, 60)}, "zeroline": True},
    }


def _table(parts: Sequence[tuple[str, int, Exhibit]]) -> Table:
    rows = [
        (arm, f"{layer}", series, visible(str(x)), fixed(value))
        for arm, layer, item in parts
        for series, values in zip(item.series, item.values, strict=True)
        for x, value in zip(item.x, values, strict=True)
    ]
    columns = ("arm", "layer", "series", parts[0][2].x_label or "at", parts[0][2].y_label or "value")
    return Table(caption=parts[0][2].title, columns=columns, rows=tuple(rows), words=(0, 2, 3))


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
