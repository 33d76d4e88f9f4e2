"""What a report consists of: sections of tables, figures and notes.

A report is built once and rendered three times: as an HTML page (`html`), in the terminal and as CSV files (`export`).
A table holds values, not text: its columns say how a value is formatted, and which renderings show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from qkflow.formatting import MISSING

Value = str | int | float | tuple[float, ...] | None


def as_text(value: Value) -> str:
    """The format of columns that hold text or whole numbers.

    >>> as_text("standard"), as_text(3), as_text(None)
    ('standard', '3', '–')
    """
    return MISSING if value is None else str(value)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table: one or more values per row, shown together as one text."""

    title: str
    keys: tuple[str, ...]
    """Names of the values: the header in CSV files, and what `Table.show` selects by."""
    format: Callable[..., str] = as_text
    """From the values of one row to the text of its cell."""
    is_text: bool = False
    """Text is aligned left and may wrap; numbers are aligned right."""
    is_setting: bool = False
    """A setting moves to the caption if it is the same in every row."""
    style: Literal["plain", "verdict", "interval"] = "plain"
    """`verdict` adds an icon; `interval` draws its three values (estimate, low, high) on a strip."""


def attributes(value: object, *names: str) -> list[Any]:
    """The attributes of a value for the cells of a row; None for each if there is no value."""
    return [None if value is None else getattr(value, name) for name in names]


def text_column(title: str, key: str = "") -> Column:
    """A column of text."""
    return Column(title=title, keys=(key or title,), is_text=True)


def interval_column(title: str, key: str, format: Callable[..., str]) -> Column:
    """A column of estimates with the ends of their intervals."""
    return Column(title=title, keys=(key, f"{key}_low", f"{key}_high"), format=format)


def verdict_column() -> Column:
    """A column of verdicts, with their icons."""
    return Column(title="verdict", keys=("verdict",), is_text=True, style="verdict")


def number_column(title: str, key: str, format: Callable[..., str] = as_text, *, is_setting: bool = False) -> Column:
    """A column of numbers."""
    return Column(title=title, keys=(key,), format=format, is_setting=is_setting)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of values under columns; the first column names the row."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]
    """The values of each row, flat: as many as the columns have keys."""
    name: str = ""
    """The CSV file is named after it; tables without a name are not exported."""
    page: Sequence[str] | None = None
    """First keys of the columns on the page; None shows all of them, () none."""
    terminal: Sequence[str] = ()
    """First keys of the columns in the terminal; none: the table is not printed."""
    summary: str = ""
    """If set, the page shows the table collapsed under this line."""
    margin: float = 0.0
    """For columns of the style `interval`: half the width of the shaded band."""

    def __post_init__(self) -> None:
        expected = sum(len(column.keys) for column in self.columns)
        if any(len(row) != expected for row in self.rows):
            raise ValueError(f"table {self.caption!r}: expected {expected} values in every row")

    def show(self, *keys: str, caption: str = "", summary: str = "") -> Table:
        """The same table with other columns on the page, for a second section; it is neither exported nor printed."""
        return replace(self, caption=caption or self.caption, page=keys, terminal=(), name="", summary=summary)

    def select(self, keys: Sequence[str] | None) -> Table:
        """Keep the columns whose first key is in `keys`, in that order; None keeps all."""
        if keys is None:
            return self
        columns = {column.keys[0]: column for column in self.columns}
        rows = []
        for row in self.rows:
            cells = {column.keys[0]: values for column, values in self.cells(row)}
            rows.append(tuple(value for key in keys for value in cells[key]))
        return replace(self, columns=tuple(columns[key] for key in keys), rows=tuple(rows), page=None)

    def without_settings(self) -> Table:
        """Move the settings that are the same in every row to the caption."""
        texts = self.texts()
        if len(texts) < 2:
            return self
        values = [{row[n] for row in texts} - {MISSING} for n in range(len(self.columns))]
        same = [n for n, column in enumerate(self.columns) if column.is_setting and len(values[n]) < 2]
        moved = [f"{self.columns[n].title}: {text}" for n in same for text in values[n]]
        kept = [column.keys[0] for n, column in enumerate(self.columns) if n not in same]
        caption = f"{self.caption} ({'; '.join(moved)})" if moved else self.caption
        return replace(self.select(kept), caption=caption)

    def texts(self) -> list[tuple[str, ...]]:
        """The formatted cells of every row."""
        return [tuple(column.format(*values) for column, values in self.cells(row)) for row in self.rows]

    def cells(self, row: Sequence[Value]) -> Iterator[tuple[Column, tuple[Value, ...]]]:
        """The columns with their values in one row."""
        begin = 0
        for column in self.columns:
            yield column, tuple(row[begin : begin + len(column.keys)])
            begin += len(column.keys)


def text_table(
    *, caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], text_columns: Sequence[int] = (0,)
) -> Table:
    """A table of cells that are formatted already; `text_columns` are aligned left."""
    titles = [Column(title=title, keys=(title,), is_text=n in text_columns) for n, title in enumerate(columns)]
    return Table(caption=caption, columns=titles, rows=rows)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A chart as plain data for plotly.js; colours are roles of the palette, which the page fills in."""

    name: str
    caption: str
    charts: Mapping[str, dict[str, Any]]
    """Plotly figures by label: the reader chooses one; a single one needs no label."""
    choice: str = "Show"
    has_arm_buttons: bool = False
    """Whether buttons above the figure show and hide its arms."""
    empty: str = ""
    """Shown instead of a figure without data."""

    @property
    def has_data(self) -> bool:
        """Whether there is anything to draw."""
        return any(chart["data"] for chart in self.charts.values())


@dataclass(frozen=True, kw_only=True)
class FigureGrid:
    """Small figures side by side, on a scale from 0 to 100%."""

    figures: Sequence[Figure]


@dataclass(frozen=True, kw_only=True)
class Note:
    """A paragraph or a heading within a section."""

    text: str
    style: Literal["small", "plain", "heading"] = "small"
    summary: str = ""
    """If given, the text is hidden behind it on the page."""
    in_terminal: bool = False


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A verdict in words, with what to do next."""

    verdict: str
    text: str
    advice: str = ""
    in_terminal: str = ""
    """The line for a terminal, where a table has the verdicts already; empty for none."""


@dataclass(frozen=True, kw_only=True)
class BulletList:
    """A list of lines."""

    items: Sequence[str]
    in_terminal: bool = False


@dataclass(frozen=True, kw_only=True)
class Definitions:
    """Terms, each with a value and its meaning; either may be empty."""

    items: Sequence[tuple[str, str, str]]


@dataclass(frozen=True, kw_only=True)
class Record:
    """A JSON document, collapsed."""

    title: str
    content: Any


@dataclass(frozen=True, kw_only=True)
class ColoredText:
    """A text with each word shaded by its attention, one row per model."""

    caption: str
    name_title: str
    end_title: str
    lines: Sequence[Any]
    """`attention_maps.ColoredLine`s."""
    is_spaced: bool = True
    """Whether words are separated by spaces; tokens are not."""


@dataclass(frozen=True, kw_only=True)
class MapViewer:
    """The interactive viewer of attention maps; a page has at most one."""

    maps: Any
    """`attention_maps.AttentionMaps`."""
    has_choice: bool = True
    """Whether arms and excerpts can be chosen."""
    token: int | None = None
    """The token selected first; None: one in the middle."""


Block = Table | Figure | FigureGrid | Note | Statement | BulletList | Definitions | Record | ColoredText | MapViewer


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading with its blocks."""

    name: str
    """The anchor."""
    title: str
    nav: str
    """The title in the page's navigation."""
    blocks: Sequence[Block]


@dataclass(frozen=True, kw_only=True)
class ReportContent:
    """Everything that a page shows."""

    kind: str
    """`study` or `probe`."""
    title: str
    answer: str
    callouts: Sequence[str]
    """What a reader must know before the numbers."""
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    arms: Sequence[str] = ()
    """Names of the arms, the baseline first; they decide the colours."""
    source: str = "the study folder"
    """What the page was made from."""

    def blocks(self) -> list[Block]:
        """All blocks in order."""
        return [block for section in self.sections for block in section.blocks]

    def tables(self) -> dict[str, Table]:
        """The tables that are exported, by name."""
        return {block.name: block for block in self.blocks() if isinstance(block, Table) and block.name}
