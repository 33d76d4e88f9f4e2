"""Time several functions alternately in one process, and report ratios with quartiles.

Times on a shared machine drift by tens of percent within seconds. Alternating spreads the drift evenly. A ratio is
computed within each round; its median and quartiles over the rounds are reported. A matrix product is timed as a
control: the interquartile range of its time divided by the median shows how reliable the other times are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch

from tables import Row, amount, ratio

Function = Callable[[], object]
Times = Mapping[str, list[float]]


def parse_arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds and small sizes: less than a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: those of the benchmark)")
    return parser.parse_args()


def main(description: str, measure: Callable[[bool], list[Row]], *, threads: int = 2) -> None:
    """Parse the command line, set the threads, measure (the argument says whether it has to be quick), and print."""
    args = parse_arguments(description)
    torch.set_num_threads(args.threads or threads)
    rows = measure(args.quick)
    print_rows(rows)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def time_alternately(functions: Mapping[str, Function], *, rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Return the seconds of every function in every round; "control" is a matrix product.

    Each round starts with another function. With one thread, the clock is the processor time of the process, so that
    other processes on the machine matter less.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
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


def compare(
    table: str,
    work: str,
    against: str,
    kind: Literal["speed", "time"],
    times: Times,
    ours: str,
    peer: str,
    *,
    calls: int = 1,
    tokens: int | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Row:
    """Compare two timed functions. A function makes `calls` calls, or processes `tokens` tokens."""
    pairs = list(zip(times[ours], times[peer], strict=True))
    low, middle, high = quartiles([b / a if kind == "speed" else a / b for a, b in pairs])
    seconds = [statistics.median(times[name]) for name in (ours, peer)]
    values = [1e3 * s / calls for s in seconds] if tokens is None else [tokens / s for s in seconds]
    return Row(
        table=table,
        work=work,
        against=against,
        kind=kind,
        ratio=middle,
        quartiles=(low, high),
        ours=values[0],
        peer=values[1],
        unit="ms" if tokens is None else "tokens/s",
        at_least=at_least,
        at_most=at_most,
        control=relative_spread(times["control"]),
        rounds=len(pairs),
        threads=torch.get_num_threads(),
    )


def compare_memory(
    table: str, work: str, against: str, ours: float, peer: float, *, unit: str = "MB", at_most: float | None = None
) -> Row:
    """Compare two amounts of memory, each measured once."""
    return Row(
        table=table,
        work=work,
        against=against,
        kind="memory",
        ratio=ours / peer,
        ours=ours,
        peer=peer,
        unit=unit,
        at_most=at_most,
        rounds=1,
        threads=torch.get_num_threads(),
    )


def share_of_peak(
    table: str,
    work: str,
    against: str,
    times: Times,
    ours: str,
    flops: float,
    peaks: Sequence[float],
    *,
    at_least: float | None = None,
) -> Row:
    """Compare the FLOPs per second of a timed function with those of matrix products in the same rounds."""
    rates = [flops / seconds for seconds in times[ours]]
    low, share, high = quartiles([rate / peak for rate, peak in zip(rates, peaks, strict=True)])
    return Row(
        table=table,
        work=work,
        against=against,
        kind="share",
        ratio=share,
        quartiles=(low, high),
        ours=statistics.median(rates) / 1e9,
        peer=statistics.median(peaks) / 1e9,
        unit="GFLOP/s",
        at_least=at_least,
        control=relative_spread(times["control"]),
        rounds=len(rates),
        threads=torch.get_num_threads(),
    )


def quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def relative_spread(values: list[float]) -> float:
    """Return the interquartile range divided by the median."""
    low, median, high = quartiles(values)
    return (high - low) / median


def print_rows(rows: Sequence[Row]) -> None:
    print(f"\ntorch {torch.__version__}, {torch.get_num_threads()} threads")
    width, columns = max(len(row.work) for row in rows), max(len(row.against) for row in rows)
    table = ""
    for row in rows:
        if row.table != table:
            table = row.table
            print(f"\n{table + ' (' + row.kind + ')':{width + columns + 4}}{'ratio':22}{'target':22}control")
        met = {None: "", True: f"{row.bound}: met", False: f"{row.bound}: MISSED"}[row.is_met]
        control = "" if row.control is None else f"±{row.control:.0%}"
        values = f"{amount(row.ours, row.unit)}, {amount(row.peer, row.unit)}"
        print(f"{row.work:{width}}  {row.against:{columns}}  {ratio(row):21} {met:21} {control:6} {values}")
