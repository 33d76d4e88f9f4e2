"""Time several functions alternately in one process, and print ratios with quartiles.

Times on a shared machine drift by tens of percent within seconds. Alternating spreads the drift evenly. A ratio is
computed within each round; its median and quartiles over the rounds are reported. A matrix product is timed as a
control: the interquartile range of its time divided by the median shows how reliable the other times are.
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
class Comparison:
    """qkflow against a peer; a ratio above 1 means that qkflow is faster."""

    name: str
    ratio: float
    quartiles: tuple[float, float]
    """First and third quartile of the ratio."""
    control: float
    """Interquartile range of the control's time divided by its median: 0.05 on an idle machine, 0.5 on a busy one."""
    ours: float
    """Median, in `unit`."""
    peer: float
    unit: str


@dataclass(frozen=True)
class Measurement:
    """A value and its target."""

    setting: str
    quantity: str
    value: float
    quartiles: tuple[float, float] | None = None
    target: float | None = None
    """The minimum, or with `lower_is_better` the maximum."""
    lower_is_better: bool = False
    ours: float = math.nan
    peer: float = math.nan
    unit: str = "ms"
    control: float | None = None
    """As in `Comparison`; None if no time was measured."""

    @property
    def is_reached(self) -> bool | None:
        if self.target is None:
            return None
        return self.value <= self.target if self.lower_is_better else self.value >= self.target


def parse_arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds and small sizes: less than a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: torch's)")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    return args


def time_alternately(
    functions: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of every function in every round; "control" is a matrix product.

    Each round starts with another function.
    """
    a = torch.randn(1024, 1024)
    items = [*functions.items(), ("control", lambda: a @ a)]
    times: dict[str, list[float]] = {name: [] for name, _ in items}
    for i in range(warmup + rounds):
        for name, function in items[i % len(items) :] + items[: i % len(items)]:
            start = clock()
            function()
            if i >= warmup:
                times[name].append(clock() - start)
    return times


def compare_first(title: str, times: Mapping[str, list[float]], *, amount: float, unit: str) -> list[Comparison]:
    """Compare the first function with each of the others; a call does `amount` of work, so that rates are in `unit`."""
    names = [name for name in times if name != "control"]
    ours = times[names[0]]
    table = []
    for name in names[1:]:
        low, ratio, high = quartiles([peer / own for own, peer in zip(ours, times[name], strict=True)])
        table.append(
            Comparison(
                name=f"{title}: {names[0]} against {name}",
                ratio=ratio,
                quartiles=(low, high),
                control=relative_spread(times["control"]),
                ours=amount / statistics.median(ours),
                peer=amount / statistics.median(times[name]),
                unit=unit,
            )
        )
    return table


def quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def relative_spread(values: list[float]) -> float:
    """Return the interquartile range divided by the median."""
    low, median, high = quartiles(values)
    return (high - low) / median


def print_comparisons(table: list[Comparison], path: Path | None) -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}\n")
    width = max(len(row.name) for row in table)
    print(f"{'':{width}}  ratio  (quartiles)      ours     peer  unit           control")
    for row in table:
        low, high = row.quartiles
        spread = f"({low:.2f} to {high:.2f})"
        print(
            f"{row.name:{width}}  {row.ratio:5.2f}  {spread:<15} {row.ours:8,.4g} {row.peer:8,.4g}"
            f"  {row.unit:<14} ±{row.control:.0%}"
        )
    if path is not None:
        path.write_text(json.dumps([asdict(row) for row in table], indent=2) + "\n")


def print_measurements(table: Sequence[Measurement], path: Path | None = None) -> None:
    width = max(len(row.quantity) for row in table)
    print(f"{'':{width + 2}}  value  (quartiles)      target  met     ours     peer           control")
    setting = ""
    for row in table:
        if row.setting != setting:
            setting = row.setting
            print(setting)
        spread = "" if row.quartiles is None else f"({row.quartiles[0]:.2f} to {row.quartiles[1]:.2f})"
        target = "" if row.target is None else f"{'<=' if row.lower_is_better else '>='} {row.target:g}"
        met = {None: "", True: "yes", False: "NO"}[row.is_reached]
        control = "" if row.control is None else f"±{row.control:.0%}"
        print(
            f"  {row.quantity:{width}} {row.value:6.3g}  {spread:16} {target:>7}  {met:3}"
            f" {row.ours:8.4g} {row.peer:8.4g} {row.unit:9} {control}"
        )
    if path is not None:
        rows = [asdict(row) | {"is_reached": row.is_reached} for row in table]
        path.write_text(json.dumps(rows, indent=2) + "\n")
