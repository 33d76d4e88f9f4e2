"""Run an experiment from its spec, or resume it from its folder, to the result. It can be killed at any time.

Everything that outlives this process is in the folder: the design, and run folders that are finished, started or
missing. Runs that are not finished are given to the executor. A run that crashes is retried, then recorded as failed.
"""

from __future__ import annotations

import contextlib
import resource
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from qkflow.data import open_corpus
from qkflow.data.tasks import TaskConfig, open_task
from qkflow.errors import BusyError, DiskError, DivergenceError, Interrupted, UsageError
from qkflow.experiment.corpus_stats import describe_corpus
from qkflow.experiment.design import (
    Design,
    PlannedRun,
    chosen_rates,
    holds_study,
    make_design,
    planned_runs,
    read_design,
    write_design,
    write_tuning,
)
from qkflow.experiment.executors.base import Executor, Resources, describe_error
from qkflow.experiment.executors.local import LocalExecutor
from qkflow.experiment.extension import copy_parent_runs, design_extension
from qkflow.experiment.metrics.measurement import RationaleMeasurement, describe_task
from qkflow.experiment.progress import Observer, ProgressMeter
from qkflow.experiment.run_status import read_status, update_status
from qkflow.experiment.spec import ExperimentSpec, spec_differences
from qkflow.experiment.summary import ExperimentResult, read_result
from qkflow.io import discard, locked, write_json
from qkflow.training import Callback, Run, TrainConfig, train
from qkflow.training.run_dir import finished, holds_run, sweep
from qkflow.training.signals import StopRequest, stop_on_signals

ATTEMPTS = 3
"""How often a run that crashes is tried per session."""


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One run for a worker process."""

    folder: str
    """The run folder; a run that it holds is resumed."""
    config: TrainConfig
    command: tuple[str, ...]
    """Recorded with the run."""
    lock_timeout: float
    """Seconds to wait for the lock of a dying process."""
    measurement: RationaleMeasurement | None = None
    """What is measured besides the loss."""


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """How an attempt at a run ended."""

    kind: Literal["finished", "diverged", "refused", "disk full", "stopped", "crashed"]
    """`diverged` would happen again; `refused` needs the user; `crashed` may succeed on the next attempt."""
    reason: str = ""
    """Why, on one line; empty for a finished run."""
    errno: int | None = None
    """The system's error number, for `disk full`."""


def run_experiment(
    spec: ExperimentSpec | None,
    out: Path | str,
    *,
    executor: Executor | None = None,
    observer: Observer | None = None,
    command: Sequence[str] = (),
) -> ExperimentResult:
    """Run an experiment in the folder `out`, or resume the one it holds (no spec, or the same one).

    Failed runs are reported to the observer and recorded. On Ctrl-C and SIGTERM every run writes a checkpoint, and
    `Interrupted` is raised.
    """
    study, observer = Path(out), observer or Observer()
    refuse_other_folder(spec, study)
    with executor or LocalExecutor() as entered, _locked_study(study):
        if holds_study(study):
            design = _resumed_design(spec, study)
        elif spec is None:
            raise _no_study(study)
        else:
            if spec.extends is None:
                design = make_design(spec, entered, notice=observer.on_notice, command=command)
            else:
                design = design_extension(spec, command=command)
            write_design(study, design)
        observer.on_design(design)
        with stop_on_signals() as stop:
            _Session(study, design, entered, observer, stop, command).run()
    return read_result(study)


def resume_study_command(study: Path) -> str:
    """The command that resumes a study.

    >>> resume_study_command(Path("my studies/a"))
    "qkflow compare --resume 'my studies/a'"
    """
    return f"qkflow compare --resume {shlex.quote(str(study))}"


def refuse_other_folder(spec: ExperimentSpec | None, study: Path) -> None:
    """Raise `UsageError` if the folder holds neither a study nor nothing."""
    if study.exists() and not study.is_dir():
        raise UsageError(f"{study} is a file: choose a folder for the study")
    if holds_study(study):
        return
    if spec is None:
        raise _no_study(study)
    names = [path.name for path in study.iterdir()] if study.exists() else []
    if others := sorted(name for name in names if name != "lock" and not name.endswith(".tmp")):
        raise UsageError(f"{study} is not empty ({others[0]}) and holds no study: choose another folder")


def run_one(spec: RunSpec) -> RunOutcome:
    """Train one run to its end, from a checkpoint if there is one. Errors are returned as a `RunOutcome`."""
    folder = Path(spec.folder)
    try:
        _train(spec, folder)
    except DivergenceError as error:
        reason = str(error).split(". ")[0]  # the rest is advice for a single run
        return _failed(folder, RunOutcome(kind="diverged", reason=reason))
    except DiskError as error:
        cause = error.__cause__ if isinstance(error.__cause__, DiskError) else error
        return RunOutcome(kind="disk full", reason=str(cause.strerror), errno=cause.errno)
    except Interrupted as error:
        return RunOutcome(kind="stopped", reason=str(error).split(":")[0])
    except UsageError as error:
        return _failed(folder, RunOutcome(kind="refused", reason=str(error)))
    except Exception as error:  # a mechanism may be anyone's code
        return _failed(folder, RunOutcome(kind="crashed", reason=describe_error(error)))
    return RunOutcome(kind="finished")


class _Session:
    """One process's share of an experiment."""

    def __init__(
        self,
        study: Path,
        design: Design,
        executor: Executor,
        observer: Observer,
        stop: StopRequest,
        command: Sequence[str],
    ) -> None:
        self.study, self.design, self.executor, self.observer, self.stop = study, design, executor, observer, stop
        self.command = tuple(command) or design.command
        self.disk_error: RunOutcome | None = None

    def run(self) -> None:
        """The tuning runs, if there are any, then the main runs."""
        study, design = self.study, self.design
        if not (study / "corpus.json").exists():
            write_json(study / "corpus.json", _describe_data(design))
        copy_parent_runs(study, design, self.observer.on_notice)
        all_runs = planned_runs(design)
        self.meter = ProgressMeter(study, design, all_runs)
        unsettled = [run for run in all_runs if not self._is_settled(run)]
        self._run_all([run for run in unsettled if run.kind == "tuning"])
        rates = chosen_rates(study, design)
        if design.tuned:
            write_tuning(study, design)
        main = {run.folder for run in unsettled if run.kind == "main"}
        self._run_all([run for run in planned_runs(design, rates) if run.folder in main])
        self.observer.on_progress(self.meter.read())

    def _is_settled(self, run: PlannedRun) -> bool:
        """Whether the run is finished or has failed for good, according to its folder."""
        folder = self.study / run.folder
        if finished(folder) is not None:
            sweep(folder)
            discard(folder / "checkpoints")  # left behind by a killed process
            self.meter.count_as_old(run)
            return True
        status = read_status(folder)
        if status.failed_for_good:
            self.meter.fail(run)
            self.observer.on_failure(run, status.failed or "unknown")
        return status.failed_for_good

    def _run_all(self, pending: list[PlannedRun]) -> None:
        """Run all of these; those that crash are retried after the others."""
        for run in [run for run in pending if run.config is None]:
            pending.remove(run)
            self._fail(run, "every learning-rate trial failed", for_good=True)
        tries: Counter[Path] = Counter()
        base = self.design.base
        resources = Resources(threads=base.threads or 1, gpus=int(base.device == "cuda"))
        while pending:
            retries: list[PlannedRun] = []
            specs = [self._run_spec(run) for run in pending]
            for call in self.executor.run(run_one, specs, workers=self.design.jobs, resources=resources):
                if call is not None:
                    outcome = call.value if call.crash is None else RunOutcome(kind="crashed", reason=call.crash)
                    if self._needs_retry(pending[call.index], outcome, tries):
                        retries.append(pending[call.index])
                if self.stop() or self.disk_error:
                    self.executor.stop()
                self.observer.on_progress(self.meter.read())
            self._raise_if_stopped()
            pending = retries

    def _run_spec(self, run: PlannedRun) -> RunSpec:
        if run.config is None:
            raise ValueError(f"{run.name} has no config yet")
        spec, measurement = self.design.spec, None
        if spec.rationale is not None and isinstance(spec.data, TaskConfig) and run.kind == "main":
            measurement = RationaleMeasurement(data=spec.data, rationale=spec.rationale)
        return RunSpec(
            folder=str((self.study / run.folder).absolute()),
            config=run.config,
            command=self.command,
            lock_timeout=self.executor.lock_timeout,
            measurement=measurement,
        )

    def _needs_retry(self, run: PlannedRun, outcome: RunOutcome, tries: Counter[Path]) -> bool:
        """Record how a run ended; whether to try it again."""
        tries[run.folder] += 1
        if outcome.kind == "finished":
            self.meter.finish(run)
        elif outcome.kind == "disk full":
            self.disk_error = outcome
        elif self.stop() or self.disk_error:
            pass  # it was stopped, and is resumed with the study
        elif outcome.kind in ("crashed", "stopped") and tries[run.folder] < ATTEMPTS:
            attempt = tries[run.folder] + 1
            self.observer.on_notice(f"{run.name} crashed ({outcome.reason}): attempt {attempt} of {ATTEMPTS} follows")
            return True
        else:
            # A failed tuning run is final: the main runs depend on the choice made without it.
            self._fail(run, outcome.reason, for_good=outcome.kind == "diverged" or run.kind == "tuning")
        return False

    def _fail(self, run: PlannedRun, reason: str, *, for_good: bool) -> None:
        update_status(self.study / run.folder, failed=reason, failed_for_good=for_good)
        self.meter.fail(run)
        self.observer.on_failure(run, reason)

    def _raise_if_stopped(self) -> None:
        command = resume_study_command(self.study)
        if self.disk_error is not None:
            error = self.disk_error
            raise DiskError(error.errno, f"{error.reason}: free some space, then resume with `{command}`")
        if self.stop():
            done, total = len(self.meter.finished), len(self.meter.runs)
            stopped = Interrupted(f"stopped with {done} of {total} runs finished: resume with `{command}`")
            stopped.signal = self.stop.signal or stopped.signal
            raise stopped


@contextlib.contextmanager
def _locked_study(study: Path) -> Iterator[None]:
    """Hold the lock of the study's folder; remove the folder if no study was created in it."""
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


def _resumed_design(spec: ExperimentSpec | None, study: Path) -> Design:
    """The design in the folder, if it has the same spec and its data has not changed."""
    design = read_design(study)
    if spec is not None and spec != design.spec:
        lines = "".join(f"\n  {line}" for line in spec_differences(design.spec, spec))
        raise UsageError(f"{study} holds a different study: choose another folder.{lines}")
    data = design.spec.data
    opened = open_task(data) if isinstance(data, TaskConfig) else open_corpus(data)
    if opened.digest != design.digest:
        raise UsageError(
            f"the data {opened.name} has changed since {study} was started (hash {opened.digest[:12]}, expected "
            f"{design.digest[:12]}): restore it, or start a new study"
        )
    return design


def _describe_data(design: Design) -> dict[str, object]:
    data = design.spec.data
    if isinstance(data, TaskConfig):
        return describe_task(open_task(data))
    return describe_corpus(open_corpus(data))


def _no_study(study: Path) -> UsageError:
    return UsageError(f"{study} holds no study to resume: give a folder written by `qkflow compare`")


class _CountAttempt(Callback):
    """Counts the attempt once the run's lock is held."""

    def on_start(self, run: Run) -> None:
        attempts = read_status(run.folder).attempts + 1
        update_status(run.folder, attempts=attempts, failed=None, failed_for_good=False)


def _train(spec: RunSpec, folder: Path) -> None:
    before, deadline = _peak_bytes(), time.monotonic() + spec.lock_timeout
    while True:
        try:
            with locked(folder / "lock"):  # a dying process has released it, and has started the run or not
                resume = holds_run(folder)
            train(
                spec.config,
                folder,
                callbacks=[_CountAttempt()],
                measurement=spec.measurement,
                resume=resume,
                command=spec.command,
            )
            break
        except BusyError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    peak = torch.cuda.max_memory_allocated() if spec.config.device == "cuda" else _peak_bytes() - before
    update_status(folder, peak_bytes=max(peak, read_status(folder).peak_bytes or 0), failed=None)
    discard(folder / "checkpoints")


def _failed(folder: Path, outcome: RunOutcome) -> RunOutcome:
    """Record a failure, and return it."""
    update_status(folder, failed=outcome.reason, failed_for_good=outcome.kind == "diverged")
    return outcome


def _peak_bytes() -> int:
    """The peak memory of this process; Linux counts it in kibibytes, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
