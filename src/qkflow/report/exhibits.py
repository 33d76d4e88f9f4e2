"""What mechanisms have to show of their own, drawn: layers side by side, or one at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qkflow.probes.diagnostics import Diagnostic
from qkflow.report.figures import label
from qkflow.report.palette import colour, dash, ink, marker
from qkflow.report.rows import Table
from qkflow.report.wording import fixed, visible

MOST_ROWS = 400
"""Rows of a table beside a figure of coloured cells: beyond, the largest numbers of each layer stand for all."""
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


def exhibit_groups(
    shown: Mapping[str, Sequence[tuple[Diagnostic, ...]]], arms: Sequence[str], tokens: Sequence[str] = ()
) -> list[Group]:
    """Group the exhibits of all arms (`shown`: by arm and by layer) and draw them; `arms` gives each its colour.

    `tokens` are the names of what was read: an exhibit along "token", which counts them, is shown with these.
    """
    together: dict[tuple[str, str, str], list[tuple[str, int, Diagnostic]]] = {}
    for arm, layers in shown.items():
        for layer, exhibits in enumerate(layers, start=1):
            for item in exhibits:
                alone = "" if len(item.x) == 1 and item.kind in ("lines", "bars") else arm
                together.setdefault((item.title, item.kind, alone), []).append((arm, layer, _named(item, tokens)))
    return [_group(parts, arms, side_by_side=not key[2]) for key, parts in together.items()]


def _named(item: Diagnostic, tokens: Sequence[str]) -> Diagnostic:
    """With the names of tokens in the place of their numbers; the number stays, since a name may come again."""
    if item.x_label != "token" or len(item.x) != len(tokens):
        return item
    names = tuple(f"{token} ({n})" for n, token in enumerate(tokens, start=1))
    return replace(item, x=names, series=names if len(item.series) == len(names) else item.series)


def _group(parts: Sequence[tuple[str, int, Diagnostic]], arms: Sequence[str], *, side_by_side: bool) -> Group:
    first, most = parts[0][2], _largest(item for _, _, item in parts)  # one scale, so that layers can be compared
    layers = () if side_by_side else tuple(layer for _, layer, _ in parts)
    alone = () if side_by_side else ((item, arms.index(arm)) for arm, _, item in parts)
    figures = [_by_layer(parts, arms)] if side_by_side else [_one(item, arm, most) for item, arm in alone]
    return Group(
        title=first.title,
        note=first.note,
        arms=tuple(dict.fromkeys(arm for arm, _, _ in parts)),
        layers=layers,
        figures=tuple(figures),
        table=_table(parts),
    )


def _by_layer(parts: Sequence[tuple[str, int, Diagnostic]], arms: Sequence[str]) -> dict[str, Any]:
    first, traces = parts[0][2], []
    for arm in dict.fromkeys(name for name, _, _ in parts):
        own = [(layer, item) for name, layer, item in parts if name == arm]
        for row, series in enumerate(own[0][1].series):
            x = [f"layer {layer}" for layer, _ in own]
            values = [item.values[row][0] if row < len(item.values) else None for _, item in own]
            traces.append(_series(first.kind, arms.index(arm), row, x, values, f"{arm}: {series}"))
    layout = _layout(first.y_label, "")
    layout["height"] += 6 * max(0, len(traces) - 6)  # for the legend, which lies above
    return {"data": traces, "layout": layout}


def _one(item: Diagnostic, arm: int, most: float) -> dict[str, Any]:
    if item.kind == "heat":
        return _heat(item, most)
    if item.kind == "wheel":
        return _wheels(item, arm)
    rows = zip(item.series, item.values, strict=True)
    traces = [_series(item.kind, arm, row, _places(item), values, series) for row, (series, values) in enumerate(rows)]
    return {"data": traces, "layout": _layout(item.y_label, item.x_label)}


def _heat(item: Diagnostic, most: float) -> dict[str, Any]:
    heat = {
        "type": "heatmap",
        "x": _places(item),
        "y": [label(series, 24) for series in item.series],
        "z": [[_known(value) for value in row] for row in item.values],
        "zmin": -most or -1.0,
        "zmax": most or 1.0,
        "colorscale": [[0, ink("less")], [0.5, ink("paper")], [1, ink("more")]],
        "colorbar": {"title": {"text": label(item.y_label, 24)}, "thickness": 10},
        "hovertemplate": "%{y}, %{x}: %{z:.4g}<extra></extra>",
        "hoverongaps": False,
    }
    layout = _layout("", item.x_label)
    layout["yaxis"] |= {"autorange": "reversed", "automargin": True}
    if len(item.series) == len(item.x) > 2:  # a square is one
        layout |= {"height": 560, "meta": {"square": True}}
        above = {"orientation": "h", "len": 0.6, "x": 0.5, "xanchor": "center", "y": 1.0, "yanchor": "bottom"}
        heat["colorbar"] |= {**above, "title": {**heat["colorbar"]["title"], "side": "top"}, "nticks": 5}
        layout["xaxis"] |= {"constrain": "domain", "showgrid": False, "tickfont": {"size": 10}}
        layout["yaxis"] |= {
            "tickfont": {"size": 10},
            "constrain": "domain",
            "scaleanchor": "x",
            "showgrid": False,
            "zeroline": False,
        }
    return {"data": [heat], "layout": layout}


def _wheels(item: Diagnostic, arm: int) -> dict[str, Any]:
    """A circle for each series, later points further out, and their mean as a line; the page lays the circles out."""
    traces: list[dict[str, Any]] = []
    layout = _layout("", "") | {"showlegend": False, "margin": {"l": 8, "r": 8, "t": 8, "b": 8}, "annotations": []}
    layout |= {"xaxis": {"visible": False}, "yaxis": {"visible": False}, "meta": {"wheels": len(item.series)}}
    for row, (series, values) in enumerate(zip(item.series, item.values, strict=True)):
        place = "polar" if row == 0 else f"polar{row + 1}"
        known = [(x, _known(angle), n) for n, (x, angle) in enumerate(zip(_places(item), values, strict=True))]
        points = [(x, angle, _outwards(n, len(values))) for x, angle, n in known if angle is not None]
        base = {"type": "scatterpolar", "subplot": place, "thetaunit": "radians", "meta": {"arm": arm}}
        mean, length = _mean([angle for _, angle, _ in points])
        inked = {"color": ink(colour(arm), 0.65), "size": 6}
        traces.append(
            {
                **base,
                "mode": "markers",
                "theta": [angle for _, angle, _ in points],
                "r": [r for _, _, r in points],
                "text": [f"{x}" for x, _, _ in points],
                "marker": inked,
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
        line = {"mode": "lines", "line": {"color": ink("ink"), "width": 3}, "hoverinfo": "skip"}
        traces.append({**base, **line, "theta": [mean, mean], "r": [0, length]})
        layout[place] = _circle()
        told = f"{label(series)}<br>R = {length:.2f}"
        layout["annotations"].append({"text": told, "showarrow": False, "xref": "paper", "yref": "paper"})
    return {"data": traces, "layout": layout}


def _circle() -> dict[str, Any]:
    turn = {"tickvals": [0, 90, 180, 270], "ticktext": ["0", "π/2", "π", "\N{MINUS SIGN}π/2"], "gridcolor": ink("grid")}
    return {
        "bgcolor": "rgba(0,0,0,0)",
        "angularaxis": {**turn, "linecolor": ink("rule"), "tickcolor": ink("rule"), "tickfont": {"size": 10}},
        "radialaxis": {"range": [0, 1.04], "visible": False},
    }


def _outwards(n: int, count: int) -> float:
    return round(0.6 + 0.4 * (n + 1) / count, 3)


def _mean(angles: Sequence[float]) -> tuple[float, float]:
    """The direction of the mean point of the circle, and its distance from the middle."""
    count = max(1, len(angles))
    c, s = math.fsum(map(math.cos, angles)) / count, math.fsum(map(math.sin, angles)) / count
    return round(math.atan2(s, c), 3), round(math.hypot(c, s), 3)


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


def _table(parts: Sequence[tuple[str, int, Diagnostic]]) -> Table:
    first = parts[0][2]
    where, what = first.x_label or "at", first.y_label or "value"
    if first.kind == "wheel":
        where, what = f"mean {what}, radians", "R"
        rows = [
            (arm, f"{layer}", series, *map(fixed, _mean([value for value in values if _known(value) is not None])))
            for arm, layer, item in parts
            for series, values in zip(item.series, item.values, strict=True)
        ]
        return Table(
            caption=first.title, columns=("arm", "layer", "series", where, what), rows=tuple(rows), words=(0, 2)
        )
    cells = [(arm, layer, *cell) for arm, layer, item in parts for cell in _cells(item, MOST_ROWS // len(parts))]
    whole = sum(len(item.x) * len(item.series) for _, _, item in parts)
    said = first.title if len(cells) == whole else f"{first.title}: the largest numbers of each layer"
    rows = [(arm, f"{layer}", series, visible(str(x)), fixed(value)) for arm, layer, series, x, value in cells]
    return Table(caption=said, columns=("arm", "layer", "series", where, what), rows=tuple(rows), words=(0, 2, 3))


def _cells(item: Diagnostic, most: int) -> list[tuple[str, str | float, float]]:
    """Every number with its place; of too many coloured cells the largest, largest first."""
    rows = zip(item.series, item.values, strict=True)
    found = [(series, x, value) for series, values in rows for x, value in zip(item.x, values, strict=True)]
    if item.kind != "heat" or len(found) <= max(most, 1):
        return found
    known = [cell for cell in found if _known(cell[2]) is not None]
    return sorted(known, key=lambda cell: -abs(cell[2]))[: max(most, 1)]


def _largest(items: Iterable[Diagnostic]) -> float:
    known = (_known(value) for item in items for row in item.values for value in row)
    return max((abs(value) for value in known if value is not None), default=0.0)


def _places(item: Diagnostic) -> list[str | float]:
    return [label(value, 24) if isinstance(value, str) else value for value in item.x]


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
