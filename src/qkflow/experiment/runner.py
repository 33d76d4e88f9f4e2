"""Run an experiment from its spec, or resume it from its folder, to the result. It can be killed at any time.

    tune the learning rates  ->  round by round: train new seeds of the open arms  ->  judge them

An arm is open while its verdict is undecided; any other verdict is final.

Everything that outlives this process is in the folder: the design, the decisions, and run folders that are finished,
started or missing. `run_queue` trains those that are not finished. Time decides only whether another round starts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from qkflow.data import open_corpus
from qkflow.data.tasks import TaskConfig, open_task
from qkflow.errors import UsageError
from qkflow.experiment.budget import makespan
from qkflow.experiment.corpus_stats import describe_corpus
from qkflow.experiment.decisions import Decisions, Round
from qkflow.experiment.design import Design
from qkflow.experiment.executors.base import Executor
from qkflow.experiment.executors.local import LocalExecutor
from qkflow.experiment.metrics.measurement import describe_task
from qkflow.experiment.planned_runs import best_rates, round_runs, tuning_losses, tuning_runs, write_tuning
from qkflow.experiment.planner import make_design
from qkflow.experiment.progress import Observer
from qkflow.experiment.result import ExperimentResult
from qkflow.experiment.reuse import FinishedRuns
from qkflow.experiment.run_queue import RunQueue
from qkflow.experiment.spec import ExperimentSpec
from qkflow.experiment.stats.verdict import Verdict, judge_round
from qkflow.experiment.study_dir import (
    holds_study,
    locked_study,
    no_study,
    refuse_other_folder,
    resume_study_command,
    resumed_design,
    write_design,
)
from qkflow.experiment.summary import NO_RATE, read_losses, read_result
from qkflow.io import write_json
from qkflow.training.signals import StopRequest, stop_on_signals

BUDGET_SPENT = "the budget is spent"
"""The reason of a study's end after which it can be extended."""


def run_experiment(
    spec: ExperimentSpec | None,
    out: Path | str,
    *,
    executor: Executor | None = None,
    observer: Observer | None = None,
    command: Sequence[str] = (),
    more: float | None = None,
    reuse: Sequence[Path] = (),
) -> ExperimentResult:
    """Run an experiment in the folder `out`, or resume the one it holds (no spec, or the same one).

    `more` seconds are added to the budget of a study that has ended with open arms. Runs that the studies in `reuse`
    have finished with the same config are copied instead of trained.
    Failed runs are reported to the observer and recorded. On Ctrl-C and SIGTERM every run writes a checkpoint, and
    `Interrupted` is raised.
    """
    study, observer = Path(out), observer or Observer()
    refuse_other_folder(spec, study)
    with executor or LocalExecutor() as executor, locked_study(study):
        if holds_study(study):
            design = resumed_design(spec, study)
        elif spec is None:
            raise no_study(study)
        else:
            started = time.monotonic()
            design = make_design(spec, executor, notice=observer.on_notice, command=command)
            write_design(study, design)
            Decisions(study).append_design(time.monotonic() - started)
        observer.on_design(design)
        with stop_on_signals() as stop:
            _Session(study, design, executor, observer, stop, command, more=more, reuse=reuse).run()
    return read_result(study)


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
        reuse: Sequence[Path] = (),
    ) -> None:
        self.study, self.design, self.observer = study, design, observer
        self.decisions = Decisions(study)
        self.earlier_seconds, self.start_time = self.decisions.state(None).elapsed, time.monotonic()
        self.queue = RunQueue(
            study, design, self.decisions, executor, observer, stop, command, self._elapsed, FinishedRuns(reuse)
        )
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
        self.observer.on_progress(self.queue.meter.read())

    def _tuned_rates(self) -> dict[str, float]:
        """The learning rate of each arm, chosen once and written before it is used."""
        self.queue.finish(tuning_runs(self.design))
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
        self.queue.finish(round_runs(self.design, round_, rates))
        verdicts = self._judge(round_, rates)
        if round_.number <= self.decisions.judged_rounds():
            recorded = self.decisions.verdicts(round_.number)
            decided = [verdict.arm for verdict in recorded.values() if verdict.kind != "undecided"]
            if any(verdict != recorded[verdict.arm] for verdict in verdicts if verdict.arm in decided):
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
        failed = [arm.name for arm in design.arms if arm.name not in rates or self.queue.has_failed(arm.name)]
        last = self.decisions.last_decision()
        if last["kind"] == "end" and all(arm in failed for arm in last["failed"]):
            return None  # the study has ended, and no arm that had failed by then has succeeded since
        open_arms = [arm.name for arm in design.arms[1:] if arm.name not in decided and arm.name not in failed]
        if number > 1 and design.spec.rationale is not None:
            return self._end("all runs have ended", failed)
        if not open_arms or design.spec.baseline in failed:
            undecided = [arm for arm in failed if arm not in decided]
            return self._end("runs failed" if undecided else "all arms are decided", undecided)
        if number > len(design.rule.seeds_by_round):
            return self._end(f"{design.seeds} seeds are the most", failed)
        seeds_used = sum(len(earlier.seeds) for earlier in self.decisions.rounds())
        round_ = design.round(number, (design.spec.baseline, *open_arms), seeds_used)
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
        """Seconds that the study has taken, over all sessions that have recorded their time."""
        return self.earlier_seconds + time.monotonic() - self.start_time

    def _round_seconds(self, round_: Round) -> float:
        """Expected seconds of a round, from the runs of the rounds before it."""
        seconds = [self.queue.meter.run_seconds(arm) for arm in round_.arms]
        return makespan(sorted(seconds * len(round_.seeds), reverse=True), self.design.jobs)


def _describe_data(design: Design) -> dict[str, object]:
    data = design.spec.data
    if isinstance(data, TaskConfig):
        return describe_task(open_task(data))
    return describe_corpus(open_corpus(data))
