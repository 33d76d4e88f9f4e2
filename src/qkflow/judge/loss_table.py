"""The losses of runs as a table: read from rows, a data frame or a CSV file, and checked.

arm,seed,loss            one row per run, or one per run and held-out block:
arm,seed,block,loss,weight
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qkflow.errors import UsageError, short_repr
from qkflow.io import refuse_special_files

COLUMNS = ("arm", "seed", "loss", "block", "weight")
_REQUIRED = COLUMNS[:3]
_LIMIT = 1e100
"""The squares of larger numbers, and of losses that are all below its inverse, are not floats."""


class LossTable(NamedTuple):
    """The losses of a table, checked."""

    runs: dict[str, dict[str, np.ndarray]]
    """For each arm and seed, the loss of each block times its weight."""
    weights: np.ndarray
    """One per block."""
    resolution: float
    """The unit of the last digit of a run's loss."""
    notices: tuple[str, ...] = ()


class LossRow(NamedTuple):
    """One row of the table, with its position for error messages."""

    where: str
    arm: Any
    seed: Any
    loss: Any
    block: Any = None
    weight: Any = None


def arrange(rows: Iterable[LossRow]) -> LossTable:
    """Check the rows, and arrange their losses by arm, seed and block."""
    cells: dict[str, dict[str, dict[str, float]]] = {}
    origins: dict[tuple[str, str, str], str] = {}
    weights: dict[str, float] = {}
    last_digit, largest = math.inf, 0.0
    has_rows = False
    for row in rows:
        has_rows = True
        arm, seed = _name(row, "arm"), _name(row, "seed")
        block = "" if row.block is None else _name(row, "block")
        loss, weight = _number(row, "loss"), 1.0 if row.weight is None else _number(row, "weight")
        if weight < 0:
            raise UsageError(f"{row.where}: the weight {weight:g} is negative: expected 0 or more")
        key = (arm, seed, block)
        if key in origins:
            what = f"arm {arm}, seed {seed}" + (f", block {block}" if block else "")
            raise UsageError(f"{row.where}: {what} stands in {origins[key]} already: give every run once")
        if weights.setdefault(block, weight) != weight:
            raise UsageError(f"{row.where}: block {block} has the weight {weight:g}, and {weights[block]:g} before")
        origins[key] = row.where
        largest = max(largest, abs(loss))
        last_digit = min(last_digit, _last_digit(row.loss))
        cells.setdefault(arm, {}).setdefault(seed, {})[block] = loss
    if 0 < largest < 1 / _LIMIT:
        raise UsageError(f"all losses are below {1 / _LIMIT:g}: give them in another unit")
    if not has_rows:
        raise UsageError("the table has no rows: expected one per run, with the columns arm, seed and loss")
    blocks = list(weights)
    for arm, runs in cells.items():
        for seed, run in runs.items():
            if missing := [block for block in blocks if block not in run]:
                raise UsageError(
                    f"arm {arm}, seed {seed} has no block {missing[0]}: expected the same {len(blocks)} blocks in "
                    "every run"
                )
    total = np.array([weights[block] for block in blocks])
    if not total.sum() > 0:
        raise UsageError("all weights are 0: expected at least one above 0")
    runs = {
        arm: {seed: total * [run[block] for block in blocks] for seed, run in by_seed.items()}
        for arm, by_seed in cells.items()
    }
    return LossTable(runs, total, last_digit * float(np.sqrt(np.square(total).sum()) / total.sum()))


def _name(row: LossRow, column: str) -> str:
    value = getattr(row, column)
    text = "" if value is None else str(value).strip()
    if not text or (isinstance(value, float) and math.isnan(value)):
        raise UsageError(f"{row.where}: the {column} is empty")
    return text


def _number(row: LossRow, column: str) -> float:
    value = getattr(row, column)
    try:
        if isinstance(value, bool) or (isinstance(value, str) and "_" in value):  # Python reads 2_5 as 25
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{row.where}: the {column} is {short_repr(value)}, expected a number") from None
    except OverflowError:  # an integer
        number = math.inf
    if not math.isfinite(number):
        advice = "leave out runs that failed" if column == "loss" else "expected a number"
        raise UsageError(f"{row.where}: the {column} is {number}: {advice}")
    if abs(number) > _LIMIT:
        raise UsageError(f"{row.where}: the {column} is {number:g}: expected at most {_LIMIT:g}")
    return number


def _last_digit(loss: Any) -> float:
    """The unit of the last digit of a number, as it is written.

    >>> _last_digit("2.50"), _last_digit(91), _last_digit(" 1e-3 ")
    (0.01, 1.0, 0.001)
    """
    text = loss.strip() if isinstance(loss, str) else repr(float(loss)).removesuffix(".0")
    try:
        exponent = Decimal(text).as_tuple().exponent
    except InvalidOperation:
        return 0.0
    return 10.0**exponent if isinstance(exponent, int) else 0.0


def _columns(header: Sequence[str], where: str) -> dict[str, int]:
    """The position of each column that is used."""
    names = [str(name).strip().casefold() for name in header]
    if missing := [name for name in _REQUIRED if name not in names]:
        raise UsageError(
            f"{where}: no column {' or '.join(map(repr, missing))}, got {', '.join(names) or 'none'}: expected "
            "arm, seed and loss, and optionally block and weight"
        )
    for name in COLUMNS:
        if names.count(name) > 1:
            raise UsageError(f"{where}: two columns are called {name!r}: remove or rename one")
    if "weight" in names and "block" not in names:
        raise UsageError(f"{where}: a column 'weight' without a column 'block': a weight is the weight of a block")
    return {name: names.index(name) for name in COLUMNS if name in names}


def read_csv(path: Path) -> Iterable[LossRow]:
    """The rows of a CSV file with a header."""
    refuse_special_files(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist: give a CSV file or a folder of runs") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as text ({error}): expected a CSV file in UTF-8") from None
    reader = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
    try:
        lines = [(reader.line_num, fields) for fields in reader if any(field.strip() for field in fields)]
    except csv.Error as error:
        raise UsageError(f"{path}, line {reader.line_num}: not a CSV file ({error})") from None
    if not lines:
        raise UsageError(f"{path} is empty: expected a header and one row per run")
    header = lines[0][1]
    if len(header) == 1 and (other := next((mark for mark in ";\t|" if mark in header[0]), None)):
        raise UsageError(f"{path}: columns are separated by {other!r}: expected commas")
    columns = _columns(header, str(path))
    for number, fields in lines[1:]:
        where = f"{path}, line {number}"
        if len(fields) != len(header):
            raise UsageError(f"{where}: got {len(fields)} fields, expected {len(header)} as in the header")
        yield LossRow(where, **{name: fields[index] for name, index in columns.items()})


def read_records(table: Any) -> Iterable[LossRow]:
    """The rows of a data frame, a dictionary of columns, or a sequence of dictionaries or tuples."""
    if hasattr(table, "to_dicts"):  # polars
        table = table.to_dicts()
    elif hasattr(table, "to_dict") and hasattr(table, "columns"):  # pandas
        table = table.to_dict("records")
    elif isinstance(table, Mapping):
        names, lists = list(table), [list(column) for column in table.values()]
        if len({len(column) for column in lists}) > 1:
            raise UsageError("the columns of the table have different lengths")
        table = [dict(zip(names, values, strict=True)) for values in zip(*lists, strict=True)]
    try:
        rows = list(table)
    except TypeError:
        raise UsageError(f"got a {type(table).__name__}: expected rows, a data frame, a CSV file or a folder") from None
    for number, row in enumerate(rows, 1):
        where = f"row {number}"
        if isinstance(row, Mapping):
            columns = _columns(list(row), where)
            values = list(row.values())
            yield LossRow(where, **{name: values[index] for name, index in columns.items()})
        elif isinstance(row, Sequence) and not isinstance(row, str) and len(row) in (3, 4, 5):
            yield LossRow(where, **dict(zip(COLUMNS, row, strict=False)))
        else:
            raise UsageError(f"{where}: expected a dictionary, or (arm, seed, loss), got {row!r}")
