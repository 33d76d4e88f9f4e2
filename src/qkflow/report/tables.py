"""The same numbers for a terminal of 80 columns; plain text where it is none."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from qkflow.experiment.metrics.recall import RecallSummary
from qkflow.experiment.summary import ExperimentResult
from qkflow.report import recall_rows, rows
from qkflow.report.rows import Table
from qkflow.report.wording import brief, count, fixed, interval, percent, probability, short, signed, size, visible

_STYLES = {"better": "bold green", "worse": "bold red", "equivalent": "bold cyan", "undecided": "bold yellow"}
_COLUMNS = 80
_NAME = 24
"""Characters of an arm's name beside many figures."""


def terminal(summary: ExperimentResult) -> RenderableType:
    """The answer, the verdicts with their figures, the costs, and what a reader must know."""
    parts: list[RenderableType] = [Text()]
    if summary.finished < summary.runs:
        parts.append(lined(f"unfinished: {summary.finished} of {summary.runs} runs", style="bold yellow"))
    parts.append(_verdicts(summary))
    for verdict in summary.verdicts:
        right = "" if summary.recall is None else recall_rows.told(summary.recall, verdict.arm)
        told = " ".join(filter(None, (verdict.sentence, verdict.advice, right)))
        parts.append(Padding(lined(told), (0, 0, 0, 2)))
    if summary.recall is not None:
        parts += _recall(summary.recall)
    parts += [Text(), _costs(summary)]
    for text in (*summary.remarks, *(f"{arm.name}: {line}" for arm in summary.arms for line in arm.failures)):
        parts.append(lined(f"note: {text}"))
    return Group(*parts)


def _verdicts(summary: ExperimentResult) -> RichTable:
    table = _table("arm", "verdict", f"bits/{summary.unit.split()[0]}", "difference (interval)", "p (Holm)")
    baseline = summary.arms[0] if summary.arms else None
    if baseline is not None:
        table.add_row(named(baseline.name), Text("baseline"), Text(fixed(baseline.mean)), Text(""), Text(""))
    means = {arm.name: arm.mean for arm in summary.arms}
    for comparison in summary.comparisons:
        kind, found = rows.verdict_of(summary, comparison.arm).kind, comparison.difference
        told = "no pair of runs"
        if found is not None:
            ends = "one seed" if found.low is None else interval(found.low, found.high)
            told = f"{signed(found.mean)} ({ends})"
        table.add_row(
            named(comparison.arm),
            Text(kind, style=_STYLES[kind]),
            Text(fixed(means.get(comparison.arm))),
            Text(told),
            Text(probability(comparison.p_holm)),
        )
    return table


def _recall(recall: RecallSummary) -> list[RenderableType]:
    """Accuracies over all cells and along the first axis, in as many tables as they need."""
    axis = recall_rows.AXES[recall.axes[0]]
    columns = [("all", [one.overall for one in recall.arms])]
    columns += [(f"{value:,}", [one.along[n] for one in recall.arms]) for n, value in enumerate(recall.places)]
    cells = [(head, [recall_rows.with_half(reading) for reading in found]) for head, found in columns]
    names = max(len(short(one.arm, _NAME)) for one in recall.arms)
    alike = any(text.endswith(recall_rows.ALIKE) for _, found in cells for text in found)
    means = f"; {recall_rows.ALIKE} all seeds alike" if alike else ""
    told = f"accuracy in % by {axis} ({recall_rows.how(recall)} over seeds{means})"
    parts: list[RenderableType] = [Text(), lined(told)]
    for block in _fitting(cells, _COLUMNS - max(8, names) - 2):
        table = columned("arm", *(head for head, _ in block))
        for row, one in enumerate(recall.arms):
            table.add_row(Text(short(one.arm, _NAME)), *(Text(found[row]) for _, found in block))
        parts.append(table)
    parts.append(lined(f"{recall_rows.chance(recall)} The verdicts rest on the loss, not on accuracy."))
    return parts


def _fitting(columns: Sequence[tuple[str, list[str]]], room: int) -> list[list[tuple[str, list[str]]]]:
    """Columns in blocks, each as wide as there is room for."""
    blocks: list[list[tuple[str, list[str]]]] = []
    left = 0
    for head, cells in columns:
        width = 2 + max(map(len, (head, *cells)))
        if not blocks or width > left:
            blocks, left = [*blocks, []], room
        blocks[-1].append((head, cells))
        left -= width
    return blocks


def _costs(summary: ExperimentResult) -> RichTable:
    table = _table("arm", "parameters", "off by", "FLOPs/token", "tokens/s", "peak", "state")
    for arm in summary.arms:
        table.add_row(
            named(arm.name),
            Text(count(arm.parameters)),
            Text(percent(arm.parameters_off)),
            Text(brief(arm.flops_per_token)),
            Text(count(arm.tokens_per_second)),
            Text(size(arm.peak_bytes)),
            Text(size(arm.state_bytes)),
        )
    return table


def _table(name: str, *figures: str) -> RichTable:
    return columned(name, *figures, words=("verdict",))


def columned(name: str, *figures: str, words: Sequence[str] = (), wrap: Sequence[str] = ()) -> RichTable:
    """A table without lines: names at the left, figures at the right but for the columns that hold words."""
    table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(name, overflow="fold", min_width=8)
    for label in figures:
        table.add_column(label, justify="left" if label in words else "right", no_wrap=label not in wrap)
    return table


def rendered(table: Table) -> RichTable:
    """A table as a terminal shows it: words may wrap, figures do not."""
    shown = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, column in enumerate(table.columns):
        words = number in table.words
        figure = not words and number > 0
        shown.add_column(Text(visible(column)), justify="right" if figure else "left", no_wrap=figure)
    for row in table.rows:
        shown.add_row(*(Text(visible(cell)) for cell in row))  # not markup: text of others
    return shown


def named(name: str) -> Text:
    """A name that is not too long, with nothing hidden in it."""
    return Text(short(name, 48))


def lined(text: str, style: str = "") -> Text:
    """A line of text with nothing hidden in it."""
    return Text(visible(text), style=style, overflow="fold")
