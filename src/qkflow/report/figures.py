"""Charts as plain data for plotly.js: line charts, rows of intervals, strips of runs, heat maps.

Colours are roles of the palette (`ink`), which the page fills in by its theme: this is why figures are dictionaries and
not `plotly.graph_objects`, which accept colours only. plotly.js reads a few HTML tags in labels, so text that is not
ours passes through `label`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from statistics import fmean
from typing import Any

import numpy as np

from qkflow.experiment.result import ExperimentResult
from qkflow.experiment.stats.curves import Curve
from qkflow.formatting import Number, format_difference, format_ratio, format_signed, shorten
from qkflow.report.palette import arm_color, arm_dash, arm_marker, ink

PlotlyFigure = dict[str, Any]

MAX_POINTS = 200
"""Points of a drawn curve; longer curves are thinned evenly."""
_ROW_HEIGHT = 58
_ON_HOVER = {"hovertemplate": "%{text}<extra></extra>"}


def label(text: str, max_length: int = 40) -> str:
    """Untrusted text in a figure: printable, without tags, not too long.

    >>> label("<b>x</b> & y")
    '&lt;b&gt;x&lt;/b&gt; &amp; y'
    """
    return escape(shorten(text, max_length), quote=False)


# Builders, one per kind of chart.


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of an arm, with a band where `low` and `high` are given."""

    arm: int
    """Index of the arm, which decides its colour."""
    name: str
    x: Sequence[Number]
    y: Sequence[Number]
    hover: str
    """Template of the text under the pointer."""
    text: Sequence[str] = ()
    low: Sequence[Number] = ()
    high: Sequence[Number] = ()
    band_x: Sequence[Number] = ()
    """Positions of `low` and `high`; the line's own if empty."""
    seeds: Sequence[tuple[Sequence[Number], Sequence[Number]]] = ()
    """(x, y) of each seed, drawn as thin lines."""


def line_chart(
    lines: Sequence[Line], *, x_axis: Mapping[str, Any], y_axis: Mapping[str, Any], hovermode: str = "closest"
) -> PlotlyFigure:
    """Lines over bands and the thin lines of the seeds; one line per arm at most."""
    background, means = [], []
    for line in lines:
        silent = {"type": "scatter", "mode": "lines", "hoverinfo": "skip", "meta": {"arm": line.arm}}
        role = arm_color(line.arm)
        for x, y in line.seeds:
            background.append({**silent, "x": list(x), "y": list(y), "line": {"color": ink(role, 0.35), "width": 1}})
        if line.low:
            x = line.band_x or line.x
            outline = {"x": [*x, *reversed(x)], "y": [*line.high, *reversed(line.low)]}
            fill = {"fill": "toself", "fillcolor": ink(role, 0.13), "line": {"width": 0}}
            background.append({**silent, **outline, **fill})
        trace = {"type": "scatter", "mode": "lines+markers", "meta": {"arm": line.arm}}
        trace |= {"x": list(line.x), "y": list(line.y)}
        trace |= {"line": {"color": ink(role), "width": 3 if line.seeds else 2, "dash": arm_dash(line.arm)}}
        trace |= {"marker": {"symbol": arm_marker(line.arm), "size": 6, "color": ink(role)}}
        trace |= {"name": label(line.name, 28), "hovertemplate": line.hover}
        means.append(trace | ({"text": list(line.text)} if line.text else {}))
    frame = {"height": 410, "margin": {"l": 62, "r": 12, "t": 20, "b": 52}, "hovermode": hovermode}
    axes = {"xaxis": {"zeroline": False, **x_axis}, "yaxis": {"zeroline": False, **y_axis}}
    return {"data": [*background, *means], "layout": {**frame, **axes}}


@dataclass(frozen=True, kw_only=True)
class Mark:
    """An estimate with its interval, in the row of an arm."""

    x: float
    text: str
    low: float | None = None
    high: float | None = None
    symbol: str = ""
    """The arm's own marker if empty."""
    offset: float = 0.0
    """Distance from the middle of the row."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """An arm in a chart with one row per arm."""

    arm: int
    title: str
    """Ready for the figure: escaped by `label`."""
    marks: Sequence[Mark] = ()
    ticks: Mapping[str, float] = field(default_factory=dict)
    """Small marks below, with the texts that they show."""


def interval_chart(rows: Sequence[Row], *, x_axis: Mapping[str, Any]) -> PlotlyFigure:
    """One row per arm: estimates with their intervals."""
    traces = []
    for y, row in zip(range(len(rows) - 1, -1, -1), rows, strict=True):
        color = ink(arm_color(row.arm))
        if row.ticks:
            ticks = {"symbol": "line-ns", "size": 9, "line": {"width": 1.5, "color": ink(arm_color(row.arm), 0.6)}}
            traces.append(_marks(row.arm, y - 0.22, row.ticks, ticks))
        for mark in row.marks:
            symbol = {"symbol": mark.symbol or arm_marker(row.arm), "size": 12, "color": color}
            bars: dict[str, Any] = {"visible": False}
            if mark.low is not None and mark.high is not None:
                ends = {"array": [mark.high - mark.x], "arrayminus": [mark.x - mark.low]}
                bars = {"type": "data", **ends, "color": color, "thickness": 2, "width": 6}
            traces.append({**_marks(row.arm, y + mark.offset, {mark.text: mark.x}, symbol), "error_x": bars})
    return {"data": traces, "layout": _row_layout([row.title for row in rows], x_axis)}


def strip_chart(arms: Mapping[str, Mapping[Any, Number]], x_title: str) -> PlotlyFigure:
    """One row per arm with runs: every run as a mark, the runs of a seed connected, and the mean; `arms` has values by
    name and seed.
    """
    shown = [(n, name, values) for n, (name, values) in enumerate(arms.items()) if values]
    rows = list(zip(range(len(shown) - 1, -1, -1), shown, strict=True))
    traces: list[dict[str, Any]] = []
    for seed in sorted({seed for _, _, values in shown for seed in values}):
        x, y = zip(*((values[seed], y) for y, (_, _, values) in rows if seed in values), strict=True)
        line = {"color": ink("soft", 0.35), "width": 1}
        traces.append({"type": "scatter", "mode": "lines", "hoverinfo": "skip", "x": [*x], "y": [*y], "line": line})
    for y, (n, _, values) in rows:
        mean = fmean(values.values())
        tall = {"symbol": "line-ns", "size": 26, "line": {"width": 3, "color": ink(arm_color(n))}}
        traces.append(_marks(n, y, {f"mean {mean:.4f}": mean}, tall))
        small = {"symbol": arm_marker(n), "size": 9, "color": ink(arm_color(n), 0.75)}
        traces.append(_marks(n, y, {f"seed {seed}: {value:.4f}": value for seed, value in values.items()}, small))
    layout = _row_layout([f"<b>{label(name, 32)}</b>" for _, name, _ in shown], {"title": {"text": x_title}})
    for title in layout["annotations"]:
        title["bgcolor"] = ink("paper", 0.8)  # the lines of the seeds pass behind it
    return {"data": traces, "layout": layout}


def percent_map(
    z: Sequence[Sequence[float | None]], texts: Sequence[Sequence[str]], labels: Mapping[str, Sequence[str]]
) -> PlotlyFigure:
    """A heat map of percentages with the number in each cell; `texts` are shown under the pointer.

    `labels` has the title and the positions of the x axis, then of the y axis.
    """
    (x_title, x), (y_title, y) = labels.items()
    cells = {
        "type": "heatmap",
        "x": list(x),
        "y": list(y),
        "z": [list(row) for row in z],
        "text": [["" if value is None else f"{value:.0f}" for value in row] for row in z],
        "texttemplate": "%{text}",
        "customdata": [list(row) for row in texts],
        "hovertemplate": "%{customdata}<extra></extra>",
        "zmin": 0,
        "zmax": 100,
        "textfont": {"color": ink("ink")},
        "colorscale": [[0, ink("more", 0.04)], [1, ink("more", 0.52)]],  # the number is readable on both
        "showscale": False,
        "xgap": 2,
        "ygap": 2,
        "hoverongaps": False,
    }
    axis = {"type": "category", "showgrid": False, "zeroline": False, "fixedrange": True, "ticks": ""}
    layout = {
        "height": 90 + 40 * len(y),
        "margin": {"l": 58, "r": 8, "t": 8, "b": 48},
        "dragmode": False,
        "xaxis": {**axis, "title": {"text": x_title}},
        "yaxis": {**axis, "title": {"text": y_title}, "autorange": "reversed"},
    }
    return {"data": [cells], "layout": layout}


def rule(axis: str, at: float = 0.0, *, width: float = 1, dash: str = "solid") -> dict[str, Any]:
    """A thin line across the figure at one position of an axis."""
    line = {"color": ink("soft"), "width": width, "dash": dash}
    return {"type": "line", "line": line, **_span(axis, at, at)}


def _span(axis: str, low: Number, high: Number) -> dict[str, Any]:
    """The position of a shape that spans the figure, below the data."""
    other = "y" if axis == "x" else "x"
    ends = {f"{axis}0": low, f"{axis}1": high, f"{other}0": 0, f"{other}1": 1, f"{other}ref": "paper"}
    return {**ends, "layer": "below"}


def annotation(text: str, position: Mapping[str, Any]) -> dict[str, Any]:
    """A short text in a figure, above a position: Plotly's `x` and `y`, with `xref` or `yref` if they are fractions."""
    font = {"size": 11.5, "color": ink("soft")}
    return {"text": text, "showarrow": False, "yanchor": "bottom", "font": font, **position}


def padded_range(values: Sequence[float], padding: float) -> list[float] | None:
    """A range that holds the values with some space around them; None without two different values.

    >>> padded_range([1.0, 2.0], 0.1)
    [0.9, 2.1]
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite or min(finite) == max(finite):
        return None
    space = padding * (max(finite) - min(finite))
    return [min(finite) - space, max(finite) + space]


def _marks(arm: int, y: Number, x: Mapping[str, Number], marker: dict[str, Any]) -> dict[str, Any]:
    """Marks in one row; the keys of `x` are shown under the pointer."""
    points = {"x": list(x.values()), "y": [y] * len(x), "text": list(x), "marker": marker}
    return {"type": "scatter", "mode": "markers", "meta": {"arm": arm}, **points, **_ON_HOVER}


def _row_layout(titles: Sequence[str], x_axis: Mapping[str, Any]) -> dict[str, Any]:
    """A layout with one row per title; titles are above their rows, which fits a narrow screen."""
    font = {"size": 13, "color": ink("ink")}
    annotations = [
        {"text": title, "showarrow": False, "xref": "paper", "x": 0, "xanchor": "left", "y": y + 0.34, "font": font}
        for y, title in zip(range(len(titles) - 1, -1, -1), titles, strict=True)
    ]
    return {
        "height": 72 + _ROW_HEIGHT * max(1, len(titles)),
        "margin": {"l": 10, "r": 14, "t": 8, "b": 52},
        "hovermode": "closest",
        "xaxis": {"zeroline": False, "tickformat": ".4~g", **x_axis},
        "yaxis": {"visible": False, "range": [-0.62, len(titles) - 0.4], "fixedrange": True},
        "annotations": annotations,
    }


# Charts of the loss.


@dataclass(frozen=True, kw_only=True)
class MeanCurve:
    """The mean over seeds at each evaluation, with the lowest and the highest seed."""

    x: list[float] = field(default_factory=list)
    mean: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    """Number of seeds at each point."""

    def ends_after(self, fraction: float) -> list[float]:
        """`low` and `high` at the points after this fraction of the curve."""
        begin = fraction * self.x[-1] if self.x else 0.0
        points = zip(self.x, self.low, self.high, strict=True)
        return [end for x, low, high in points if x >= begin for end in (low, high)]


def mean_curve(curves: Sequence[Curve], x: str) -> MeanCurve:
    """Average the curves of one arm: the n-th evaluations of all seeds make a point.

    >>> first = Curve(seed=0, tokens=(10, 20), seconds=(1.0, 2.0), losses=(4.0, 2.0))
    >>> second = Curve(seed=1, tokens=(10, 20), seconds=(1.0, 3.0), losses=(5.0, 3.0))
    >>> mean = mean_curve([first, second], "seconds")
    >>> mean.x, mean.mean, mean.low
    ([1.0, 2.5], [4.5, 2.5], [4.0, 2.0])
    """
    return _average([(getattr(curve, x), curve.losses) for curve in curves])


def difference_curve(arm: Sequence[Curve], baseline: Sequence[Curve], x: str) -> MeanCurve:
    """The arm minus the baseline of the same seed at the arm's evaluations; the baseline is interpolated."""
    by_seed = {curve.seed: curve for curve in baseline if len(curve.tokens)}
    differences = []
    for curve in arm:
        if curve.seed not in by_seed:
            continue
        base_x = np.asarray(getattr(by_seed[curve.seed], x), float)
        base_loss = np.asarray(by_seed[curve.seed].losses)
        own_x = np.asarray(getattr(curve, x), float)
        difference = np.asarray(curve.losses) - np.interp(own_x, base_x, base_loss)
        difference[(own_x < base_x[0] * (1 - 1e-9)) | (own_x > base_x[-1] * (1 + 1e-9))] = np.nan
        differences.append((own_x.tolist(), difference.tolist()))
    return _average(differences)


def _average(curves: Sequence[tuple[Sequence[Number], Sequence[Number]]]) -> MeanCurve:
    average = MeanCurve()
    longest = max((len(x) for x, _ in curves), default=0)
    for n in sorted({round(n) for n in np.linspace(0, longest - 1, min(longest, MAX_POINTS))}):
        points = [(x[n], y[n]) for x, y in curves if n < len(x) and math.isfinite(y[n])]
        if points:
            xs, ys = zip(*points, strict=True)
            numbers = (fmean(xs), fmean(ys), min(ys), max(ys))
            for column, value in zip((average.x, average.mean, average.low, average.high), numbers, strict=True):
                column.append(float(f"{value:.7g}"))
            average.runs.append(len(points))
    return average


def learning_curves(result: ExperimentResult) -> dict[str, PlotlyFigure]:
    """Learning curves by tokens and by seconds, as losses and as differences to the baseline."""
    units = (("tokens", "training tokens"), ("seconds", "seconds of training"))
    charts = {}
    for unit, title in units:
        losses = [mean_curve(arm.curves, unit) for arm in result.arms]
        charts[f"loss by {unit}"] = _curve_chart(result, losses, title, f"held-out {result.bits}")
    for unit, title in units:
        differences = [difference_curve(arm.curves, result.arms[0].curves, unit) for arm in result.arms[1:]]
        y_title = f"{result.bits}, minus the baseline's"
        chart = _curve_chart(result, [MeanCurve(), *differences], title, y_title, is_difference=True)
        chart["layout"]["shapes"] = [_margin(result, "y"), rule("y")]
        charts[f"difference by {unit}"] = chart
    return charts


def _curve_chart(
    result: ExperimentResult, curves: Sequence[MeanCurve], x_title: str, y_title: str, *, is_difference: bool = False
) -> PlotlyFigure:
    lines = [
        Line(
            arm=arm,
            name=result.arms[arm].name,
            x=curve.x,
            y=curve.mean,
            low=curve.low if max(curve.runs) > 1 else (),
            high=curve.high,
            hover=f"%{{y:{'+' if is_difference else ''}.4f}}",
        )
        for arm, curve in enumerate(curves)
        if curve.x
    ]
    y_axis: dict[str, Any] = {"title": {"text": y_title}, "tickformat": "+.4~g" if is_difference else ".4~g"}
    late = [value for curve in curves for value in curve.ends_after(0.4 if is_difference else 0.15)]
    ends = [*late, result.margin, -result.margin] if is_difference else late
    if late and (limits := padded_range(ends, 0.06)):  # the first drop would flatten the rest
        y_axis["range"] = limits
    x_axis = {"title": {"text": x_title}, "rangemode": "tozero"}
    hover = "x unified" if x_title == "training tokens" else "closest"
    return line_chart(lines, x_axis=x_axis, y_axis=y_axis, hovermode=hover)


def forest(result: ExperimentResult) -> PlotlyFigure:
    """The difference of each arm with its interval and the pair of every seed, over the equivalence margin."""
    arms = [arm.name for arm in result.arms]
    verdicts = {verdict.arm: verdict.kind for verdict in result.verdicts}
    rows, ends = [], [result.margin, -result.margin]
    for item in result.comparisons:
        if (difference := item.difference) is None:
            continue
        text = format_difference(difference.mean, difference.low, difference.high)
        mark = Mark(x=difference.mean, low=difference.low, high=difference.high, text=text)
        ticks = {f"pair {n}: {format_signed(value)}": value for n, value in enumerate(difference.by_seed, start=1)}
        title = f"<b>{label(item.arm, 22)}</b>  {verdicts.get(item.arm, 'undecided')}"
        rows.append(Row(arm=arms.index(item.arm), title=title, marks=[mark], ticks=ticks))
        drawn = (difference.low, difference.high, difference.mean, *difference.by_seed)
        ends += [end for end in drawn if end is not None]
    title = f"{result.bits} minus the baseline's (left is better)"
    figure = interval_chart(rows, x_axis={"title": {"text": title}, "range": padded_range(ends, 0.08)})
    figure["layout"]["shapes"] = [_margin(result, "x"), rule("x")]
    return figure


def loss_strips(result: ExperimentResult) -> PlotlyFigure:
    """The loss of every run."""
    arms = {arm.name: dict(zip(arm.seeds, arm.losses, strict=True)) for arm in result.arms}
    return strip_chart(arms, f"held-out {result.bits} (left is better)")


def reach(result: ExperimentResult) -> PlotlyFigure:
    """Tokens and seconds to the same loss as ratios to the baseline."""
    arms, rows = [arm.name for arm in result.arms], []
    for item in result.comparisons:
        marks = []
        for unit, offset, symbol in (("tokens", 0.06, "circle"), ("seconds", -0.3, "square-open")):
            ratio, low, high = (getattr(item.reach, f"{unit}{end}", None) for end in ("", "_low", "_high"))
            if ratio is not None:
                text = f"{unit}: {format_ratio(ratio, low, high)}"
                marks.append(Mark(x=ratio, low=low, high=high, text=text, symbol=symbol, offset=offset))
        if marks:
            rows.append(Row(arm=arms.index(item.arm), title=f"<b>{label(item.arm, 32)}</b>", marks=marks))
    title = {"text": "ratio to the baseline (left is faster)"}
    figure = interval_chart(rows, x_axis={"title": title, "type": "log", "tickformat": "~g"})
    figure["layout"]["shapes"] = [rule("x", at=1.0)]
    return figure


def _margin(result: ExperimentResult, axis: str) -> dict[str, Any]:
    band = {"type": "rect", "fillcolor": ink("band"), "line": {"width": 0}}
    return {**band, **_span(axis, -result.margin, result.margin)}
