"""Figures as plain data for plotly's script: no colours yet (the page fills them in by its theme), no markup.

Text of others is escaped here, since the script reads a few tags in labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from qkflow.experiment.summary import Comparison, ExperimentResult
from qkflow.report.palette import colour, dash, ink, marker
from qkflow.report.rows import reached, verdict_of
from qkflow.report.series import Band, by_evaluation, differences, usual
from qkflow.report.wording import interval, short, signed

Figure = dict[str, Any]

ROW = 58
"""Pixels of one arm in a figure that has a row for each."""


def curves(summary: ExperimentResult) -> dict[str, Figure]:
    """Learning curves with bands over seeds: by tokens and by seconds, as losses and as differences."""
    made = {}
    for x, x_title in (("tokens", "training tokens"), ("seconds", "seconds of training")):
        losses = [by_evaluation(arm.curves, x) for arm in summary.arms]
        made[f"{x}-loss"] = _lines(summary, losses, x_title, f"held-out {summary.bits}", unit="")
        apart = [differences(arm.curves, summary.arms[0].curves, x) for arm in summary.arms[1:]]
        told = f"{summary.bits}, minus the baseline's"
        figure = _lines(summary, [Band.empty(), *apart], x_title, told, unit="+")
        figure["layout"]["shapes"] = [_margin(summary, "y"), rule("y")]
        made[f"{x}-difference"] = figure
    return made


def forest(summary: ExperimentResult) -> Figure:
    """The difference of each arm with its interval and every seed's pair, on the margin."""
    arms = [arm.name for arm in summary.arms]
    shown = [(arms.index(item.arm), item) for item in summary.comparisons if item.difference is not None]
    traces = []
    for row, (arm, item) in enumerate(shown):
        traces += _forest_row(len(shown) - 1 - row, arm, item)
    labels = [_label(item.arm, f"  {verdict_of(summary, item.arm).kind}") for _, item in shown]
    layout = _rows(labels, f"{summary.bits} minus the baseline's (left is better)")
    layout["shapes"] = [_margin(summary, "x"), rule("x")]
    layout["xaxis"]["range"] = usual([summary.margin, -summary.margin, *_extent(shown)], 0.08)
    return {"data": traces, "layout": layout}


def strips(summary: ExperimentResult) -> Figure:
    """Every run's loss, a row for each arm, the runs of a seed joined."""
    arms = [
        Runs(arm=index, name=arm.name, values=dict(zip(arm.seeds, arm.bits_per_byte, strict=True)), mean=arm.mean)
        for index, arm in enumerate(summary.arms)
    ]
    return seed_strips(arms, f"held-out {summary.bits} (left is better)")


@dataclass(frozen=True, kw_only=True)
class Runs:
    """A number of each run of an arm."""

    arm: int
    """Its place among the arms, which decides its colour."""
    name: str
    values: Mapping[int, float]
    """By seed."""
    mean: float | None


def seed_strips(arms: Sequence[Runs], title: str) -> Figure:
    """Every run as a mark, a row for each arm that has any, the runs of a seed joined, and the mean."""
    shown = [runs for runs in arms if runs.values]
    height = {runs.arm: len(shown) - 1 - row for row, runs in enumerate(shown)}
    traces: list[dict[str, Any]] = []
    for seed in sorted({seed for runs in shown for seed in runs.values}):
        found = [(runs.values[seed], height[runs.arm]) for runs in shown if seed in runs.values]
        line = {"color": ink("soft", 0.35), "width": 1}
        x, y = [value for value, _ in found], [y for _, y in found]
        traces.append({**quiet("lines"), "x": x, "y": y, "line": line})
    for runs in shown:
        y, hover = height[runs.arm], {"hovertemplate": "%{text}<extra></extra>"}
        if runs.mean is not None:
            tall = {"symbol": "line-ns", "size": 26, "line": {"width": 3, "color": ink(colour(runs.arm))}}
            told = {"text": [f"mean {runs.mean:.4f}"], **hover}
            traces.append({**trace(runs.arm, "markers"), "x": [runs.mean], "y": [y], "marker": tall, **told})
        points = {"symbol": marker(runs.arm), "size": 9, "color": ink(colour(runs.arm), 0.75)}
        told = {"text": [f"seed {seed}: {value:.4f}" for seed, value in runs.values.items()], **hover}
        x = list(runs.values.values())
        traces.append({**trace(runs.arm, "markers"), "x": x, "y": [y] * len(x), "marker": points, **told})
    layout = _rows([_label(runs.name) for runs in shown], title)
    for note in layout["annotations"]:
        note["bgcolor"] = ink("paper", 0.8)  # lines of the seeds pass behind it
    return {"data": traces, "layout": layout}


def reach(summary: ExperimentResult) -> Figure:
    """Tokens and seconds to the same loss, as ratios to the baseline's."""
    arms = [arm.name for arm in summary.arms]
    shown = [item for item in summary.comparisons if item.reach is not None and item.reach.tokens is not None]
    traces = []
    for row, item in enumerate(shown):
        found, y, arm = item.reach, len(shown) - 1 - row, arms.index(item.arm)
        if found is None:
            continue
        for kind, shift, symbol in (("tokens", 0.06, "circle"), ("seconds", -0.3, "square-open")):
            value, low, high = (getattr(found, f"{kind}{end}") for end in ("", "_low", "_high"))
            if value is None:
                continue
            bars = _error(value, low, high, arm)
            text = [f"{kind}: {reached(value, low, high)}"]
            points = {"symbol": symbol, "size": 11, "color": ink(colour(arm))}
            told = {"text": text, "hovertemplate": "%{text}<extra></extra>"}
            made = {**trace(arm, "markers"), "x": [value], "y": [y + shift], "error_x": bars, "marker": points}
            traces.append({**made, **told})
    layout = _rows([_label(item.arm) for item in shown], "ratio to the baseline's (left is faster)")
    layout["xaxis"] |= {"type": "log", "tickformat": "~g"}
    layout["shapes"] = [rule("x", at=1.0)]
    return {"data": traces, "layout": layout}


def label(text: str, most: int = 40) -> str:
    """Text of others in a figure: nothing hidden, nothing that is read as a tag, not too long.

    >>> label("<b>x</b> & y")
    '&lt;b&gt;x&lt;/b&gt; &amp; y'
    """
    return escape(short(text, most), quote=False)


def _lines(summary: ExperimentResult, bands: Sequence[Band], x_title: str, y_title: str, *, unit: str) -> Figure:
    shades, means = [], []
    for index, (arm, band) in enumerate(zip(summary.arms, bands, strict=True)):
        if not band.x:
            continue
        outline = {"x": [*band.x, *reversed(band.x)], "y": [*band.high, *reversed(band.low)]}
        fill = {"fill": "toself", "fillcolor": ink(colour(index), 0.13), "line": {"width": 0}}
        if max(band.runs) > 1:
            shades.append({**quiet("lines"), **outline, **fill, "meta": {"arm": index}})
        line = {"color": ink(colour(index)), "width": 2, "dash": dash(index)}
        points = {"symbol": marker(index), "size": 6, "color": ink(colour(index))}
        told = {"name": label(arm.name, 28), "hovertemplate": f"%{{y:{unit}.4f}}"}
        means.append(
            {**trace(index, "lines+markers"), "x": band.x, "y": band.mean, "line": line, "marker": points, **told}
        )
    layout = {
        "height": 420,
        "margin": {"l": 62, "r": 12, "t": 12, "b": 52},
        "hovermode": "x unified" if "tokens" in x_title else "closest",
        "xaxis": {"title": {"text": x_title}, "rangemode": "tozero", "zeroline": False},
        "yaxis": {"title": {"text": y_title}, "tickformat": ".4~g" if unit == "" else "+.4~g", "zeroline": False},
    }
    late = [value for band in bands for value in band.after(0.15 if unit == "" else 0.4)]  # not flat by the first drop
    if late and (room := usual(late if unit == "" else [*late, summary.margin, -summary.margin], 0.06)):
        layout["yaxis"]["range"] = room
    return {"data": [*shades, *means], "layout": layout}


def _forest_row(y: int, arm: int, item: Comparison) -> list[dict[str, Any]]:
    found = item.difference
    if found is None:
        return []
    seeds = {"symbol": "line-ns", "size": 9, "line": {"width": 1.5, "color": ink(colour(arm), 0.6)}}
    pairs = [f"one seed's pair: {signed(value)}" for value in found.by_seed]
    told = [f"{signed(found.mean)} ({interval(found.low, found.high)})"]
    points = {"symbol": marker(arm), "size": 12, "color": ink(colour(arm))}
    each = {"x": list(found.by_seed), "y": [y - 0.22] * len(found.by_seed), "marker": seeds, "text": pairs}
    mean = {"x": [found.mean], "y": [y], "marker": points, "text": told}
    hover = {"hovertemplate": "%{text}<extra></extra>"}
    return [
        {**trace(arm, "markers"), **each, **hover},
        {**trace(arm, "markers"), **mean, "error_x": _error(found.mean, found.low, found.high, arm), **hover},
    ]


def trace(arm: int, mode: str) -> dict[str, Any]:
    """The beginning of an arm's trace, which a key can hide."""
    return {"type": "scatter", "mode": mode, "meta": {"arm": arm}}


def quiet(mode: str) -> dict[str, Any]:
    """The beginning of a trace that says nothing when pointed at."""
    return {"type": "scatter", "mode": mode, "hoverinfo": "skip"}


def _error(value: float, low: float | None, high: float | None, arm: int) -> dict[str, Any]:
    if low is None or high is None:
        return {"visible": False}
    ends = {"array": [high - value], "arrayminus": [value - low]}
    return {"type": "data", **ends, "color": ink(colour(arm)), "thickness": 2, "width": 6}


def _label(name: str, more: str = "") -> str:
    return f"<b>{label(name, 22 if more else 32)}</b>{more}"


def _rows(labels: Sequence[str], title: str) -> dict[str, Any]:
    """A layout with a row for each label, which stands above its row: so it fits on a narrow screen."""
    notes = [
        {
            "xref": "paper",
            "x": 0,
            "y": len(labels) - 1 - row + 0.34,
            "text": text,
            "showarrow": False,
            "xanchor": "left",
            "font": {"size": 13, "color": ink("ink")},
        }
        for row, text in enumerate(labels)
    ]
    return {
        "height": 72 + ROW * max(1, len(labels)),
        "margin": {"l": 10, "r": 14, "t": 8, "b": 52},
        "hovermode": "closest",
        "xaxis": {"title": {"text": title}, "zeroline": False, "tickformat": ".4~g"},
        "yaxis": {"visible": False, "range": [-0.62, len(labels) - 0.4], "fixedrange": True},
        "annotations": notes,
    }


def _margin(summary: ExperimentResult, axis: str) -> dict[str, Any]:
    other = "y" if axis == "x" else "x"
    ends = {f"{axis}0": -summary.margin, f"{axis}1": summary.margin, f"{other}0": 0, f"{other}1": 1}
    look = {"fillcolor": ink("band"), "line": {"width": 0}, "layer": "below"}
    return {"type": "rect", f"{other}ref": "paper", **ends, **look}


def rule(axis: str, at: float = 0.0) -> dict[str, Any]:
    """A thin line across the figure at one place of an axis."""
    other = "y" if axis == "x" else "x"
    ends = {f"{axis}0": at, f"{axis}1": at, f"{other}0": 0, f"{other}1": 1}
    return {
        "type": "line",
        f"{other}ref": "paper",
        **ends,
        "line": {"color": ink("soft"), "width": 1},
        "layer": "below",
    }


def _extent(shown: Sequence[tuple[int, Comparison]]) -> list[float]:
    found = [item.difference for _, item in shown if item.difference is not None]
    ends = [end for item in found for end in (item.low, item.high, item.mean, *item.by_seed)]
    return [end for end in ends if end is not None and math.isfinite(end)]
