"""Print a report in a terminal of 80 columns, or as plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from qkflow.experiment.metrics.rationale import RationaleSummary
from qkflow.experiment.summary import ExperimentResult
from qkflow.formatting import escape_unprintable, shorten
from qkflow.report.sections import BulletList, Note, ReportContent, Statement, Table
from qkflow.report.study import build_report

WIDTH = 80
_GAP = 2
_MIN_NAME_WIDTH = 12
"""The first column may be made as narrow as this before a table is split."""
_NAME_WIDTH = 24
"""Longer names are shortened if the table is split."""
_STYLES = {"better": "bold green", "worse": "bold red", "equivalent": "bold cyan", "undecided": "bold yellow"}


def terminal(result: ExperimentResult | RationaleSummary) -> RenderableType:
    """The verdicts, tables and remarks of a study for a terminal."""
    return render_report(build_report(result))


def render_report(report: ReportContent) -> RenderableType:
    """The parts of a report that are meant for a terminal."""
    parts: list[RenderableType] = []
    blocks = list(report.blocks())
    if not any(isinstance(block, Statement) for block in blocks):
        parts += [Text(), _line(report.answer)]
    for block in blocks:
        if isinstance(block, Statement):
            parts.append(Padding(_line(f"{block.text} {block.advice}".rstrip()), (0, 0, 0, _GAP)))
        elif isinstance(block, Table) and block.terminal:
            caption = Text(escape_unprintable(block.caption), style="italic")
            parts += [Text(), caption, *render_table(block.select(block.terminal))]
        elif isinstance(block, Note) and block.in_terminal:
            parts.append(_line(block.text))
        elif isinstance(block, BulletList) and block.in_terminal:
            parts += [_line(f"note: {item}") for item in block.items]
    return Group(*parts, *(_line(f"note: {text}") for text in report.callouts))


def render_table(table: Table) -> list[RenderableType]:
    """A table in as many blocks of columns as fit the width; each block repeats the first column."""
    texts = [tuple(map(escape_unprintable, row)) for row in table.texts()]
    titles = [escape_unprintable(column.title) for column in table.columns]
    cells = [max((len(row[n]) for row in texts), default=0) for n in range(len(titles))]
    widths = [max(cell, len(title)) for cell, title in zip(cells, titles, strict=True)]
    if sum(widths) + _GAP * (len(widths) - 1) > WIDTH:  # wrap the titles
        words = [max(map(len, title.split()), default=0) for title in titles]
        widths = [max(cell, word, min(8, len(title))) for cell, word, title in zip(cells, words, titles, strict=True)]
    room = WIDTH - sum(widths[1:]) - _GAP * (len(widths) - 1)
    if _MIN_NAME_WIDTH <= room < widths[0]:
        widths[0] = room  # names wrap
    elif room < widths[0]:
        widths[0] = min(widths[0], _NAME_WIDTH)
        texts = [(shorten(row[0], _NAME_WIDTH), *row[1:]) for row in texts]
    blocks: list[list[int]] = [[]]
    left = WIDTH - widths[0]
    for n in range(1, len(widths)):
        is_wrapped = table.columns[n].is_text and n == len(widths) - 1  # takes what is left
        if widths[n] + _GAP > left and blocks[-1] and not is_wrapped:
            blocks.append([])
            left = WIDTH - widths[0]
        blocks[-1].append(n)
        left -= widths[n] + _GAP
    return [_rich_table(table, texts, titles, [0, *block], widths) for block in blocks]


def _rich_table(
    table: Table, texts: Sequence[Sequence[str]], titles: Sequence[str], columns: Sequence[int], widths: Sequence[int]
) -> RichTable:
    rich = RichTable(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    for n in columns:
        is_text = table.columns[n].is_text or n == 0
        title = titles[n] if is_text else "\n".join(textwrap.wrap(titles[n], widths[n]))
        width = widths[n] if n == 0 else None
        justify = "left" if is_text else "right"
        rich.add_column(Text(title), justify=justify, no_wrap=not is_text, overflow="fold", width=width)
    for row in texts:  # `Text`, not markup: names are untrusted
        cells = [
            Text(row[n], style=_STYLES.get(row[n], "") if table.columns[n].style == "verdict" else "") for n in columns
        ]
        rich.add_row(*cells)
    return rich


def _line(text: str) -> Text:
    return Text(escape_unprintable(text), overflow="fold")
