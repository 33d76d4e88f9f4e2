"""The page of a study of sharper attention."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from qkflow.experiment.metrics.rationale import AttentionExample, RationaleArm, RationaleMetric, RationaleSummary
from qkflow.io import write_file
from qkflow.report import sharpened_figures as figures
from qkflow.report import sharpened_rows as rows
from qkflow.report.highlight import lines
from qkflow.report.shell import key, record, render, standing
from qkflow.report.wording import MISSING, count, short

MOST_EXAMPLES = 6
"""Examples shown; the others would only make the page longer."""
_DIRECTIONS = {"higher": "higher is better", "lower": "lower is better", "neither": ""}


def write_sharpened(found: RationaleSummary, out: Path) -> Path:
    """Write the page of a study of sharper attention; what is missing is said on it, and the rest is shown."""
    write_file(out, sharpened_page(found))
    return out


def sharpened_page(found: RationaleSummary) -> str:
    """The page as text."""
    drawn = {
        "path": figures.path(found),
        "curve": figures.curve(found),
        "strips-mass": figures.strips(found, "mass"),
        "strips-performance": figures.strips(found, "performance"),
    }
    content = _content(found)
    content["has"] = {name.replace("-", "_"): bool(figure["data"]) for name, figure in drawn.items()}
    return render("sharpened.html", content, {"figures": drawn, "maps": []})


def _content(found: RationaleSummary) -> dict[str, Any]:
    names = [arm.name for arm in found.arms]
    shown = names[1] if len(names) == 2 else f"{max(0, len(names) - 1)} arms"
    return {
        "found": found,
        "title": f"{shown} against {names[0] if names else MISSING} on {found.task}",
        "answer": found.answer or "There is no answer yet.",
        "callouts": [*filter(None, [standing(found.finished, found.runs)]), *found.remarks],
        "facts": _facts(found),
        "heads": [{"title": rows.head(one), "told": _DIRECTIONS[one.better]} for one in found.metrics],
        "overview": [_row(found, arm) for arm in found.arms],
        "confidence": f"{100 * found.level:.4g} %",
        "error_rate": f"{100 * (1 - found.level):.3g} %",
        "part": f"{100 * found.part:.3g} %",
        "tables": {
            "changes": rows.changes(found),
            "seeds": rows.seeds(found),
            "equal_loss": rows.equal_loss(found),
            "paths": rows.paths(found),
            "curve": rows.curve(found),
            "published": rows.published(found),
            "kinds": rows.kinds(found),
            "tuning": rows.tuning(found),
        },
        "examples": [_example(found, number) for number in range(len(found.examples[:MOST_EXAMPLES]))],
        "failures": [(arm.name, line) for arm in found.arms for line in arm.failures],
        "arms": [key(index, name) for index, name in enumerate(names)],
        "command": shlex.join(found.command),
        "kept": [record("Design", found.design), record("Environment", found.environment)],
    }


def _facts(found: RationaleSummary) -> list[tuple[str, str]]:
    seeds = {len(arm.seeds) for arm in found.arms}
    told = f"{min(seeds)}" if len(seeds) == 1 else f"{min(seeds, default=0)} to {max(seeds, default=0)}"
    return [
        ("task", f"{short(found.task, 60)} ({found.digest[:12]})"),
        ("asked for", "a class" if found.kind == "classification" else "a text"),
        ("test instances", f"{count(found.instances)}, {count(found.with_rationale)} with a rationale"),
        ("arms \N{MULTIPLICATION SIGN} seeds", f"{len(found.arms)} \N{MULTIPLICATION SIGN} {told}"),
        ("runs finished", f"{found.finished} of {found.runs}"),
        ("layers pooled by", found.pooling),
        ("tau", f"{found.tau:g}"),
        ("words deleted", f"{100 * found.part:.3g} %"),
    ]


def _row(found: RationaleSummary, arm: RationaleArm) -> dict[str, Any]:
    """A row of the first table: each metric, and under it how far it lies from the baseline's."""
    return {"arm": arm.name, "told": arm.told, "cells": [_cell(found, arm, metric) for metric in found.metrics]}


def _cell(found: RationaleSummary, arm: RationaleArm, metric: RationaleMetric) -> dict[str, str]:
    reading, change = arm.readings.get(metric.name), found.change(arm.name, metric.name)
    cell = {"label": rows.head(metric), "value": rows.written(metric, None if reading is None else reading.mean)}
    if change is None:
        return {**cell, "difference": "", "interval": "", "decided": ""}
    return {
        **cell,
        "difference": rows.differing(metric, change.mean),
        "interval": rows.within(metric, change),
        "decided": rows.decided(metric, change, found.level),
    }


def _example(found: RationaleSummary, number: int) -> dict[str, Any]:
    one: AttentionExample = found.examples[number]
    names = rows.models(found, one)
    whole = [name for name in names if len(one.attention[name]) == len(one.words)]
    shares = {name: one.attention[name] for name in whole}
    told = {name: one.predicted.get(name, "") for name in whole}
    return {
        "answer": one.answer,
        "lines": lines(one.words, shares, told, marked=one.rationale),
        "because": ", ".join(one.words[place] for place in one.rationale if place < len(one.words)),
        "table": rows.example(found, number),
    }
