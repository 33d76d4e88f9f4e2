"""A study from its request, or from its folder, to the last run: killed at any instant, it goes on to the same bits.

Everything that outlives this process is in the folder: the design, and run folders that are finished, begun or not yet
there. What is not finished is handed to the engine; what crashes is handed over again, and then left on record.
"""

from __future__ import annotations

import contextlib
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from qkflow.data import open_corpus
from qkflow.errors import DiskError, Interrupted, UsageError
from qkflow.experiment.corpus_stats import describe
from qkflow.experiment.design import Design, PlannedRun, holds_study, jobs, read_design, write_design
from qkflow.experiment.executors.base import Executor, Resources
from qkflow.experiment.executors.local import LocalExecutor
from qkflow.experiment.extension import bring_over, extended
from qkflow.experiment.observer import Observer
from qkflow.experiment.plan import plan
from qkflow.experiment.progress import ProgressMeter
from qkflow.experiment.run_status import read_status, write_status
from qkflow.experiment.spec import ExperimentSpec, differences
from qkflow.experiment.tuning import rates, write_tuning
from qkflow.experiment.worker import RunOutcome, RunSpec, make_run
from qkflow.io import discard, locked, write_json
from qkflow.training.run_dir import finished, sweep
from qkflow.training.signals import StopRequest, stop_on_signals

ATTEMPTS = 3
"""How often a run that crashes is tried in one session."""


def run_experiment(
    request: ExperimentSpec | None,
    out: Path | str,
    *,
    engine: Executor | None = None,
    observer: Observer | None = None,
    command: Sequence[str] = (),
) -> Design:
    """Run the study that is asked for in the folder `out`, or go on with the one it holds (no request, or the same).

    Runs that fail are told to the observer and left on record. Ctrl-C and SIGTERM let every run write a checkpoint and
    raise `Interrupted`.
    """
    study, watch = Path(out), observer or Observer()
    refuse_foreign(request, study)
    with engine or LocalExecutor() as made, _held(study):
        if holds_study(study):
            design = _continued(request, study)
        elif request is None:
            raise UsageError(f"{study} holds no study to go on with: expected a folder that `qkflow compare` made")
        else:
            if request.extends is None:
                design = plan(request, made, notice=watch.on_notice, command=command)
            else:
                design = extended(request, command=command)
            write_design(study, design)
        watch.on_design(design)
        with stop_on_signals() as stop:
            _Session(study, design, made, watch, stop, command).run()
    return design


def resume_study_command(study: Path) -> str:
    """What to type to go on with a study.

    >>> resume_study_command(Path("my studies/a"))
    "qkflow compare --resume 'my studies/a'"
    """
    return f"qkflow compare --resume {shlex.quote(str(study))}"


def refuse_foreign(request: ExperimentSpec | None, study: Path) -> None:
    """Raise `UsageError` where the folder is neither a study's nor free for one."""
    if study.exists() and not study.is_dir():
        raise UsageError(f"{study} is a file: choose a folder for the study")
    if holds_study(study):
        return
    if request is None:
        raise UsageError(f"{study} holds no study to go on with: expected a folder that `qkflow compare` made")
    there = [path.name for path in study.iterdir()] if study.exists() else []
    if foreign := sorted(name for name in there if name != "lock" and not name.endswith(".tmp")):
        raise UsageError(f"{study} holds other things ({foreign[0]}) and no study: choose another folder")


@contextlib.contextmanager
def _held(study: Path) -> Iterator[None]:
    """The lock of the study's folder; a folder in which nothing came about is taken away again."""
    with locked(study / "lock"):
        for pattern in (".*.tmp", "runs/*/.*.tmp", "tuning/*/.*.tmp"):
            for path in study.glob(pattern):
                discard(path)
        try:
            yield
        finally:
            if not holds_study(study):
                discard(study / "lock")
                with contextlib.suppress(OSError):
                    study.rmdir()


def _continued(request: ExperimentSpec | None, study: Path) -> Design:
    """The design in the folder, if it is what is asked for and its text is still the same."""
    design = read_design(study)
    if request is not None and request != design.request:
        lines = "".join(f"\n  {line}" for line in differences(design.request, request))
        raise UsageError(f"{study} holds a study of another design: choose another folder.{lines}")
    corpus = open_corpus(design.request.corpus)
    if corpus.digest != design.digest:
        raise UsageError(
            f"the corpus {corpus.name} is not the text {study} began with (its hash is {corpus.digest[:12]}, it was "
            f"{design.digest[:12]}): restore that text, or begin a new study"
        )
    return design


class _Session:
    """One process's part in a study."""

    def __init__(
        self,
        study: Path,
        design: Design,
        engine: Executor,
        watch: Observer,
        stop: StopRequest,
        command: Sequence[str],
    ) -> None:
        self.study, self.design, self.engine, self.watch, self.stop = study, design, engine, watch, stop
        self.command = tuple(command) or design.command
        self.disk: RunOutcome | None = None

    def run(self) -> None:
        """Tuning, where there is any, then the runs that count."""
        study, design = self.study, self.design
        if not (study / "corpus.json").exists():
            write_json(study / "corpus.json", describe(open_corpus(design.request.corpus)))
        bring_over(study, design, self.watch.on_notice)
        every = jobs(design)
        self.meter = ProgressMeter(study, design, every)
        open_jobs = [job for job in every if not self._settled(job)]
        self._stage([job for job in open_jobs if job.kind == "tuning"])
        chosen = rates(study, design)
        if design.tuned:
            write_tuning(study, design)
        todo = {job.folder for job in open_jobs if job.kind == "main"}
        self._stage([job for job in jobs(design, chosen) if job.folder in todo])
        self.watch.on_progress(self.meter.read())

    def _settled(self, job: PlannedRun) -> bool:
        """Whether nothing is left to be done for a run, as its folder says."""
        folder = self.study / job.folder
        if finished(folder) is not None:
            sweep(folder)
            discard(folder / "checkpoints")  # the process was killed before it came to do so
            self.meter.count_as_old(job)
            return True
        record = read_status(folder)
        if record.failed_for_good:
            self.meter.fail(job)
            self.watch.on_failure(job, record.failed or "unknown")
        return record.failed_for_good

    def _stage(self, todo: list[PlannedRun]) -> None:
        """Make these runs; what crashes is tried again after the others."""
        for job in [job for job in todo if job.config is None]:
            todo.remove(job)
            self._fail(job, "none of its learning rates came to an end", for_good=True)
        tries: Counter[Path] = Counter()
        base = self.design.base
        need = Resources(threads=base.threads or 1, gpus=int(base.device == "cuda"))
        while todo:
            again: list[PlannedRun] = []
            orders = [self._order(job) for job in todo]
            for done in self.engine.work(make_run, orders, at_once=self.design.jobs, need=need):
                if done is not None:
                    ending = done.value if done.crash is None else RunOutcome(kind="crashed", reason=done.crash)
                    if self._tries_again(todo[done.index], ending, tries):
                        again.append(todo[done.index])
                if self.stop() or self.disk:
                    self.engine.stop()
                self.watch.on_progress(self.meter.read())
            self._raise_if_stopped()
            todo = again

    def _order(self, job: PlannedRun) -> RunSpec:
        if job.config is None:
            raise ValueError(f"{job.name} has no config yet")
        folder = str((self.study / job.folder).absolute())
        return RunSpec(folder=folder, config=job.config, command=self.command, patience=self.engine.patience)

    def _tries_again(self, job: PlannedRun, ending: RunOutcome, tries: Counter[Path]) -> bool:
        """Note how a run ended; whether it is to be tried again."""
        tries[job.folder] += 1
        if ending.kind == "finished":
            self.meter.finish(job)
        elif ending.kind == "disk full":
            self.disk = ending
        elif self.stop() or self.disk:
            pass  # it was asked to stop, and goes on with the study
        elif ending.kind in ("crashed", "stopped") and tries[job.folder] < ATTEMPTS:
            number = tries[job.folder] + 1
            self.watch.on_notice(f"{job.name} crashed ({ending.reason}): attempt {number} of {ATTEMPTS} follows")
            return True
        else:
            # A tuning run is given up for good: the runs that count rest on the choice that is made without it.
            self._fail(job, ending.reason, for_good=ending.kind == "diverged" or job.kind == "tuning")
        return False

    def _fail(self, job: PlannedRun, reason: str, *, for_good: bool) -> None:
        folder = self.study / job.folder
        write_status(folder, replace(read_status(folder), failed=reason, failed_for_good=for_good))
        self.meter.fail(job)
        self.watch.on_failure(job, reason)

    def _raise_if_stopped(self) -> None:
        command = resume_study_command(self.study)
        if self.disk is not None:
            raise DiskError(self.disk.errno, f"{self.disk.reason}: free some space, then go on with `{command}`")
        if self.stop():
            done, runs = len(self.meter.finished), len(self.meter.jobs)
            stopped = Interrupted(f"stopped with {done} of {runs} runs finished: go on with `{command}`")
            stopped.signal = self.stop.signal or stopped.signal
            raise stopped
