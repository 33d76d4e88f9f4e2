"""Charts of what mechanisms report about themselves: one chart over all layers, or one per layer to choose from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from qkflow.formatting import format_number
from qkflow.probes.diagnostics import Diagnostic
from qkflow.report.figures import PlotlyFigure, label
from qkflow.report.palette import arm_color, arm_dash, arm_marker, ink
from qkflow.report.sections import Block, Figure, Note, Table, number_column, text_column

MAX_ROWS = 400
"""Rows of the table of a heat map; beyond that it lists the largest values of each layer."""
_PATTERNS = ("", "/", ".", "x", "-", "|")

Entry = tuple[str, int, Diagnostic]
"""(arm, layer from 1, diagnostic)"""


def diagnostic_blocks(
    diagnostics: Mapping[str, Sequence[tuple[Diagnostic, ...]]], arms: Sequence[str], tokens: Sequence[str] = ()
) -> list[Block]:
    """Charts and tables of the diagnostics (by arm and layer); `arms` gives each arm its colour.

    `tokens` are labels of the text: they replace the positions in diagnostics whose x axis is "token".
    """
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for arm, layers in diagnostics.items():
        for layer, items in enumerate(layers, start=1):
            for item in items:
                is_scalar = len(item.x) == 1 and item.kind in ("lines", "bars")
                key = (item.title, item.kind, "" if is_scalar else arm)
                groups.setdefault(key, []).append((arm, layer, _with_token_labels(item, tokens)))
    blocks: list[Block] = []
    for n, (key, entries) in enumerate(groups.items()):
        first = entries[0][2]
        names = dict.fromkeys(arm for arm, _, _ in entries)
        figure = Figure(
            name=f"diagnostic-{n}",
            caption=f"{', '.join(names)}. {first.note}".strip(),
            charts=_layer_charts(entries, arms) if key[2] else {"": _chart_over_layers(entries, arms)},
            choice="Layer",
        )
        blocks += [Note(text=first.title, style="heading"), figure, diagnostic_table(entries)]
    return blocks


def diagnostic_table(entries: Sequence[Entry]) -> Table:
    """The numbers of a chart; of a large heat map the largest ones."""
    first = entries[0][2]
    columns = [text_column("arm"), number_column("layer", "layer"), text_column("series")]
    if first.kind == "wheel":
        rows = [
            (arm, layer, series, *_circular_mean([value for value in values if math.isfinite(value)]))
            for arm, layer, item in entries
            for series, values in zip(item.series, item.values, strict=True)
        ]
        mean = f"mean {first.y_label or 'value'}, radians"
        columns += [number_column(mean, "mean", format_number), number_column("R", "R", format_number)]
        caption = first.title
    else:
        rows = [(arm, layer, *cell) for arm, layer, item in entries for cell in _cells(item, MAX_ROWS // len(entries))]
        n_cells = sum(len(item.x) * len(item.series) for _, _, item in entries)
        y = number_column(first.y_label or "value", "y", format_number)
        columns += [text_column(first.x_label or "at", "x"), y]
        caption = first.title + ("" if len(rows) == n_cells else ": the largest values of each layer")
    return Table(caption=caption, columns=columns, rows=rows, summary="As a table")


def _cells(item: Diagnostic, max_rows: int) -> list[tuple[str, str | float, float]]:
    rows = zip(item.series, item.values, strict=True)
    cells = [(series, x, value) for series, values in rows for x, value in zip(item.x, values, strict=True)]
    if item.kind != "heat" or len(cells) <= max(max_rows, 1):
        return cells
    finite = [cell for cell in cells if math.isfinite(cell[2])]
    return sorted(finite, key=lambda cell: -abs(cell[2]))[: max(max_rows, 1)]


def _with_token_labels(item: Diagnostic, tokens: Sequence[str]) -> Diagnostic:
    if item.x_label != "token" or len(item.x) != len(tokens):
        return item
    labels = tuple(f"{token} ({n})" for n, token in enumerate(tokens, start=1))  # a token may occur more than once
    return replace(item, x=labels, series=labels if len(item.series) == len(labels) else item.series)


def _chart_over_layers(entries: Sequence[Entry], arms: Sequence[str]) -> PlotlyFigure:
    """Diagnostics with one number per layer and series."""
    first, traces = entries[0][2], []
    for arm in dict.fromkeys(name for name, _, _ in entries):
        layers = [(layer, item) for name, layer, item in entries if name == arm]
        for n, series in enumerate(layers[0][1].series):
            x = [f"layer {layer}" for layer, _ in layers]
            values = [item.values[n][0] if n < len(item.values) else None for _, item in layers]
            traces.append(_series(first.kind, arms.index(arm), n, x, values, f"{arm}: {series}"))
    layout = _layout(first.y_label, "")
    layout["height"] += 6 * max(0, len(traces) - 6)  # for the legend above
    return {"data": traces, "layout": layout}


def _layer_charts(entries: Sequence[Entry], arms: Sequence[str]) -> dict[str, PlotlyFigure]:
    values = [abs(x) for _, _, item in entries for row in item.values for x in row if math.isfinite(x)]
    scale = max(values, default=0.0)  # one scale for all layers
    charts = {}
    for arm, layer, item in entries:
        n = arms.index(arm)
        if item.kind == "heat":
            chart = _heat(item, scale)
        elif item.kind == "wheel":
            chart = _wheels(item, n)
        else:
            series = enumerate(zip(item.series, item.values, strict=True))
            traces = [_series(item.kind, n, k, _positions(item), values, name) for k, (name, values) in series]
            chart = {"data": traces, "layout": _layout(item.y_label, item.x_label)}
        name = f"{layer}" if f"{layer}" not in charts else f"{layer} ({len(charts)})"  # titles may repeat in a layer
        charts[name] = chart
    return charts


def _series(kind: str, arm: int, n: int, x: Sequence[Any], values: Sequence[float | None], name: str) -> dict[str, Any]:
    role = arm_color(arm)
    trace: dict[str, Any] = {"x": list(x), "y": [_finite(value) for value in values], "name": label(name)}
    trace |= {"showlegend": True, "hovertemplate": "%{x}: %{y:.4g}<extra></extra>", "meta": {"arm": arm}}
    if kind == "bars":
        pattern = {"shape": _PATTERNS[n % len(_PATTERNS)], "fillmode": "replace", "size": 6, "solidity": 0.35}
        outline = {"color": ink(role), "width": 1.5}
        return {"type": "bar", **trace, "marker": {"color": ink(role), "pattern": pattern, "line": outline}}
    line = {"color": ink(role, 1.0 if n == 0 else 0.6), "dash": arm_dash(n), "width": 2}
    points = {"symbol": arm_marker(n), "size": 6}
    return {"type": "scatter", "mode": "lines+markers", **trace, "line": line, "marker": points}


def _heat(item: Diagnostic, scale: float) -> PlotlyFigure:
    heat = {
        "type": "heatmap",
        "x": _positions(item),
        "y": [label(series, 24) for series in item.series],
        "z": [[_finite(value) for value in row] for row in item.values],
        "zmin": -scale or -1.0,
        "zmax": scale or 1.0,
        "colorscale": [[0, ink("less")], [0.5, ink("paper")], [1, ink("more")]],
        "colorbar": {"title": {"text": label(item.y_label, 24)}, "thickness": 10},
        "hovertemplate": "%{y}, %{x}: %{z:.4g}<extra></extra>",
        "hoverongaps": False,
    }
    layout = _layout("", item.x_label)
    layout["yaxis"] |= {"autorange": "reversed", "automargin": True}
    if len(item.series) == len(item.x) > 2:  # draw a square matrix as a square
        layout |= {"height": 560, "meta": {"square": True}}
        above = {"orientation": "h", "len": 0.6, "x": 0.5, "xanchor": "center", "y": 1.0, "yanchor": "bottom"}
        heat["colorbar"] |= {**above, "title": {**heat["colorbar"]["title"], "side": "top"}, "nticks": 5}
        axis = {"constrain": "domain", "showgrid": False, "tickfont": {"size": 10}}
        layout["xaxis"] |= axis
        layout["yaxis"] |= {**axis, "scaleanchor": "x", "zeroline": False}
    return {"data": [heat], "layout": layout}


def _wheels(item: Diagnostic, arm: int) -> PlotlyFigure:
    """One circle per series: phases as points, later ones further out, and their mean as a line."""
    traces: list[dict[str, Any]] = []
    layout = _layout("", "") | {"showlegend": False, "margin": {"l": 8, "r": 8, "t": 8, "b": 8}, "annotations": []}
    layout |= {"xaxis": {"visible": False}, "yaxis": {"visible": False}, "meta": {"wheels": len(item.series)}}
    ticks = {
        "tickvals": [0, 90, 180, 270],
        "ticktext": ["0", "π/2", "π", "\N{MINUS SIGN}π/2"],
        "tickfont": {"size": 10},
    }
    lines = {"gridcolor": ink("grid"), "linecolor": ink("rule"), "tickcolor": ink("rule")}
    radial = {"range": [0, 1.04], "visible": False}
    circle = {"bgcolor": "rgba(0,0,0,0)", "angularaxis": {**ticks, **lines}, "radialaxis": radial}
    for n, (series, values) in enumerate(zip(item.series, item.values, strict=True)):
        subplot = "polar" if n == 0 else f"polar{n + 1}"
        points = [
            (f"{x}", angle, round(0.6 + 0.4 * (index + 1) / len(values), 3))
            for index, (x, angle) in enumerate(zip(_positions(item), values, strict=True))
            if math.isfinite(angle)
        ]
        angles = [angle for _, angle, _ in points]
        mean, length = _circular_mean(angles)
        base = {"type": "scatterpolar", "subplot": subplot, "thetaunit": "radians", "meta": {"arm": arm}}
        dots: dict[str, Any] = {"mode": "markers", "theta": angles, "r": [r for _, _, r in points]}
        dots["text"] = [text for text, _, _ in points]
        dots |= {"marker": {"color": ink(arm_color(arm), 0.65), "size": 6}, "hovertemplate": "%{text}<extra></extra>"}
        line = {"mode": "lines", "line": {"color": ink("ink"), "width": 3}, "hoverinfo": "skip"}
        traces += [{**base, **dots}, {**base, **line, "theta": [mean, mean], "r": [0, length]}]
        layout[subplot] = circle
        text = f"{label(series)}<br>R = {length:.2f}"
        layout["annotations"].append({"text": text, "showarrow": False, "xref": "paper", "yref": "paper"})
    return {"data": traces, "layout": layout}


def _circular_mean(angles: Sequence[float]) -> tuple[float, float]:
    """The direction of the mean point of the unit circle, and its distance R from the centre."""
    n = max(1, len(angles))
    c, s = math.fsum(map(math.cos, angles)) / n, math.fsum(map(math.sin, angles)) / n
    return round(math.atan2(s, c), 3), round(math.hypot(c, s), 3)


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


def _positions(item: Diagnostic) -> list[str | float]:
    return [label(value, 24) if isinstance(value, str) else value for value in item.x]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
