"""Figures of a task's accuracies, as plain data for plotly's script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qkflow.experiment.metrics.recall import AccuracySummary, RecallSummary, places
from qkflow.report.figures import Figure, label, quiet, rule, trace
from qkflow.report.palette import colour, dash, ink, marker
from qkflow.report.recall_rows import AXES, known, percent, place
from qkflow.report.wording import interval

FAINTEST, FULLEST = 0.04, 0.52
"""How much colour a cell has at 0 and at 100 %: the number in it can be read on either."""


def lines(recall: RecallSummary) -> Figure:
    """Accuracy along the first axis, a line for each arm with the interval over seeds as a band."""
    axis, x = recall.axes[0], list(recall.places)
    shades, means = [], []
    for index, one in enumerate(recall.arms):
        at = [(value, found) for value, found in zip(x, one.along, strict=True) if found.accuracy is not None]
        shades += _band(index, at)
        if not at:
            continue
        found = {"x": [value for value, _ in at], "y": [_mean(reading) for _, reading in at]}
        line = {"color": ink(colour(index)), "width": 2, "dash": dash(index)}
        points = {"symbol": marker(index), "size": 8, "color": ink(colour(index))}
        told = {"name": label(one.arm, 28), "text": [_told(reading) for _, reading in at]}
        hover = {"hovertemplate": "%{text}"}
        means.append({**trace(index, "lines+markers"), **found, "line": line, "marker": points, **told, **hover})
    spaced = {"type": "log"} if x[0] > 0 else {}
    ticks = {"tickmode": "array", "tickvals": x, "ticktext": [f"{value:,}" for value in x]}
    layout: dict[str, Any] = {
        "height": 400,
        "margin": {"l": 62, "r": 12, "t": 16, "b": 52},
        "hovermode": "x unified",
        "xaxis": {"title": {"text": AXES[axis]}, **spaced, **ticks, "zeroline": False, "minor": {"ticks": ""}},
        "yaxis": {"title": {"text": "accuracy, %"}, "range": [-2, 103], "zeroline": False},
        "shapes": [{**rule("y", at=100 * recall.chance), "line": {"color": ink("soft"), "width": 1, "dash": "dot"}}],
        "annotations": [_remark("chance", 100 * recall.chance)],
    }
    if axis == "length" and recall.context in x:
        layout["shapes"].append(rule("x", at=float(recall.context or 0)))
    return {"data": [*shades, *means], "layout": layout}


def heat(recall: RecallSummary, arm: int) -> Figure:
    """Accuracy of one arm in every cell of a grid of two axes: the first across, the second down."""
    across, down = (places(recall.cells, axis) for axis in recall.axes)
    readings = {
        tuple(cell.at(axis) for axis in recall.axes): found
        for cell, found in zip(recall.cells, recall.arms[arm].cells, strict=True)
    }
    grid = [[readings.get((x, y)) for x in across] for y in down]
    words = [[_where(recall, x, y, readings.get((x, y))) for x in across] for y in down]
    z = [[None if found is None or found.accuracy is None else _mean(found) for found in row] for row in grid]
    heated = {
        "type": "heatmap",
        "x": [f"{x:,}" for x in across],
        "y": [f"{y:,}" for y in down],
        "z": z,
        "text": [["" if value is None else f"{value:.0f}" for value in row] for row in z],
        "texttemplate": "%{text}",
        "customdata": words,
        "hovertemplate": "%{customdata}<extra></extra>",
        "zmin": 0,
        "zmax": 100,
        "textfont": {"color": ink("ink")},
        "colorscale": [[0, ink("more", FAINTEST)], [1, ink("more", FULLEST)]],
        "showscale": False,
        "xgap": 2,
        "ygap": 2,
        "hoverongaps": False,
    }
    plain = {"type": "category", "showgrid": False, "zeroline": False, "fixedrange": True, "ticks": ""}
    layout = {
        "height": 90 + 40 * len(down),
        "margin": {"l": 58, "r": 8, "t": 8, "b": 48},
        "dragmode": False,
        "xaxis": {**plain, "title": {"text": AXES[recall.axes[0]]}},
        "yaxis": {**plain, "title": {"text": AXES[recall.axes[1]]}, "autorange": "reversed"},
    }
    return {"data": [heated], "layout": layout}


def figures(recall: RecallSummary) -> dict[str, Figure]:
    """Every figure by its name on the page."""
    made = {"recall": lines(recall)}
    if len(recall.axes) == 2:
        made |= {f"recall-{n}": heat(recall, n) for n, one in enumerate(recall.arms) if known(one)}
    return made


def _band(arm: int, at: Sequence[tuple[int, AccuracySummary]]) -> list[dict[str, Any]]:
    """The intervals as a filled shape; none where a seed stands alone."""
    ends = [
        (value, 100 * found.accuracy.low, 100 * found.accuracy.high)
        for value, found in at
        if found.accuracy is not None and found.accuracy.low is not None and found.accuracy.high is not None
    ]
    if not ends:
        return []
    x, low, high = ([item[n] for item in ends] for n in range(3))
    fill = {"fill": "toself", "fillcolor": ink(colour(arm), 0.13), "line": {"width": 0}}
    return [{**quiet("lines"), "x": [*x, *reversed(x)], "y": [*high, *reversed(low)], **fill, "meta": {"arm": arm}}]


def _mean(found: AccuracySummary) -> float:
    return round(100 * found.accuracy.mean, 3) if found.accuracy is not None else 0.0


def _told(found: AccuracySummary) -> str:
    if (accuracy := found.accuracy) is None:
        return "not measured"
    low, high = (None if end is None else 100 * end for end in (accuracy.low, accuracy.high))
    ends = "one seed" if low is None else f"{interval(low, high, 1, sign=False)}; {len(accuracy.seeds)} seeds"
    return f"{percent(accuracy.mean)} % ({ends})"


def _where(recall: RecallSummary, x: int, y: int, found: AccuracySummary | None) -> str:
    here = ", ".join(place(axis, value) for axis, value in zip(recall.axes, (x, y), strict=True))
    return f"{here}: {'not measured' if found is None else _told(found)}"


def _remark(text: str, y: float) -> dict[str, Any]:
    """A word on a line across the figure, at its beginning: there accuracies are seldom low."""
    look = {"showarrow": False, "xanchor": "left", "yanchor": "bottom", "font": {"size": 11.5, "color": ink("soft")}}
    return {"text": text, "xref": "paper", "x": 0, "y": y, **look}
