"""The page of a study."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qkflow.experiment.metrics.recall import RecallSummary
from qkflow.experiment.summary import Comparison, ExperimentResult
from qkflow.io import write_file
from qkflow.report import figures, recall_figures, recall_rows, rows
from qkflow.report.exhibits import Group, exhibit_groups
from qkflow.report.gallery import Gallery, gather
from qkflow.report.shell import key, record, render, standing
from qkflow.report.wording import MISSING, brief, count, fixed, interval, probability, short, signed, visible

OWN = "its own spread"
"""What the smallest effect rests on unless said."""


def write_report(summary: ExperimentResult, folder: Path, out: Path, *, runs: Mapping[str, Path]) -> Path:
    """Write the page of the study in `folder` to `out`; `runs` has a finished run of each arm, for its attention maps.

    What is missing (weights, excerpts, whole arms) is said on the page, and the rest is shown.
    """
    gallery = gather([arm.name for arm in summary.arms], folder, runs)
    write_file(out, page(summary, gallery))
    return out


def page(summary: ExperimentResult, gallery: Gallery) -> str:
    """The page as text."""
    tokens = gallery.excerpts[0]["tokens"] if gallery.excerpts else ()
    groups = exhibit_groups(gallery.exhibits, [arm.name for arm in summary.arms], tokens)
    content, drawn = _content(summary, gallery, groups), _data(summary, gallery, groups)
    content["has"] = {name: bool(figure["data"]) for name, figure in drawn["figures"].items()}
    content["has"]["curves"] = bool(drawn["curves"]["tokens-loss"]["data"])
    return render("page.html", content, drawn)


def _content(summary: ExperimentResult, gallery: Gallery, groups: list[Group]) -> dict[str, Any]:
    """What the template writes into the page as text."""
    names = [arm.name for arm in summary.arms]
    shown = names[1] if len(names) == 2 else f"{len(names) - 1} arms"
    levels = [item.difference.level for item in summary.comparisons if item.difference is not None]
    failed = sum(len(arm.failures) for arm in summary.arms)
    return {
        "summary": summary,
        "title": f"{shown} against {summary.baseline} on {summary.corpus}",
        "answer": rows.answer(summary),
        "facts": _facts(summary),
        "verdicts": [_verdict(summary, item) for item in summary.comparisons],
        "callouts": [*filter(None, [standing(summary.finished, summary.runs, failed)]), *summary.remarks],
        "confidence": f"{100 * max(levels):.4g} % " if levels else "",
        "error_rate": f"{100 * summary.error_rate:.3g} %",
        "tables": {
            "losses": rows.losses(summary),
            "differences": rows.differences(summary),
            "spreads": rows.spreads(summary),
            "readings": rows.readings(summary),
            "costs": rows.costs(summary),
            "tuning": rows.tuning(summary),
            "curves": rows.learning(summary),
        },
        "recall": None if summary.recall is None else _recall(summary.recall),
        "failures": [(arm.name, line) for arm in summary.arms for line in arm.failures],
        "gallery": gallery,
        "groups": groups,
        "arms": [key(index, name) for index, name in enumerate(names)],
        "command": shlex.join(summary.command),
        "kept": _records(summary, gallery),
    }


def _facts(summary: ExperimentResult) -> list[tuple[str, str]]:
    first = summary.arms[0] if summary.arms else None
    seeds = {len(arm.seeds) for arm in summary.arms}
    told = f"{min(seeds)}" if len(seeds) == 1 else f"{min(seeds, default=0)} to {max(seeds, default=0)}"
    return [
        ("corpus", f"{short(summary.corpus, 60)} ({summary.digest[:12]})"),
        ("size", f"{summary.size}, context {count(summary.context)}"),
        ("tokens a run", MISSING if first is None else brief(first.tokens)),
        ("arms \N{MULTIPLICATION SIGN} seeds", f"{len(summary.arms)} \N{MULTIPLICATION SIGN} {told}"),
        ("runs finished", f"{summary.finished} of {summary.runs}"),
        ("matched in", "parameters and " + summary.match),
        ("margin", f"\N{PLUS-MINUS SIGN}{summary.margin:.4f} {summary.bits}"),
        ("error rate", f"{100 * summary.error_rate:.3g} % over all arms"),
    ]


def _verdict(summary: ExperimentResult, item: Comparison) -> dict[str, Any]:
    """A row of the verdict table, with its interval as positions on a strip 200 wide."""
    verdict, found = rows.verdict_of(summary, item.arm), item.difference
    strip: dict[str, Any] | None = None
    if found is not None:
        known = [other.difference for other in summary.comparisons if other.difference is not None]
        ends = [end for other in known for end in (other.mean, other.low, other.high) if end is not None]
        reach = 1.08 * max(summary.margin, *(abs(end) for end in ends))

        def at(value: float) -> float:
            return round(100 + 96 * value / reach, 2)

        strip = {"mean": at(found.mean), "margin": (at(-summary.margin), at(summary.margin)), "ends": None}
        if found.low is not None and found.high is not None:
            strip["ends"] = (at(found.low), at(found.high))
    return {
        "arm": item.arm,
        "verdict": verdict,
        "strip": strip,
        "mean": MISSING if found is None else signed(found.mean),
        "interval": "no pair of runs" if found is None else interval(found.low, found.high),
        "p": probability(item.p_holm),
        "smallest": MISSING if found is None else fixed(found.smallest),
        "accuracy": "" if summary.recall is None else recall_rows.told(summary.recall, item.arm),
        "rests_on": found.smallest_rests_on if found is not None and found.smallest_rests_on != OWN else "",
    }


def _recall(recall: RecallSummary) -> dict[str, Any]:
    """What is said of a task's accuracies."""
    return {
        "chance": recall_rows.chance(recall),
        "over_depths": recall.axes[0] == "length",
        "marked": recall.axes[0] == "length" and recall.context in recall.places,
        "accuracies": recall_rows.accuracies(recall),
        "differences": recall_rows.differences(recall),
        "cells": recall_rows.every_cell(recall),
        "maps": [(n, one.arm) for n, one in enumerate(recall.arms) if len(recall.axes) == 2 and recall_rows.known(one)],
    }


def _records(summary: ExperimentResult, gallery: Gallery) -> list[tuple[str, str]]:
    """Everything on record, as JSON to read."""
    kept = [("Design (design.json)", summary.design), ("Environment (environment.json)", summary.environment)]
    kept += [(f"Config of {short(name, 60)} (config.json)", config) for name, config in gallery.configs.items()]
    return [record(title, value) for title, value in kept]


def _data(summary: ExperimentResult, gallery: Gallery, groups: list[Group]) -> dict[str, Any]:
    """What the script draws."""
    drawn = {"forest": figures.forest(summary), "strips": figures.strips(summary), "reach": figures.reach(summary)}
    if summary.recall is not None:
        drawn |= recall_figures.figures(summary.recall)
    return {
        "figures": {**drawn, **{f"exhibit-{n}": group.figures[0] for n, group in enumerate(groups)}},
        "curves": figures.curves(summary),
        "exhibits": [group.figures for group in groups],
        "excerpts": gallery.excerpts,
        "maps": [{**arm, "name": visible(arm["name"])} for arm in gallery.arms],
    }
