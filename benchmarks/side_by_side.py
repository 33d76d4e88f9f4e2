"""How every benchmark here measures: competitors take turns in one process, medians with spread, a matmul as control.

Times on a shared machine drift by tens of per cent within seconds. Interleaving lets the drift hit everyone alike; what
is reported is the ratio within each round, its median and quartiles over the rounds, and how steady a plain matrix
product was meanwhile (the control: its quartiles over its median tell how far to trust the rest).
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Row:
    """One line of a benchmark: `ours` against `peer`; a ratio above 1 means that ours is faster."""

    name: str
    ratio: float
    spread: tuple[float, float]
    """First and third quartile of the ratio."""
    control: float
    """Quartile distance of the control's time over its median: 0.05 is a quiet machine, 0.5 a busy one."""
    ours: float
    """Median, in the unit that `unit` names."""
    peer: float
    unit: str


@dataclass(frozen=True)
class Line:
    """One figure beside its goal."""

    where: str
    what: str
    figure: float
    quartiles: tuple[float, float] | None = None
    goal: float | None = None
    """To reach or to pass; where `less`, not to pass."""
    less: bool = False
    ours: float = math.nan
    peer: float = math.nan
    unit: str = "ms"
    control: float | None = None
    """Quartile distance of a matmul's time over its median: 0.05 is a quiet machine, 0.5 a busy one."""

    @property
    def reached(self) -> bool | None:
        if self.goal is None:
            return None
        return self.figure <= self.goal if self.less else self.figure >= self.goal


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="few rounds, small sizes: under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: as torch stands)")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    return args


def race(work: Mapping[str, Callable[[], object]], *, rounds: int, warm: int = 1) -> dict[str, list[float]]:
    """Seconds of every competitor in every round, the order turning round by round; "control" is a matmul."""
    a = torch.randn(1024, 1024)
    everyone = [*work.items(), ("control", lambda: a @ a)]
    times: dict[str, list[float]] = {name: [] for name, _ in everyone}
    for turn in range(warm + rounds):
        for name, do in everyone[turn % len(everyone) :] + everyone[: turn % len(everyone)]:
            begin = time.perf_counter()
            do()
            if turn >= warm:
                times[name].append(time.perf_counter() - begin)
    return times


def rows(title: str, times: Mapping[str, list[float]], *, amount: float, unit: str) -> list[Row]:
    """The first competitor against each of the others; `amount` of work in each call gives the rate in `unit`."""
    control = quartiles(times["control"])
    names = [name for name in times if name != "control"]
    ours = times[names[0]]
    table = []
    for name in names[1:]:
        low, ratio, high = quartiles([theirs / mine for mine, theirs in zip(ours, times[name], strict=True)])
        table.append(
            Row(
                name=f"{title}: {names[0]} against {name}",
                ratio=ratio,
                spread=(low, high),
                control=(control[2] - control[0]) / control[1],
                ours=amount / statistics.median(ours),
                peer=amount / statistics.median(times[name]),
                unit=unit,
            )
        )
    return table


def report(table: list[Row], file: Path | None) -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}\n")
    width = max(len(row.name) for row in table)
    print(f"{'':{width}}  ratio  (quartiles)      ours     peer  unit           control")
    for row in table:
        low, high = row.spread
        spread = f"({low:.2f} to {high:.2f})"
        print(
            f"{row.name:{width}}  {row.ratio:5.2f}  {spread:<15} {row.ours:8,.4g} {row.peer:8,.4g}"
            f"  {row.unit:<14} ±{row.control:.0%}"
        )
    if file is not None:
        file.write_text(json.dumps([asdict(row) for row in table], indent=2) + "\n")


def quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def tell(table: Sequence[Line], path: Path | None = None) -> None:
    """Print figures beside their goals, and write them to a file where one is given."""
    wide = max(len(line.what) for line in table)
    print(f"{'':{wide + 2}} figure  (quartiles)        goal  met     ours     peer           control")
    where = ""
    for line in table:
        if line.where != where:
            where = line.where
            print(where)
        spread = "" if line.quartiles is None else f"({line.quartiles[0]:.2f} to {line.quartiles[1]:.2f})"
        goal = "" if line.goal is None else f"{'<=' if line.less else '>='} {line.goal:g}"
        met = {None: "", True: "yes", False: "NO"}[line.reached]
        control = "" if line.control is None else f"±{line.control:.0%}"
        print(
            f"  {line.what:{wide}} {line.figure:6.3g}  {spread:16} {goal:>7}  {met:3}"
            f" {line.ours:8.4g} {line.peer:8.4g} {line.unit:9} {control}"
        )
    if path is not None:
        lines = [asdict(line) | {"reached": line.reached} for line in table]
        path.write_text(json.dumps(lines, indent=2) + "\n")
