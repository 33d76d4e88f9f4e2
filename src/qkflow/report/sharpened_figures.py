"""The figures of a study of sharper attention, as plain data for plotly's script."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qkflow.experiment.metrics.rationale import MetricName, RationaleArm, RationaleSummary
from qkflow.report.figures import Figure, Runs, label, quiet, rule, seed_strips, trace
from qkflow.report.palette import colour, dash, ink, marker
from qkflow.report.sharpened_rows import drawable, head, mean_path, metric_named, scale, written


def path(found: RationaleSummary) -> Figure:
    """Attention on the rationale against the loss, along training: a thin line a seed, a bold one for their mean."""
    mass = metric_named(found, "mass")
    times, thin, bold = scale(mass), [], []
    for index, arm in enumerate(found.arms):
        for seed in arm.paths:
            points = [point for point in seed if drawable(point)]
            x, y = [point.loss for point in points], [times * point.mass for point in points]
            line = {"color": ink(colour(index), 0.35), "width": 1}
            thin.append({**quiet("lines"), "x": x, "y": y, "line": line, "meta": {"arm": index}})
        if mean := mean_path(arm):
            text = [f"step {p.step:,}: loss {p.loss:.4g}, {label(head(mass))} {written(mass, p.mass)}" for p in mean]
            x, y = [point.loss for point in mean], [times * point.mass for point in mean]
            bold.append({**_line(index, arm), "x": x, "y": y, "text": text, "hovertemplate": "%{text}"})
    layout = _layout(
        "validation loss, nats (later is right)", f"attention on the rationale{', %' if times > 1 else ''}"
    )
    layout["xaxis"] |= {"type": "log", "autorange": "reversed", "tickformat": "~g", **_ticks(thin)}
    if found.equal_loss is not None and found.equal_loss > 0 and bold:
        layout["shapes"] = [_mark(found.equal_loss)]
        layout["annotations"] = [_note(math.log10(found.equal_loss), "equal loss")]
    return {"data": [*thin, *bold], "layout": layout}


def curve(found: RationaleSummary) -> Figure:
    """AC(tau) of each arm."""
    traces = []
    for index, arm in enumerate(found.arms):
        known = [(tau, 100 * part) for tau, part in arm.curve if math.isfinite(part)]
        if known:
            x, y = [tau for tau, _ in known], [part for _, part in known]
            traces.append({**_line(index, arm), "x": x, "y": y, "hovertemplate": "tau %{x:.2f}: %{y:.1f} %"})
    layout = _layout("tau, a part of the attention", "AC(tau), % of instances")
    layout["xaxis"] |= {"range": [0, 1]}
    layout["yaxis"] |= {"range": [0, 103]}
    if traces:
        layout["shapes"] = [_mark(found.tau)]
        layout["annotations"] = [_note(found.tau, f"tau = {found.tau:g}")]
    return {"data": traces, "layout": layout}


def strips(found: RationaleSummary, name: MetricName) -> Figure:
    """A metric of every run."""
    metric = metric_named(found, name)
    times = scale(metric)
    rows = []
    for index, arm in enumerate(found.arms):
        reading = arm.readings.get(name)
        values = () if reading is None else reading.by_seed
        known = {seed: times * value for seed, value in zip(arm.seeds, values, strict=False) if math.isfinite(value)}
        mean = None if reading is None or reading.mean is None or not known else times * reading.mean
        rows.append(Runs(arm=index, name=arm.name, values=known, mean=mean))
    return seed_strips(rows, label(head(metric), 60))


def _ticks(traces: Sequence[Figure]) -> Figure:
    """Ticks for a log axis that a phone has room for: in tens, at 1, 2 and 5 of each ten, or closer."""
    places = [x for trace in traces for x in trace["x"]]
    span = max(places) / min(places) if places else 1.0
    return {"dtick": 1} if span > 1000 else {"dtick": "D2"} if span > 4 else {"nticks": 5}


def _line(index: int, arm: RationaleArm) -> Figure:
    line = {"color": ink(colour(index)), "width": 3, "dash": dash(index)}
    points = {"symbol": marker(index), "size": 6, "color": ink(colour(index))}
    return {**trace(index, "lines+markers"), "name": label(arm.name, 28), "line": line, "marker": points}


def _layout(x_title: str, y_title: str) -> Figure:
    return {
        "height": 400,
        "margin": {"l": 62, "r": 12, "t": 24, "b": 52},
        "hovermode": "closest",
        "xaxis": {"title": {"text": x_title}, "zeroline": False},
        "yaxis": {"title": {"text": y_title}, "zeroline": False, "rangemode": "tozero"},
    }


def _mark(x: float) -> Figure:
    return {**rule("x", x), "layer": "above", "line": {"color": ink("soft"), "width": 1.5, "dash": "4px,3px"}}


def _note(x: float, text: str) -> Figure:
    look = {"showarrow": False, "yanchor": "bottom", "font": {"size": 11.5, "color": ink("soft")}}
    return {"x": x, "y": 1, "yref": "paper", "text": text, **look}
