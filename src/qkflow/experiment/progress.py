"""The progress of an experiment, read from the last lines of its runs' metrics, and observers of it."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from qkflow.experiment.budget import makespan
from qkflow.experiment.decisions import Round
from qkflow.experiment.design import Design
from qkflow.experiment.planned_runs import PlannedRun

_TAIL_BYTES = 4096
"""Bytes read from the end of metrics.jsonl; a line has a few hundred."""
_WINDOW = 15.0
"""Seconds over which the current speed is measured."""


@dataclass(frozen=True, kw_only=True)
class ActiveRun:
    """A run in training."""

    arm: str
    seed: int
    kind: str
    """`tuning` or `main`."""
    step: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The state of an experiment at one moment, tuning included."""

    finished: int
    """Finished runs."""
    failed: int
    """Runs that failed and are not retried in this session."""
    runs: int
    """All runs."""
    items: int
    """Tokens (or instances of a task) that all runs have been trained on."""
    all_items: int
    """Tokens (or instances) in total."""
    item: str
    """`tokens` or `instances`."""
    items_per_second: float | None
    """Current speed of all runs together; None before it is known."""
    seconds_left: float | None
    """Until the last run ends; None before it is known."""
    running: tuple[ActiveRun, ...]


class Observer:
    """Watches an experiment. Override the methods you need; they are called in the process that runs it.

    >>> class Printer(Observer):
    ...     def on_notice(self, text):
    ...         print(text)
    """

    def on_notice(self, text: str) -> None:
        """A message for the user, on one line."""

    def on_design(self, design: Design) -> None:
        """The design is written, or read from the folder of a resumed study."""

    def on_progress(self, progress: Progress) -> None:
        """About twice a second, and whenever a run has ended."""

    def on_round(self, study: Path, design: Design, round_: Round) -> None:
        """A round has ended, and its verdicts are written; `summary.read_result` reads them."""

    def on_failure(self, run: PlannedRun, reason: str) -> None:
        """A run has failed and is not retried in this session; the others continue."""


class ProgressMeter:
    """Follows the runs of an experiment. `finish` and `fail` report what the folders do not show."""

    def __init__(self, study: Path, design: Design, clock: Callable[[], float] = time.monotonic) -> None:
        self.study, self.design, self.clock = study, design, clock
        self.runs: list[PlannedRun] = []
        self.finished: set[Path] = set()
        self.failed: set[Path] = set()
        self.tails: dict[Path, tuple[int, int]] = {}
        self.steps: dict[Path, int] = {}
        self.first_steps: dict[Path, int] = {}
        self.active: set[Path] = set()
        self.start = clock()
        self.recent: deque[tuple[float, int]] = deque()

    def add(self, runs: Sequence[PlannedRun]) -> None:
        """Follow these runs, too."""
        for run in runs:
            self.runs.append(run)
            self.tails[run.folder] = last_step(self.study / run.folder)
            self.steps[run.folder] = self.first_steps[run.folder] = self.tails[run.folder][1]

    def finish(self, run: PlannedRun) -> None:
        """The run is finished."""
        self.finished.add(run.folder)
        self.failed.discard(run.folder)
        self.steps[run.folder] = run.steps

    def fail(self, run: PlannedRun) -> None:
        """The run will not finish in this session."""
        self.failed.add(run.folder)

    def count_as_old(self, run: PlannedRun) -> None:
        """The run was finished before this session and says nothing about its speed."""
        self.finish(run)
        self.first_steps[run.folder] = run.steps

    def run_seconds(self, arm: str) -> float:
        """Expected seconds of a run of this arm: the median of its finished runs, files and evaluations included."""
        folders = [run.folder for run in self.runs if run.arm == arm and run.kind == "main"]
        seconds = [run_seconds(self.study / folder) for folder in folders if folder in self.finished]
        design = self.design.arm(arm)
        return statistics.median(seconds) if seconds else design.steps * (design.seconds_per_step or 0.0)

    def read(self) -> Progress:
        """Read the folders."""
        for run in self._unfinished():
            tail = last_step(self.study / run.folder)
            if tail != self.tails[run.folder]:
                self.active.add(run.folder)
                self.tails[run.folder], step = tail, tail[1]
                self.steps[run.folder] = step
                # A resumed run returns to its checkpoint.
                self.first_steps[run.folder] = min(step, self.first_steps[run.folder])
        step_items, item = self.design.step_items
        items = step_items * sum(self.steps[run.folder] for run in self.runs if run.folder not in self.failed)
        return Progress(
            finished=len(self.finished),
            failed=len(self.failed),
            runs=len(self.runs),
            items=items,
            all_items=step_items * sum(run.steps for run in self.runs if run.folder not in self.failed),
            item=item,
            items_per_second=self._speed(items),
            seconds_left=self._seconds_left(),
            running=tuple(
                ActiveRun(arm=run.arm, seed=run.seed, kind=run.kind, step=self.steps[run.folder], steps=run.steps)
                for run in self._unfinished()
                if run.folder in self.active
            ),
        )

    def _unfinished(self) -> list[PlannedRun]:
        return [run for run in self.runs if run.folder not in self.finished and run.folder not in self.failed]

    def _speed(self, items: int) -> float | None:
        now = self.clock()
        self.recent.append((now, items))
        while now - self.recent[0][0] > _WINDOW:
            self.recent.popleft()
        then, items_then = self.recent[0]
        return max(0.0, (items - items_then) / (now - then)) if now > then else None

    def _seconds_left(self) -> float | None:
        """The remaining work at the speed of this session's slots, packed onto them."""
        done = sum((self.steps[run.folder] - self.first_steps[run.folder]) * self._cost(run) for run in self.runs)
        seconds = self.clock() - self.start
        if done <= 0 or seconds <= 0:
            return None
        slots = max(1, min(self.design.jobs, len(self.runs)))
        pace = done / seconds / slots
        remaining = [(run.steps - self.steps[run.folder]) * self._cost(run) / pace for run in self._unfinished()]
        return makespan(remaining, slots)

    def _cost(self, run: PlannedRun) -> float:
        return self.design.arm(run.arm).step_cost


def run_seconds(folder: Path) -> float:
    """Seconds between the first file of a finished run and its last: those of its process, without its imports."""
    times = [(folder / name).stat().st_mtime for name in ("environment.json", "weights.safetensors")]
    return max(0.0, times[1] - times[0])


def last_step(folder: Path) -> tuple[int, int]:
    """The length of metrics.jsonl and the step of its last whole line; zeros if there is none.

    >>> last_step(Path("no such folder"))
    (0, 0)
    """
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return 0, 0
    for line in reversed(lines[:-1]):
        try:
            return size, int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return size, 0
