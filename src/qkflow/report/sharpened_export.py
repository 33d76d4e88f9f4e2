"""The numbers of a study of sharper attention as files for other programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qkflow import io
from qkflow.experiment.metrics.rationale import RationaleSummary
from qkflow.report.export import csv_text, finite
from qkflow.report.sharpened_rows import decided

CHANGES = ("arm", "baseline", "metric", "mean", "low", "high", "level", "p", "p_holm", "decided")


def sharpened_json(found: RationaleSummary, path: Path) -> Path:
    """Everything found as JSON; a number that is not finite is null, and a learning rate is a key as text."""
    io.write_json(path, finite(_plain(found)))
    return path


def sharpened_csv(found: RationaleSummary, path: Path) -> tuple[Path, Path]:
    """A row for each finished run into `path`, and one for each difference into a file beside it (`-changes`).

    Text that a spreadsheet would take for a formula gets an apostrophe before it.
    """
    readings = [[arm.readings.get(metric.name) for metric in found.metrics] for arm in found.arms]
    runs = [
        (arm.name, seed, arm.lr, *(None if one is None else _at(one.by_seed, place) for one in own))
        for arm, own in zip(found.arms, readings, strict=True)
        for place, seed in enumerate(arm.seeds)
    ]
    names = [metric.name for metric in found.metrics]
    beside = path.with_name(f"{path.stem}-changes{path.suffix}")
    io.write_file(path, csv_text(("arm", "seed", "lr", *names), runs))
    io.write_file(beside, csv_text(CHANGES, _changes(found)))
    return path, beside


def _changes(found: RationaleSummary) -> list[tuple[Any, ...]]:
    metrics = {metric.name: metric for metric in found.metrics}
    baseline = found.arms[0].name if found.arms else None
    return [
        (
            one.arm,
            baseline,
            one.metric,
            one.mean,
            one.low,
            one.high,
            found.level,
            one.p,
            one.p_holm,
            decided(metrics[one.metric], one, found.level) if one.metric in metrics else "",
        )
        for one in found.changes
    ]


def _at(values: tuple[float, ...], place: int) -> float | None:
    return values[place] if place < len(values) else None


def _plain(value: Any) -> Any:
    """Dataclasses and mappings, however deep, as JSON has them: tables with names for keys."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else f"{key:g}": _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
