"""Run an experiment with its progress shown and its page kept up to date, then present the result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as ProgressBar

from qkflow.experiment.decisions import Decisions, Round
from qkflow.experiment.design import Design, PlannedRun
from qkflow.experiment.executors.base import Executor
from qkflow.experiment.progress import Observer, Progress
from qkflow.experiment.runner import run_experiment
from qkflow.experiment.spec import ExperimentSpec
from qkflow.experiment.summary import ExperimentResult, read_result
from qkflow.formatting import format_clock
from qkflow.report.export import export_csv, export_json, terminal
from qkflow.report.html import write_report

_LINE_INTERVAL = 10.0
"""Seconds between two lines of progress if the output is not a terminal."""


def run_and_present(
    spec: ExperimentSpec | None,
    out: Path,
    *,
    executor: Executor,
    console: Console,
    command: Sequence[str] = (),
    quiet: bool = False,
    more: float | None = None,
) -> ExperimentResult:
    """Run, resume or extend (by `more` seconds) an experiment with its progress shown, then present the result."""
    display = ExperimentDisplay(console)
    try:
        result = run_experiment(spec, out, executor=executor, observer=display, command=command, more=more)
    finally:
        display.close()
    return present(result, out, console, quiet=quiet)


def present(result: ExperimentResult, folder: Path, console: Console, *, quiet: bool = False) -> ExperimentResult:
    """Write the report and the tables of a study, and print the answer unless `quiet`."""
    shown = result.rationale or result
    with console.status("writing the report"):
        export_json(shown, folder / "results.json")
        export_csv(shown, folder / "results.csv")
        page = write_report(shown, folder / "report.html")
    if not quiet:
        console.print(terminal(shown))
    console.print(f"report: {page.absolute()}", markup=False, highlight=False, soft_wrap=True)
    return result


class ExperimentDisplay(Observer):
    """Shows a progress bar on a terminal, and lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar = ProgressBar(
            TextColumn("runs {task.fields[runs]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[speed]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.task = None
        self.last_line = time.monotonic()

    def on_notice(self, text: str) -> None:
        """Print the notice."""
        self.print(text)

    def on_design(self, design: Design) -> None:
        """Start the bar."""
        self.task = self.bar.add_task("study", total=None, runs="", speed="starting")
        self.bar.start()

    def on_progress(self, progress: Progress) -> None:
        """Update the bar, or print a line every few seconds."""
        runs = f"{progress.finished}/{progress.runs}"
        speed = f"{progress.items_per_second:,.0f} {progress.item}/s" if progress.items_per_second else ""
        left = "" if progress.seconds_left is None else f"{format_clock(progress.seconds_left)} left"
        speed = " · ".join(text for text in (speed, left) if text)
        if not self.bar.disable and self.task is not None:
            self.bar.update(self.task, total=progress.all_items, completed=progress.items, runs=runs, speed=speed)
        elif time.monotonic() - self.last_line > _LINE_INTERVAL:
            self.last_line = time.monotonic()
            self.print(
                f"runs {runs}  {progress.items / max(1, progress.all_items):.0%} of all {progress.item}  {speed}"
            )

    def on_round(self, study: Path, design: Design, round_: Round) -> None:
        """Print what is decided, and rewrite the page."""
        verdicts = Decisions(study).verdicts()
        if verdicts:
            kinds = ", ".join(f"{arm} {verdict.kind}" for arm, verdict in verdicts.items())
            self.print(f"round {round_.number}, {_format_seeds(round_)}: {kinds}")
            write_report(read_result(study), study / "report.html")

    def on_failure(self, run: PlannedRun, reason: str) -> None:
        """Print which run failed."""
        self.print(f"failed: {run.arm}, seed {run.seed}: {reason}")

    def close(self) -> None:
        """Remove the bar."""
        self.bar.stop()

    def print(self, text: str) -> None:
        """Print one line, above the bar if there is one."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _format_seeds(round_: Round) -> str:
    first, last = round_.seeds[0], round_.seeds[-1]
    return f"seed {first}" if first == last else f"seeds {first} to {last}"
