"""Terminal tables of recall accuracy in 80 columns: by number of pairs, or by depth and length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from qkflow.training import CellResult, together

_ROWS = 21
"""Maximum number of depths; more are grouped into bands, since training instances have any depth."""
_BAND = 10
"""Width of a band, in percent."""
_BLOCK = 6
"""Lengths per table: as many as fit with their intervals."""


def percent(fraction: float) -> str:
    """A fraction as a percentage, which is 0 or 100 only if the fraction is exactly 0 or 1.

    >>> percent(0.9812), percent(1.0), percent(0.9999), percent(1e-6)
    ('98.1 %', '100 %', '> 99.9 %', '< 0.1 %')
    """
    if 0 < fraction < 0.0005:
        return "< 0.1 %"
    if 0.9995 <= fraction < 1:
        return "> 99.9 %"
    return f"{fraction:.0%}".replace("%", " %") if fraction in (0, 1) else f"{100 * fraction:.1f} %"


def tables(cells: Sequence[CellResult], axes: Sequence[str]) -> Iterator[Table]:
    """Tables of a grid: one row per number of pairs, or one row per depth and one column per length."""
    if "depth" not in axes:
        yield _by_pairs(cells)
        return
    lengths = sorted({cell.length or 0 for cell in cells})
    for begin in range(0, len(lengths), _BLOCK):
        yield _by_depth(cells, lengths[begin : begin + _BLOCK])


def _by_pairs(cells: Sequence[CellResult]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("pairs", "length", "accuracy", "95 % interval", "questions"):
        table.add_column(column, justify="right", no_wrap=True)
    for cell in cells:
        interval = f"{100 * cell.low:.1f} to {100 * cell.high:.1f} %"
        table.add_row(f"{cell.pairs:,}", f"{cell.length:,}", percent(cell.accuracy), interval, f"{cell.questions:,}")
    return table


def _by_depth(cells: Sequence[CellResult], lengths: Sequence[int]) -> Table:
    """Accuracies in percent with their intervals; the last row is the mean over depths."""
    table = Table(box=None, pad_edge=False)
    table.add_column("depth", justify="right", no_wrap=True)
    for length in lengths:
        table.add_column(f"{length:,}", justify="right", no_wrap=True)
    for name, depths in _bands(sorted({cell.depth or 0 for cell in cells})):
        row = [[cell for cell in cells if cell.length == length and cell.depth in depths] for length in lengths]
        table.add_row(name, *map(_brief, row))
    columns = [[cell for cell in cells if cell.length == length] for length in lengths]
    table.add_row("mean", *map(_brief, columns), style="bold")
    return table


def _bands(depths: Sequence[int]) -> list[tuple[str, Sequence[int]]]:
    """Labels and their depths: one depth each, or bands if there are too many."""
    if len(depths) <= _ROWS:
        return [(f"{depth} %", [depth]) for depth in depths]
    firsts = range(0, 100, _BAND)
    bands = [(first, 100 if first == firsts[-1] else first + _BAND - 1) for first in firsts]
    return [(f"{first}-{last} %", range(first, last + 1)) for first, last in bands]


def _brief(cells: Sequence[CellResult]) -> str:
    if not cells:
        return "\N{EN DASH}"
    cell = together(cells)
    return f"{100 * cell.accuracy:.0f} [dim]{100 * cell.low:.0f}-{100 * cell.high:.0f}[/]"
