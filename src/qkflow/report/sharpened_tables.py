"""A study of sharper attention for a terminal of 80 columns; plain text where it is none."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from qkflow.experiment.metrics.rationale import MetricName, RationaleSummary
from qkflow.report import sharpened_rows as rows
from qkflow.report.tables import columned, lined, named
from qkflow.report.wording import MISSING, count, probability

_STYLES = {"better": "bold green", "worse": "bold red", "": ""}
_SHORT: dict[MetricName, str] = {
    "comprehensiveness": "compr.",
    "sufficiency": "suff.",
    "effective": "tokens",
    "random": "random",
}
"""What titles too long for a terminal are called there."""
_LEFT_TO_THE_PAGE: MetricName = "gradient"


def sharpened_terminal(found: RationaleSummary) -> RenderableType:
    """The answer, each arm's metrics, the differences that the answer rests on, and what a reader must know."""
    parts: list[RenderableType] = [Text()]
    if found.finished < found.runs:
        parts.append(lined(f"unfinished: {found.finished} of {found.runs} runs", style="bold yellow"))
    parts += [lined(found.answer or "There is no answer yet."), Text(), _readings(found)]
    if found.changes:
        parts += [Text(), _changes(found)]
    if (there := rows.equal_loss(found)) is not None:
        told = ", ".join(f"{name} {mass}" for name, mass, _ in there.rows)
        parts += [Text(), lined(f"{there.columns[1]}, at equal loss ({found.equal_loss:.4g} nats): {told}")]
    if found.published:
        told = "; ".join(f"{name} {p:g} / {ac:g} / {c:g}" for name, p, ac, c in found.published)
        parts.append(lined(f"published, from other models (performance / AC / comprehensiveness): {told}"))
    skipped = [f"{count(number)} instances left out: {reason}" for reason, number in found.skipped.items()]
    failures = [f"{arm.name}: {line}" for arm in found.arms for line in arm.failures]
    parts += [lined(f"note: {text}") for text in (*found.remarks, *skipped, *failures)]
    return Group(*parts)


def _readings(found: RationaleSummary) -> RenderableType:
    metrics = [metric for metric in found.metrics if metric.name != _LEFT_TO_THE_PAGE]
    heads = [_SHORT.get(metric.name, rows.head(metric)) for metric in metrics]
    table = columned("arm", *heads, wrap=heads)
    for arm in found.arms:
        means = [None if (one := arm.readings.get(metric.name)) is None else one.mean for metric in metrics]
        cells = [rows.written(metric, mean) for metric, mean in zip(metrics, means, strict=True)]
        table.add_row(named(arm.name), *map(Text, cells))
    return table


def _changes(found: RationaleSummary) -> RenderableType:
    """The differences; yardsticks, which are better in neither direction, are left to the page."""
    table = columned("arm", "metric", "difference (interval)", "p (Holm)", "", words=("metric", ""))
    for arm in found.arms[1:]:
        for metric in found.metrics:
            change = found.change(arm.name, metric.name)
            if change is None or metric.better == "neither":
                continue
            kind = rows.decided(metric, change, found.level)
            ends = "one seed" if change.low is None else rows.within(metric, change)
            table.add_row(
                named(arm.name),
                Text(rows.head(metric)),
                Text(f"{rows.differing(metric, change.mean)} ({ends})"),
                Text(probability(change.p_holm)),
                Text(kind or MISSING, style=_STYLES[kind]),
            )
    return table
