"""Write the results of a study as files for other programs: all of it as JSON, its tables as CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qkflow.experiment.metrics.rationale import RationaleSummary
from qkflow.experiment.summary import ExperimentResult
from qkflow.formatting import escape_unprintable
from qkflow.io import write_file, write_json
from qkflow.report.sections import Value
from qkflow.report.study import build_report


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
