"""Turn measured rows into the Markdown tables of docs/speed.md and README.md.

A table is filled in between `<!-- table: NAME -->` and `<!-- end -->`. There are two layouts: a list has one line per
measurement; a grid has one line per kind of work and one column per peer or variant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

TABLES: Mapping[str, Literal["list", "grid"]] = {
    "training": "list",
    "generation": "list",
    "decoding": "grid",
    "attention": "grid",
    "attention-decoding": "list",
    "delta-rule": "list",
    "delta-family": "grid",
    "delta-family-torch": "grid",
    "kuramoto": "grid",
    "coupling": "grid",
    "growth": "list",
    "hf-wrapper": "grid",
    "import": "list",
}
README = {
    ("training", "`1m`, 32 x 256 tokens", "HF Llama"): ("training, 1M parameters", "HF Llama"),
    ("training", "`1m`, 32 x 256 tokens", "x-transformers"): ("", "x-transformers"),
    ("generation", "`1m`, batch 1", "HF Llama"): ("greedy generation, 1M parameters", "HF Llama"),
    ("attention", "width 32, length 1,024", "forward and backward"): (
        "causal attention with backward, 1,024 tokens",
        "PyTorch SDPA",
    ),
    ("delta-rule", "forward and backward, 4 x 1,024 tokens, 8 heads", "transformers"): (
        "gated delta rule with backward, 1,024 tokens",
        "transformers",
    ),
}
"""The rows of the table in README.md by table, work and peer, with their labels there."""
_MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_HEADERS = {"speed": "times as fast", "time": "times as long", "memory": "times the memory", "share": "share"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A measured ratio.

    | kind   | ratio                                 |
    |--------|---------------------------------------|
    | speed  | the peer's time divided by ours       |
    | time   | our time divided by the peer's        |
    | memory | our memory divided by the peer's      |
    | share  | our rate divided by the peer's        |
    """

    table: str
    work: str
    against: str
    """The peer; in a grid, the column."""
    kind: Literal["speed", "time", "memory", "share"]
    ratio: float
    """Median over rounds."""
    quartiles: tuple[float, float] | None = None
    """First and third quartile of the ratio; None if it was measured once."""
    ours: float
    """Median, in `unit`."""
    peer: float
    unit: str
    at_least: float | None = None
    """The target."""
    at_most: float | None = None
    """The target, where lower is better."""
    control: float | None = None
    """Interquartile range of the control's time divided by its median: 0.05 on an idle machine, 0.5 on a busy one."""
    rounds: int
    threads: int

    @property
    def is_met(self) -> bool | None:
        """Whether the target is reached; None without a target."""
        if self.at_least is None and self.at_most is None:
            return None
        return (self.at_least is None or self.ratio >= self.at_least) and (
            self.at_most is None or self.ratio <= self.at_most
        )

    @property
    def bound(self) -> str:
        """The target in words; empty without a target."""
        if self.at_most is not None:
            return f"at most {self.at_most:g}"
        return "" if self.at_least is None else f"at least {self.at_least:g}"


def read_rows(results: Mapping[str, Any]) -> list[Row]:
    """The rows of all benchmarks in the results."""
    rows = [row for run in results["benchmarks"].values() for row in run["rows"]]
    return [Row(**{**row, "quartiles": row["quartiles"] and tuple(row["quartiles"])}) for row in rows]


def fill(page: str, results: Mapping[str, Any]) -> str:
    """Replace the content of every marked table of a page."""
    rows = read_rows(results)

    def replacement(match: re.Match[str]) -> str:
        opening, name, end = match.groups()
        if name == "runs":
            table = runs_table(results)
        elif name == "readme":
            table = readme_table(rows)
        elif name == "missed":
            table = missed_table(rows)
        elif name in TABLES:
            layout = list_table if TABLES[name] == "list" else grid_table
            in_table = [row for row in rows if row.table == name]
            table = layout(in_table) if in_table else "Not measured."
        else:
            raise ValueError(f"unknown table {name!r}; expected runs, missed, readme or one of {', '.join(TABLES)}")
        return f"{opening}\n{table}\n\n{end}"

    return _MARKED.sub(replacement, page)


def list_table(rows: Sequence[Row]) -> str:
    """One line per row: work, peer, ratio, target, and the measured values of both."""
    kinds = {row.kind for row in rows}
    header = ["", "against", _HEADERS[kinds.pop()] if len(kinds) == 1 else "ratio", "target", "qkflow", "peer"]
    lines = [
        [row.work, row.against, ratio(row), _targets([row]), amount(row.ours, row.unit), amount(row.peer, row.unit)]
        for row in rows
    ]
    for i in reversed(range(1, len(lines))):
        if lines[i][0] == lines[i - 1][0]:
            lines[i][0] = ""
    return _markdown(_without_empty_column([header, *lines], "target"))


def grid_table(rows: Sequence[Row]) -> str:
    """One line per kind of work, one column per peer or variant, and the targets."""
    columns, works = dict.fromkeys(row.against for row in rows), dict.fromkeys(row.work for row in rows)
    lines = []
    for work in works:
        cells = {row.against: row for row in rows if row.work == work}
        texts = [ratio(cells[column]) if column in cells else "" for column in columns]
        lines.append([work, *texts, _targets(list(cells.values()))])
    return _markdown(_without_empty_column([["", *columns, "target"], *lines], "target"))


def readme_table(rows: Sequence[Row]) -> str:
    """The most important rows, with short labels and without quartiles."""
    by_key = {(row.table, row.work, row.against): row for row in rows}
    lines = [[*labels, ratio(by_key[key]).split(" ")[0]] for key, labels in README.items() if key in by_key]
    return _markdown([["", "against", "times as fast"], *lines])


def missed_table(rows: Sequence[Row]) -> str:
    """The rows that miss their target."""
    lines = [[row.table, row.work, row.against, ratio(row), row.bound] for row in rows if row.is_met is False]
    header = ["table", "", "against", "ratio", "target"]
    return _markdown([header, *lines]) if lines else f"All {sum(row.is_met is True for row in rows)} targets are met."


def runs_table(results: Mapping[str, Any]) -> str:
    """The machines, and the settings of each benchmark."""
    header = ["benchmark", "threads", "rounds", "control", "load", "duration", "date", "commit"]
    lines, machines = [], {}
    for name, run in results["benchmarks"].items():
        rows, machine = run["rows"], run["machine"]
        controls = [row["control"] for row in rows if row["control"] is not None]
        lines.append(
            [
                f"`python benchmarks/{name}.py{' --quick' if run['quick'] else ''}`",
                _range([row["threads"] for row in rows], "d"),
                _range([row["rounds"] for row in rows], "d"),
                _range(controls, ".0%") if controls else "",
                f"{machine['load']:.1f}",
                f"{run['seconds']:,} s",
                run["date"],
                run["commit"],
            ]
        )
        versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
        text = f"{machine['processor']}, {machine['cores']} cores, {machine['instructions']}; {versions}"
        machines.setdefault(text, []).append(f"`{name}`")
    if len(machines) == 1:
        places = [f"{next(iter(machines))}.", ""]
    else:
        places = [*(f"- {', '.join(names)}: {text}" for text, names in machines.items()), ""]
    if any(run["quick"] for run in results["benchmarks"].values()):
        places += ["Rows from `--quick` have few rounds: they show that a benchmark works, not how fast qkflow is.", ""]
    return "\n".join([*places, _markdown([header, *lines])])


def ratio(row: Row) -> str:
    """A ratio with its quartiles."""
    digits = 1 if row.ratio >= 10 else 2
    if row.quartiles is None:
        return f"{row.ratio:.{digits}f}"
    low, high = row.quartiles
    return f"{row.ratio:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def amount(value: float, unit: str) -> str:
    """A value with three significant digits, and its unit."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f} {unit}" if rounded >= 100 else f"{rounded:g} {unit}"


def _targets(rows: Sequence[Row]) -> str:
    """The targets of rows: one if they agree, otherwise each with its column."""
    with_target = [row for row in rows if row.bound]
    if len({row.bound for row in with_target}) <= 1:
        return f"{with_target[0].bound}: {_met(with_target)}" if with_target else ""
    return "; ".join(f"{row.against} {row.bound}: {_met([row])}" for row in with_target)


def _met(rows: Sequence[Row]) -> str:
    return "met" if all(row.is_met for row in rows) else "**missed**"


def _range(values: Sequence[float], style: str) -> str:
    low, high = (f"{value:{style}}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _without_empty_column(lines: list[list[str]], name: str) -> list[list[str]]:
    """Remove a column that has no entries."""
    i = lines[0].index(name)
    return lines if any(line[i] for line in lines[1:]) else [[*line[:i], *line[i + 1 :]] for line in lines]


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    header, *body = (f"| {' | '.join(line)} |".replace("|  |", "| |").replace("|  |", "| |") for line in lines)
    return "\n".join([header, "|" + "---|" * len(lines[0]), *body])
