"""A study of sharper attention from its request to the last run. Run folders are whole or absent: a study that was
stopped or killed goes on where it was, and comes to the same bits.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from qkflow.data.tasks import Task
from qkflow.errors import DiskError, Interrupted
from qkflow.experiment.executors.base import Executor, Resources
from qkflow.experiment.executors.local import LocalExecutor
from qkflow.experiment.sharpen.design import PlannedRun, SharpenDesign, design, refuse_foreign, write_design
from qkflow.experiment.sharpen.request import RationaleRequest
from qkflow.experiment.sharpen.stored import read_path
from qkflow.experiment.sharpen.worker import RunOutcome, RunSpec, make_run, record_failure
from qkflow.io import discard, locked, write_json
from qkflow.training.reproducibility import own_randomness, platform_record
from qkflow.training.signals import StopRequest, stop_on_signals
from qkflow.training.tasks.learner import build_model, refuse_mismatch, task_groups

ATTEMPTS = 2
"""How often a run that crashes is tried in one session."""

Notice = Callable[[str], None]
Progress = Callable[[int, int], None]


def run_sharpen(
    request: RationaleRequest,
    task: Task,
    out: Path,
    *,
    engine: Executor | None = None,
    notice: Notice = lambda _: None,
    progress: Progress = lambda _done, _all: None,
) -> SharpenDesign:
    """Make every run that the study in `out` still lacks; Ctrl-C and SIGTERM raise `Interrupted` after the last."""
    made = design(request, task)
    refuse_foreign(out, made)
    _refuse_what_cannot_learn(made, task)
    with engine or LocalExecutor() as where, locked(out / "lock"):
        for pattern in (".*.tmp", "*/.*.tmp"):
            for leftover in out.glob(pattern):
                discard(leftover)
        write_design(out, made)
        if not (out / "environment.json").exists():
            write_json(out / "environment.json", platform_record())
        with stop_on_signals() as stop:
            session = _Session(out, made, task, where, stop, notice, progress)
            session.stage(made.tuning_jobs())
            session.stage(made.main_jobs(chosen_rates(out, made)))
    return made


def chosen_rates(study: Path, made: SharpenDesign) -> dict[str, float]:
    """The learning rate of each arm: the one given, or the one with the lowest validation loss, the smaller of two."""
    if len(made.rates) == 1:
        return dict.fromkeys((arm.name for arm in made.arms), made.rates[0])
    found: dict[str, float] = {}
    for arm, outcomes in tried(study, made).items():
        if ended := [(loss, rate) for rate, loss in outcomes.items() if loss is not None and math.isfinite(loss)]:
            found[arm] = min(ended)[1]
    return found


def tried(study: Path, made: SharpenDesign) -> dict[str, dict[float, float | None]]:
    """The validation loss of each learning rate that each arm tried; None: it failed, or is not there."""
    found: dict[str, dict[float, float | None]] = {arm.name: {} for arm in made.arms}
    for job in made.tuning_jobs():
        folder = study / job.folder
        there = folder.exists() and not (folder / "failed.json").exists()
        found[job.arm][job.config.lr] = read_path(folder)[-1].loss if there else None
    return found


def _refuse_what_cannot_learn(made: SharpenDesign, task: Task) -> None:
    """Raise the `UsageError` that every run of an arm would end with, before there is a folder."""
    with own_randomness(torch.device("cpu")):
        for job in made.main_jobs(dict.fromkeys((arm.name for arm in made.arms), made.rates[0])):
            if job.config.seed == made.seeds[0]:
                refuse_mismatch(job.config, task)
                task_groups(build_model(job.config.model), job.config)  # an optimiser would take a second to import


class _Session:
    """One process's part in a study."""

    def __init__(
        self,
        study: Path,
        made: SharpenDesign,
        task: Task,
        engine: Executor,
        stop: StopRequest,
        notice: Notice,
        progress: Progress,
    ) -> None:
        self.study, self.made, self.task, self.engine, self.stop = study, made, task, engine, stop
        self.notice, self.progress = notice, progress
        self.all = len(made.tuning_jobs()) + len(made.arms) * len(made.seeds)
        self.done = 0

    def stage(self, jobs: Sequence[PlannedRun]) -> None:
        """Make these runs, those that are there already apart; what crashes is tried again after the others."""
        todo = [job for job in jobs if not (self.study / job.folder).exists()]
        self.done += len(jobs) - len(todo)
        self.progress(self.done, self.all)
        tries: Counter[Path] = Counter()
        at_once = self.made.request.jobs or sum(self.engine.cores())
        while todo:
            again: list[PlannedRun] = []
            orders = [self._order(job) for job in todo]
            for done in self.engine.run(make_run, orders, workers=at_once, resources=Resources(threads=1)):
                if self.stop():
                    self.engine.stop()
                if done is None:
                    continue
                job = todo[done.index]
                ending = done.value if done.crash is None else RunOutcome(kind="crashed", reason=done.crash)
                tries[job.folder] += 1
                if self._again(job, ending, tries[job.folder]):
                    again.append(job)
                self.progress(self.done, self.all)
            if self.stop():
                self._interrupt()
            todo = again

    def _again(self, job: PlannedRun, ending: RunOutcome, tries: int) -> bool:
        """Note how a run ended; whether it is tried again."""
        if ending.kind == "disk full":
            raise DiskError(28, f"{ending.reason}: free some space, then run the same command again")
        if ending.kind == "finished":
            self.done += 1
        elif not self.stop():
            if ending.kind in ("crashed", "stopped") and tries < ATTEMPTS:
                self.notice(f"{job.folder.name} crashed ({ending.reason}): it is tried again")
                return True
            if job.tuning and ending.kind != "diverged":  # for good: the runs that count rest on a choice without it
                record_failure(self.study / job.folder, ending.reason)
            self.notice(f"failed: {job.folder.name}: {ending.reason}")
        return False

    def _interrupt(self) -> None:
        stopped = Interrupted(
            f"stopped with {self.done} of {self.all} runs finished: the same command with"
            f" --out {shlex.quote(str(self.study))} goes on from there"
        )
        stopped.signal = self.stop.signal or stopped.signal
        raise stopped

    def _order(self, job: PlannedRun) -> RunSpec:
        request = self.made.request
        return RunSpec(
            folder=str((self.study / job.folder).absolute()),
            config=job.config,
            task=self.task,
            tuning=job.tuning,
            moments=self.made.moments,
            examples=self.made.examples,
            pooling=request.pooling,
            part=request.part,
        )
