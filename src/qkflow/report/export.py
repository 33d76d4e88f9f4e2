"""Write the results of a study as text: in a terminal of 80 columns, as CSV files, and as JSON."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from qkflow.experiment.metrics.rationale import RationaleSummary
from qkflow.experiment.result import ExperimentResult
from qkflow.formatting import escape_unprintable, shorten
from qkflow.io import write_file, write_json
from qkflow.report.sections import BulletList, Note, ReportContent, Statement, Table, Value
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
    blocks = report.blocks()
    if not any(isinstance(block, Statement) for block in blocks):
        parts += [Text(), _line(report.answer)]
    for block in blocks:
        if isinstance(block, Statement):
            if block.in_terminal:
                parts.append(_line(block.in_terminal))
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
    renderables: list[RenderableType] = []
    for block in blocks:
        rich = RichTable(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
        for n in (0, *block):
            is_text = table.columns[n].is_text or n == 0
            title = titles[n] if is_text else "\n".join(textwrap.wrap(titles[n], widths[n]))
            justify, width = "left" if is_text else "right", widths[0] if n == 0 else None
            rich.add_column(Text(title), justify=justify, no_wrap=not is_text, overflow="fold", width=width)
        for row in texts:  # `Text`, not markup: names are untrusted
            styles = [_STYLES.get(row[n], "") if table.columns[n].style == "verdict" else "" for n in (0, *block)]
            rich.add_row(*(Text(row[n], style=style) for n, style in zip((0, *block), styles, strict=True)))
        renderables.append(rich)
    return renderables


def _line(text: str) -> Text:
    return Text(escape_unprintable(text), overflow="fold")


def export_json(result: ExperimentResult | RationaleSummary, path: Path) -> Path:
    """Write the whole result as JSON; a number that is not finite becomes null."""
    write_json(path, finite(result))
    return path


def export_csv(result: ExperimentResult | RationaleSummary, path: Path) -> list[Path]:
    """Write a row for each finished run to `path`, and each other table next to it: `results-comparisons.csv`.

    Text that a spreadsheet would run as a formula gets an apostrophe in front.
    """
    paths = []
    for name, table in build_report(result).tables().items():
        target = path if name == "runs" else path.with_name(f"{path.stem}-{name}{path.suffix}")
        header = [key for column in table.columns for key in column.keys]
        write_file(target, csv_text(header, table.rows))
        paths.append(target)
    return paths


def csv_text(header: Sequence[str], rows: Sequence[Sequence[Value]]) -> str:
    r"""A table as CSV without formulas.

    >>> csv_text(["arm", "loss"], [["=x", 2.5]])
    "arm,loss\n'=x,2.5\n"
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_cell, header))
    writer.writerows([_cell(value) for value in row] for row in rows)
    return text.getvalue()


def finite(value: Any) -> Any:
    """Dataclasses, mappings and sequences as JSON has them, with None for every number that is not finite.

    >>> finite({"losses": (2.0, float("nan")), 0.5: "a"})
    {'losses': [2.0, None], '0.5': 'a'}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: finite(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else f"{key:g}": finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Value) -> str | int | float | None:
    if isinstance(value, tuple):
        return " ".join(repr(float(number)) for number in value)
    if not isinstance(value, str):
        return value
    text = escape_unprintable(value)
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@", "|", "%")) else text
