"""Trains the planned runs of a study: those that are not finished are given to the executor.

A run that crashes is retried, then recorded as failed. A finished run whose files have changed is trained again. A run
that another study has finished with the same config is copied from there, if that study is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from qkflow.data.tasks import TaskConfig
from qkflow.errors import DiskError, Interrupted
from qkflow.experiment.decisions import Decisions
from qkflow.experiment.design import Design
from qkflow.experiment.executors.base import Executor, Resources
from qkflow.experiment.metrics.measurement import RationaleMeasurement
from qkflow.experiment.planned_runs import PlannedRun
from qkflow.experiment.progress import Observer, ProgressMeter
from qkflow.experiment.reuse import FinishedRuns
from qkflow.experiment.run_status import read_status, update_status
from qkflow.experiment.study_dir import resume_study_command
from qkflow.experiment.summary import NO_RATE
from qkflow.experiment.worker import RunOutcome, RunSpec, run_one
from qkflow.io import discard
from qkflow.training.run_dir import finished, sweep
from qkflow.training.signals import StopRequest

ATTEMPTS = 3
"""How often a run that crashes is tried per session."""


class RunQueue:
    """The runs of one session. `elapsed` gives the seconds that the study has taken, to be recorded with each run."""

    def __init__(
        self,
        study: Path,
        design: Design,
        decisions: Decisions,
        executor: Executor,
        observer: Observer,
        stop: StopRequest,
        command: Sequence[str],
        elapsed: Callable[[], float],
        finished_runs: FinishedRuns,
    ) -> None:
        self.study, self.design, self.decisions, self.executor = study, design, decisions, executor
        self.observer, self.stop, self.elapsed, self.finished_runs = observer, stop, elapsed, finished_runs
        self.command = tuple(command) or design.command
        self.disk_error: RunOutcome | None = None
        self.meter = ProgressMeter(study, design)

    def finish(self, runs: Sequence[PlannedRun]) -> None:
        """Train these runs to their end, or to a failure; those that crash are retried after the others."""
        self.meter.add(runs)
        pending = [run for run in runs if not self._is_settled(run) and not self._is_copied(run)]
        for run in [run for run in pending if run.config is None]:
            pending.remove(run)
            self._fail(run, NO_RATE, for_good=True)
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

    def has_failed(self, arm: str) -> bool:
        """Whether a main run of the arm has failed."""
        return any(run.arm == arm and run.kind == "main" and run.folder in self.meter.failed for run in self.meter.runs)

    def _is_settled(self, run: PlannedRun) -> bool:
        """Whether the run is finished or will not be retried, according to its folder."""
        folder = self.study / run.folder
        if (changed := self.decisions.changed_file(self.study, run.folder)) is not None:
            self.observer.on_notice(f"{self.study / changed} was changed after it was written: training the run again")
            self.decisions.append_discarded(run.folder)
            discard(folder)
            return False
        if finished(folder) is not None:
            sweep(folder)
            discard(folder / "checkpoints")  # left behind by a killed process
            self._record(run)
            self.meter.count_as_old(run)
            return True
        status = read_status(folder)
        if status.failed_for_good:
            self.meter.fail(run)
            self.observer.on_failure(run, status.failed or "unknown")
        return status.failed_for_good

    def _is_copied(self, run: PlannedRun) -> bool:
        """Copy the run from another study, if one has finished it and nothing but the loss is measured here."""
        if run.config is None or self.design.spec.rationale is not None:
            return False
        source = self.finished_runs.copy(run.config, self.design.digest, self.study / run.folder)
        if source is None:
            return False
        self._record(run)
        self.meter.count_as_old(run)
        return True

    def _record(self, run: PlannedRun) -> None:
        """Write the checksums of a finished run."""
        if not self.decisions.is_recorded(run.folder):
            self.decisions.append_run(self.study, run.folder, self.elapsed())

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
            self._record(run)
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
