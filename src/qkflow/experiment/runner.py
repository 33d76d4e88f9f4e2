"""Run an experiment from its spec, or resume it from its folder, to the result. It can be killed at any time.

    tune the learning rates  ->  round by round: train new seeds of the open arms  ->  judge them

Everything that outlives this process is in the folder: the design, the decisions, and run folders that are finished,
started or missing. Runs that are not finished are given to the executor. A run that crashes is retried, then recorded
as failed. Time decides only whether another round starts.
"""

from __future__ import annotations

import contextlib
import resource
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from qkflow.data import open_corpus
from qkflow.data.tasks import TaskConfig, open_task
from qkflow.errors import BusyError, DiskError, DivergenceError, Interrupted, UsageError
from qkflow.experiment.budget import makespan
from qkflow.experiment.corpus_stats import describe_corpus
from qkflow.experiment.decisions import Decisions, Round
from qkflow.experiment.design import (
    Design,
    PlannedRun,
    best_rates,
    holds_study,
    make_design,
    read_decisions,
    read_design,
    refuse_links,
    round_runs,
    tuning_losses,
    tuning_runs,
    write_design,
    write_tuning,
)
from qkflow.experiment.executors.base import Executor, Resources, describe_error
from qkflow.experiment.executors.local import LocalExecutor
from qkflow.experiment.metrics.measurement import RationaleMeasurement, describe_task
from qkflow.experiment.progress import Observer, ProgressMeter
from qkflow.experiment.run_status import read_status, update_status
from qkflow.experiment.spec import ExperimentSpec, spec_differences
from qkflow.experiment.stats.verdict import Verdict, judge_round
from qkflow.experiment.summary import NO_RATE, ExperimentResult, read_losses, read_result
from qkflow.io import checksum, discard, locked, write_json
from qkflow.training import Callback, Run, TrainConfig, train
from qkflow.training.run_dir import finished, holds_run, sweep
from qkflow.training.signals import StopRequest, stop_on_signals

ATTEMPTS = 3
"""How often a run that crashes is tried per session."""
BUDGET_SPENT = "the budget is spent"
"""The reason of a study's end after which it can be extended."""


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
    more: float | None = None,
) -> ExperimentResult:
    """Run an experiment in the folder `out`, or resume the one it holds (no spec, or the same one).

    `more` seconds are added to the budget of a study that has ended with open arms.
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
            started = time.monotonic()
            design = make_design(spec, entered, notice=observer.on_notice, command=command)
            write_design(study, design)
            _append_design(Decisions(study), time.monotonic() - started)
        observer.on_design(design)
        with stop_on_signals() as stop:
            _Session(study, design, entered, observer, stop, command, more=more).run()
    return read_result(study)


def resume_study_command(study: Path) -> str:
    """The command that resumes a study.

    >>> resume_study_command(Path("my studies/a"))
    "qkflow compare --resume 'my studies/a'"
    """
    return f"qkflow compare --resume {shlex.quote(str(study))}"


def refuse_other_folder(spec: ExperimentSpec | None, study: Path) -> None:
    """Raise `UsageError` if the folder holds neither a study nor nothing, or a link leads out of it."""
    if study.exists() and not study.is_dir():
        raise UsageError(f"{study} is a file: choose a folder for the study")
    if not holds_study(study):
        if spec is None:
            raise _no_study(study)
        names = [path.name for path in study.iterdir()] if study.exists() else []
        if others := sorted(name for name in names if name != "lock" and not name.endswith(".tmp")):
            raise UsageError(f"{study} is not empty ({others[0]}) and holds no study: choose another folder")
    refuse_links(study)


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
        *,
        more: float | None = None,
    ) -> None:
        self.study, self.design, self.executor, self.observer, self.stop = study, design, executor, observer, stop
        self.command = tuple(command) or design.command
        self.disk_error: RunOutcome | None = None
        self.decisions = Decisions(study)
        self.earlier, self.start = self.decisions.state(None).elapsed, time.monotonic()
        self.meter = ProgressMeter(study, design)
        if more is not None:
            self._add_budget(more)

    def run(self) -> None:
        """Tune, then run and judge rounds until every arm is decided or the budget is spent."""
        if not (self.study / "corpus.json").exists():
            write_json(self.study / "corpus.json", _describe_data(self.design))
        rates = self._tuned_rates()
        for round_ in self.decisions.rounds():
            self._run_round(round_, rates)
        while (next_round := self._next_round(rates)) is not None:
            self._run_round(next_round, rates)
        self.observer.on_progress(self.meter.read())

    def _tuned_rates(self) -> dict[str, float]:
        """The learning rate of each arm, chosen once and written before it is used."""
        self._run_all(self._unsettled(tuning_runs(self.design)))
        losses = tuning_losses(self.study, self.design)
        rates = best_rates(self.design, losses)
        if not self.design.tuned:
            return rates
        for arm in self.design.spec.arms:
            if arm not in rates:
                self.observer.on_notice(f"{arm} is not compared: {NO_RATE}")
        if recorded := self.decisions.rates():
            return recorded
        write_tuning(self.study, losses, rates)
        self.decisions.append("rates", {"rates": rates})
        return rates

    def _run_round(self, round_: Round, rates: Mapping[str, float]) -> None:
        """Finish the runs of a round, then write its verdicts unless they are written."""
        self._run_all(self._unsettled(round_runs(self.design, round_, rates)))
        verdicts = self._judge(round_, rates)
        if round_.number <= self.decisions.judged_rounds():
            recorded = self.decisions.verdicts(round_.number)
            final = [verdict.arm for verdict in recorded.values() if verdict.kind != "undecided"]
            if any(verdict != recorded[verdict.arm] for verdict in verdicts if verdict.arm in final):
                self.observer.on_notice(
                    f"round {round_.number}: the runs give other verdicts than those in {self.decisions.path}, which "
                    "are final"
                )
            return
        self.decisions.append_verdicts(round_, verdicts, self._elapsed())
        self.observer.on_round(self.study, self.design, round_)

    def _judge(self, round_: Round, rates: Mapping[str, float]) -> tuple[Verdict, ...]:
        """The verdicts after a round; none if the study measures rationales."""
        if self.design.spec.rationale is not None:
            return ()
        rounds = [earlier_round for earlier_round in self.decisions.rounds() if earlier_round.number <= round_.number]
        losses, sizes = read_losses(self.study, self.design, rounds, rates)
        return judge_round(
            losses,
            sizes,
            baseline=self.design.spec.baseline,
            rule=self.design.rule,
            round=round_.number,
            decided=self.decisions.verdicts(round_.number - 1),
            unit=self.design.unit,
        )

    def _next_round(self, rates: Mapping[str, float]) -> Round | None:
        """Decide whether another round starts, and write that down."""
        design, number = self.design, self.decisions.judged_rounds() + 1
        verdicts = self.decisions.verdicts()
        decided = [arm for arm, verdict in verdicts.items() if verdict.kind != "undecided"]
        failed = [arm.name for arm in design.arms if arm.name not in rates or self._has_failed(arm.name)]
        last = self.decisions.last_decision()
        if last["kind"] == "end" and all(arm in failed for arm in last["failed"]):
            return None
        open_arms = [arm.name for arm in design.arms[1:] if arm.name not in decided and arm.name not in failed]
        if number > 1 and design.spec.rationale is not None:
            return self._end("all runs have ended", failed)
        if not open_arms or design.spec.baseline in failed:
            undecided = [arm for arm in failed if arm not in decided]
            return self._end("runs failed" if undecided else "all arms are decided", undecided)
        if number > len(design.rule.seeds_by_round):
            return self._end(f"{design.seeds} seeds are the most", failed)
        done = sum(len(earlier.seeds) for earlier in self.decisions.rounds())
        round_ = design.round(number, (design.spec.baseline, *open_arms), done)
        budget = self.decisions.state(design.budget).budget
        while number > 1 and budget is not None and self._elapsed() + self._round_seconds(round_) > budget:
            if len(round_.seeds) == 1:
                return self._end(BUDGET_SPENT, failed)
            round_ = replace(round_, seeds=round_.seeds[:-1])  # a shorter round, which spends the same error rate
        self.decisions.append("round", {"round": round_.number, "arms": list(round_.arms), "seeds": list(round_.seeds)})
        return round_

    def _end(self, reason: str, failed: list[str]) -> None:
        """Write that no further round starts. If the failed runs of an arm succeed later, the study continues."""
        self.decisions.append("end", {"reason": reason, "failed": failed, "elapsed": self._elapsed()})

    def _add_budget(self, seconds: float) -> None:
        """Let a study that has ended go on; the rule stays, so its error rate does, too."""
        last = self.decisions.last_decision()
        if last["kind"] != "end":
            raise UsageError(f"{self.study} has not ended: finish it with `{resume_study_command(self.study)}` first")
        if last["reason"] != BUDGET_SPENT:
            raise UsageError(f"{self.study} has ended because {last['reason']}: more time would change nothing")
        self.decisions.append("budget", {"seconds": self._elapsed() + seconds})

    def _elapsed(self) -> float:
        """Seconds that the study has taken, over all sessions, as far as they are on record."""
        return self.earlier + time.monotonic() - self.start

    def _round_seconds(self, round_: Round) -> float:
        """Expected seconds of a round, from the runs of the rounds before it."""
        seconds = [self.meter.run_seconds(arm) for arm in round_.arms]
        return makespan(sorted(seconds * len(round_.seeds), reverse=True), self.design.jobs)

    def _has_failed(self, arm: str) -> bool:
        return any(run.arm == arm and run.kind == "main" and run.folder in self.meter.failed for run in self.meter.runs)

    def _unsettled(self, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
        """The runs that are neither finished nor failed for good."""
        self.meter.add(runs)
        return [run for run in runs if not self._is_settled(run)]

    def _is_settled(self, run: PlannedRun) -> bool:
        """Whether the run is finished or has failed for good, according to its folder."""
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

    def _record(self, run: PlannedRun) -> None:
        """Write the checksums of a finished run."""
        if not self.decisions.is_recorded(run.folder):
            self.decisions.append_run(self.study, run.folder, self._elapsed())

    def _run_all(self, pending: list[PlannedRun]) -> None:
        """Run all of these; those that crash are retried after the others."""
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
    decisions = read_decisions(study, design)
    if not decisions.records:  # killed after writing the design
        _append_design(decisions, 0.0)
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


def _append_design(decisions: Decisions, elapsed: float) -> None:
    digest = checksum(decisions.path.with_name("design.json"))
    decisions.append("design", {"sha256_design": digest, "elapsed": elapsed})


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
