"""How far a study is, read from the last lines of its runs' metrics: the same wherever the runs are made."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from qkflow.experiment.design import Design, PlannedRun
from qkflow.experiment.timing import makespan

_TAIL = 4096
"""Bytes read from the end of metrics.jsonl; a line has a few hundred."""
_LATELY = 15.0
"""Seconds over which the speed of now is taken."""


@dataclass(frozen=True, kw_only=True)
class ActiveRun:
    """A run that is being made."""

    arm: str
    """Its arm."""
    seed: int
    """Its seed."""
    kind: str
    """`tuning` or `main`."""
    step: int
    """Steps it has made."""
    steps: int
    """Steps it will make."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A study at one moment, tuning included."""

    finished: int
    """Runs that are finished."""
    failed: int
    """Runs that failed and are not tried again in this session."""
    runs: int
    """Runs there are."""
    tokens: int
    """Tokens that all runs have been trained on."""
    all_tokens: int
    """Tokens that all of them will have been."""
    tokens_per_second: float | None
    """Over the last seconds, all runs together; None before there is anything to tell it from."""
    seconds_left: float | None
    """Until the last run ends; None before there is anything to tell it from."""
    running: tuple[ActiveRun, ...]
    """Runs that are being made."""


class ProgressMeter:
    """Keeps count of a study's runs. `finish` and `fail` tell it what the folders do not."""

    def __init__(
        self, study: Path, design: Design, jobs: Sequence[PlannedRun], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.study, self.design, self.jobs, self.clock = study, design, tuple(jobs), clock
        self.finished: set[Path] = set()
        self.failed: set[Path] = set()
        self.seen = {job.folder: tail(study / job.folder) for job in self.jobs}
        self.at = {folder: step for folder, (_, step) in self.seen.items()}
        self.first = dict(self.at)
        self.moving: set[Path] = set()
        self.began = clock()
        self.lately: deque[tuple[float, int]] = deque()

    def finish(self, job: PlannedRun) -> None:
        """The run has come to its end."""
        self.finished.add(job.folder)
        self.failed.discard(job.folder)
        self.at[job.folder] = job.steps

    def fail(self, job: PlannedRun) -> None:
        """The run will not come to its end in this session."""
        self.failed.add(job.folder)

    def count_as_old(self, job: PlannedRun) -> None:
        """The run was finished before this session, whose speed it says nothing about."""
        self.finish(job)
        self.first[job.folder] = job.steps

    def read(self) -> Progress:
        """Look at the folders."""
        for job in self._open():
            now = tail(self.study / job.folder)
            if now != self.seen[job.folder]:
                self.moving.add(job.folder)
                self.seen[job.folder], step = now, now[1]
                self.at[job.folder] = step
                self.first[job.folder] = min(step, self.first[job.folder])  # a resumed run goes back to its checkpoint
        total = self.design.base.batch * self.design.base.context
        tokens = total * sum(self.at[job.folder] for job in self.jobs if job.folder not in self.failed)
        return Progress(
            finished=len(self.finished),
            failed=len(self.failed),
            runs=len(self.jobs),
            tokens=tokens,
            all_tokens=total * sum(job.steps for job in self.jobs if job.folder not in self.failed),
            tokens_per_second=self._speed(tokens),
            seconds_left=self._left(),
            running=tuple(
                ActiveRun(arm=job.arm, seed=job.seed, kind=job.kind, step=self.at[job.folder], steps=job.steps)
                for job in self._open()
                if job.folder in self.moving
            ),
        )

    def _open(self) -> list[PlannedRun]:
        return [job for job in self.jobs if job.folder not in self.finished and job.folder not in self.failed]

    def _speed(self, tokens: int) -> float | None:
        now = self.clock()
        self.lately.append((now, tokens))
        while now - self.lately[0][0] > _LATELY:
            self.lately.popleft()
        then, before = self.lately[0]
        return max(0.0, (tokens - before) / (now - then)) if now > then else None

    def _left(self) -> float | None:
        """Work left over the work that a slot has done in a second of this session, packed onto the slots."""
        done = sum((self.at[job.folder] - self.first[job.folder]) * self._cost(job) for job in self.jobs)
        seconds = self.clock() - self.began
        if done <= 0 or seconds <= 0:
            return None
        slots = min(self.design.jobs, len(self.jobs))
        pace = done / seconds / slots
        return makespan([(job.steps - self.at[job.folder]) * self._cost(job) / pace for job in self._open()], slots)

    def _cost(self, job: PlannedRun) -> float:
        arm = self.design.arm(job.arm)
        return arm.seconds_per_step or float(arm.flops_per_token)


def tail(folder: Path) -> tuple[int, int]:
    """The length of metrics.jsonl and the step of its last whole line; zeros where there is none.

    >>> tail(Path("no such folder"))
    (0, 0)
    """
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            lines = file.read().split(b"\n")
    except OSError:
        return 0, 0
    for line in reversed(lines[:-1]):
        try:
            return size, int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return size, 0
