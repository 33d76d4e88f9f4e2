"""What the commands on studies share: run one with its progress shown, and show what it has found."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from qkflow.experiment.design import Design, PlannedRun
from qkflow.experiment.executors.base import Executor
from qkflow.experiment.observer import Observer
from qkflow.experiment.progress import Progress as Standing
from qkflow.experiment.runner import run_experiment
from qkflow.experiment.spec import ExperimentSpec
from qkflow.experiment.summarise import read_result
from qkflow.experiment.summary import ExperimentResult
from qkflow.formatting import format_clock
from qkflow.report import export_csv, export_json, terminal, write_report

_LINES_EVERY = 10.0
"""Seconds between two plain lines."""


def conduct(
    request: ExperimentSpec | None, out: Path, *, engine: Executor, console: Console, command: Sequence[str] = ()
) -> ExperimentResult:
    """Run a study, or go on with it, and present it."""
    watch = Watch(console)
    try:
        run_experiment(request, out, engine=engine, observer=watch, command=command)
    finally:
        watch.close()
    return present(out, console)


def present(folder: Path, console: Console) -> ExperimentResult:
    """Write the page and the tables of a study, and show the answer."""
    with console.status("reading the runs"):
        summary = read_result(folder)
        export_json(summary, folder / "results.json")
        export_csv(summary, folder / "results.csv")
        page = write_report(summary, folder / "report.html")
    console.print(terminal(summary))
    console.print(f"report: {page.absolute()}", markup=False, highlight=False, soft_wrap=True)
    return summary


class Watch(Observer):
    """A bar over the whole study on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar = Progress(
            TextColumn("runs {task.fields[runs]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[told]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.task = None
        self.shown_at = time.monotonic()

    def on_notice(self, text: str) -> None:
        """Pass on what the user should read."""
        self.say(text)

    def on_design(self, design: Design) -> None:
        """Start the bar."""
        self.task = self.bar.add_task("study", total=None, runs="", told="starting")
        self.bar.start()

    def on_progress(self, progress: Standing) -> None:
        """Move the bar, or write a line now and then."""
        runs = f"{progress.finished}/{progress.runs}"
        speed = f"{progress.tokens_per_second:,.0f} tokens/s" if progress.tokens_per_second else ""
        left = "" if progress.seconds_left is None else f"{format_clock(progress.seconds_left)} left"
        told = " · ".join(part for part in (speed, left) if part)
        if not self.bar.disable and self.task is not None:
            self.bar.update(self.task, total=progress.all_tokens, completed=progress.tokens, runs=runs, told=told)
        elif time.monotonic() - self.shown_at > _LINES_EVERY:
            self.shown_at = time.monotonic()
            done = progress.tokens / max(1, progress.all_tokens)
            self.say(f"runs {runs}  {done:.0%} of all tokens  {told}")

    def on_failure(self, job: PlannedRun, reason: str) -> None:
        """Say which run failed; the others go on."""
        self.say(f"failed: {job.arm}, seed {job.seed}: {reason}")

    def close(self) -> None:
        """Give the terminal back."""
        self.bar.stop()

    def say(self, text: str) -> None:
        """One line, above the bar if there is one."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
