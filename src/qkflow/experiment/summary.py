"""The result of an experiment, read from its folder: runs are paired, compared and judged.

Everything is derived from the folder and can be computed again at any time.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qkflow.config import from_dict, to_dict
from qkflow.errors import UsageError
from qkflow.experiment.budget import EVALUATIONS
from qkflow.experiment.decisions import Decisions, Round
from qkflow.experiment.design import ArmDesign, Design
from qkflow.experiment.metrics.rationale import RationaleSummary, read_rationale
from qkflow.experiment.metrics.recall import read_recall_summary
from qkflow.experiment.planned_runs import PlannedRun, best_rates, round_runs, tuning_losses, tuning_runs
from qkflow.experiment.result import ArmSummary, Comparison, CorpusNote, ExperimentResult
from qkflow.experiment.run_status import read_status
from qkflow.experiment.stats.curves import Curve, cost_ratio
from qkflow.experiment.stats.paired import spread_ratio
from qkflow.experiment.stats.verdict import Verdict
from qkflow.experiment.study_dir import read_decisions, read_design, refuse_links
from qkflow.training import Result, read_metrics
from qkflow.training.run_dir import finished, read_json

NO_RATE = "every learning-rate trial failed"
"""The reason why an arm is not compared."""
MATCHING_TOLERANCE = 0.02
"""The largest mismatch between arms, relative to the baseline, without a remark."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What is on disk of one run; `result` is None until it is finished."""

    run: PlannedRun
    folder: Path
    result: Result | None
    records: list[dict[str, Any]]
    """The lines of metrics.jsonl."""
    failed: str | None
    peak_bytes: int | None
    changed: Path | None
    """A file that was changed after the run had finished; its result is then left out."""


def read_losses(
    study: Path, design: Design, rounds: Sequence[Round], rates: Mapping[str, float]
) -> tuple[dict[str, dict[int, np.ndarray]], np.ndarray]:
    """The nats of each held-out document by arm and seed, of the finished runs of these rounds, and its bytes."""
    losses: dict[str, dict[int, np.ndarray]] = {arm.name: {} for arm in design.arms}
    sizes: np.ndarray | None = None
    for run in (run for round_ in rounds for run in round_runs(design, round_, rates)):
        if (result := finished(study / run.folder)) is None:
            continue
        documents = result.documents
        if sizes is not None and not np.array_equal(documents["bytes"], sizes):
            raise UsageError(
                f"{study / run.folder / 'documents.npy'} scores other documents than the other runs: restore the "
                "study's folder from a copy"
            )
        sizes = documents["bytes"]
        losses[run.arm][run.seed] = documents["nats"]
    return losses, np.ones(1) if sizes is None else sizes


def read_result(study: Path | str) -> ExperimentResult:
    """The result of the finished runs in a study's folder."""
    study = Path(study)
    refuse_links(study)
    design = read_design(study)
    decisions = read_decisions(study, design)
    tuning = tuning_losses(study, design)
    rates = decisions.rates() or best_rates(design, tuning)
    runs = _read_runs(study, design, decisions, rates)
    for run in runs:
        if run.changed is not None and run.run.kind == "tuning":
            tuning[run.run.arm][run.run.lr] = None
    by_arm = {
        arm.name: [run for run in runs if run.run.kind == "main" and run.run.arm == arm.name] for arm in design.arms
    }
    arms = tuple(
        _arm_summary(
            design, arm, by_arm[arm.name], rates.get(arm.name), tuning[arm.name], is_tuned=bool(decisions.rates())
        )
        for arm in design.arms
    )
    verdicts = _verdicts(design, decisions)
    data_record = _read_optional(study / "corpus.json")
    environments = [_read_optional(run.folder / "environment.json") for run in runs]
    environment = next((record for record in environments if record), {})
    finished_runs = {name: [run for run in arm_runs if run.result is not None] for name, arm_runs in by_arm.items()}
    loss = arms[0].mean or 1.0  # irrelevant before the baseline has a run: then there is nothing to judge
    return ExperimentResult(
        folder=str(study),
        data=design.corpus,
        digest=design.digest,
        baseline=design.spec.baseline,
        match=design.spec.match,
        size=design.size,
        context=design.base.context,
        margin=design.spec.margin * loss,
        error_rate=design.rule.error_rate,
        finished=sum(run.result is not None for run in runs),
        runs=len(runs),
        arms=arms,
        comparisons=_compare(design, by_arm, verdicts, {arm.name: arm.curves for arm in arms}),
        verdicts=verdicts,
        notes=_read_notes(study / "corpus.json", data_record),
        remarks=_remarks(design, runs),
        design=to_dict(design),
        environment=environment,
        command=design.command,
        state=decisions.state(design.budget),
        unit=design.unit,
        recall=read_recall_summary(
            {name: {run.run.seed: run.folder for run in arm_runs} for name, arm_runs in finished_runs.items()}
        ),
        rationale=_rationale(design, data_record, runs, finished_runs, rates, tuning, environment),
    )


def _read_runs(study: Path, design: Design, decisions: Decisions, rates: Mapping[str, float]) -> list[RunRecord]:
    """All runs that the study has planned so far, those of tuning first."""
    rounds = [run for round_ in decisions.rounds() for run in round_runs(design, round_, rates)]
    return [_read_run(study, run, decisions) for run in (*tuning_runs(design), *rounds)]


def _verdicts(design: Design, decisions: Decisions) -> tuple[Verdict, ...]:
    """The verdicts on the loss; none if the study measures rationales."""
    if design.spec.rationale is not None:
        return ()
    by_arm = decisions.verdicts()
    return tuple(by_arm.get(arm.name) or _no_verdict(arm.name) for arm in design.arms[1:])


def _rationale(
    design: Design,
    data_record: Mapping[str, Any],
    runs: Sequence[RunRecord],
    finished_runs: Mapping[str, Sequence[RunRecord]],
    rates: Mapping[str, float],
    tuning: Mapping[str, Mapping[float, float | None]],
    environment: dict[str, Any],
) -> RationaleSummary | None:
    """Attention on the rationales; None if it was not measured."""
    if design.spec.rationale is None or "task" not in data_record:
        return None
    failures = {
        arm.name: tuple(
            f"{run.folder.name}: {run.failed or f'{run.changed} was changed after the run had finished'}"
            for run in runs
            if run.run.arm == arm.name and (run.failed or run.changed)
        )
        for arm in design.arms
    }
    return read_rationale(
        design,
        design.spec.rationale,
        data_record["task"],
        {
            name: {run.run.seed: (run.folder, run.records) for run in arm_runs}
            for name, arm_runs in finished_runs.items()
        },
        rates=rates,
        tuning=tuning,
        failures=failures,
        environment=environment,
    )


def example_runs(study: Path | str) -> dict[str, Path]:
    """For each arm, the folder of its first finished run, or of its first run."""
    study = Path(study)
    design = read_design(study)
    decisions = read_decisions(study, design)
    folders: dict[str, Path] = {}
    for arm in design.arms:
        seeds = [
            design.first_seed,
            *(s for round_ in decisions.rounds() if arm.name in round_.arms for s in round_.seeds),
        ]
        runs = [Path("runs", arm.folder, f"seed-{seed}") for seed in seeds]
        finished_runs = [
            run
            for run in runs
            if (study / run / "weights.safetensors").exists() and decisions.changed_file(study, run) is None
        ]
        folders[arm.name] = study / (finished_runs or runs)[0]
    return folders


def _no_verdict(arm: str) -> Verdict:
    return Verdict(arm=arm, kind="undecided", sentence="no round has finished")


def _read_run(study: Path, run: PlannedRun, decisions: Decisions) -> RunRecord:
    folder = study / run.folder
    changed = decisions.changed_file(study, run.folder)
    status, result = read_status(folder), None if changed is not None else finished(folder)
    return RunRecord(
        run=run,
        folder=folder,
        result=result,
        records=[] if changed is not None else read_metrics(folder / "metrics.jsonl"),
        failed=None if result is not None else status.failed,
        peak_bytes=status.peak_bytes,
        changed=None if changed is None else study / changed,
    )


def _arm_summary(
    design: Design,
    arm: ArmDesign,
    runs: Sequence[RunRecord],
    rate: float | None,
    tuning: Mapping[float, float | None],
    *,
    is_tuned: bool,
) -> ArmSummary:
    finished_runs = [run for run in runs if run.result is not None]
    losses = [float(run.result.metrics["bits_per_byte"]) for run in finished_runs if run.result is not None]
    peaks = [run.peak_bytes for run in finished_runs if run.peak_bytes is not None]
    last_records = [run.records[-1] for run in finished_runs if run.records]
    speeds = [record["tokens"] / record["seconds"] for record in last_records if record.get("seconds")]
    return ArmSummary(
        name=arm.name,
        parameters=arm.parameters,
        parameters_off=arm.parameters / design.arms[0].parameters - 1,
        hidden=getattr(arm.model, "hidden", None) or 0,
        flops_per_token=arm.flops_per_token,
        steps=arm.steps,
        tokens=arm.steps * design.base.batch * design.base.context,
        learning_rate=rate,
        tuning=tuple(tuning.items()),
        seeds=tuple(run.run.seed for run in finished_runs),
        losses=tuple(losses),
        mean=statistics.fmean(losses) if losses else None,
        spread=statistics.stdev(losses) if len(losses) > 1 else None,
        tokens_per_second=statistics.median(speeds) if speeds else None,
        peak_bytes=max(peaks) if peaks else None,
        state_bytes=arm.state_bytes,
        curves=tuple(curve for run in runs if (curve := _curve(run)) is not None),
        failures=(
            *(f"seed {run.run.seed}: {run.failed}" for run in runs if run.failed is not None),
            *([NO_RATE] if is_tuned and rate is None else []),
        ),
    )


def _curve(run: RunRecord) -> Curve | None:
    evaluations = [record for record in run.records if record["kind"] == "eval"]
    if not evaluations:
        return None
    return Curve(
        seed=run.run.seed,
        tokens=tuple(int(record["tokens"]) for record in evaluations),
        seconds=tuple(float(record["seconds"]) for record in evaluations),
        losses=tuple(float(record["bits_per_byte"]) for record in evaluations),
    )


def _compare(
    design: Design,
    runs: Mapping[str, Sequence[RunRecord]],
    verdicts: Sequence[Verdict],
    curves: Mapping[str, tuple[Curve, ...]],
) -> tuple[Comparison, ...]:
    """Every arm against the baseline, over the seeds that both have finished."""
    baseline, level = design.arms[0].name, 1 - design.rule.error_rate
    losses = {
        name: {run.run.seed: float(run.result.metrics["bits_per_byte"]) for run in arm_runs if run.result is not None}
        for name, arm_runs in runs.items()
    }
    comparisons = []
    for verdict in verdicts:
        seeds = sorted(losses[verdict.arm].keys() & losses[baseline].keys())
        spread = reach = None
        if seeds:
            spread = spread_ratio(
                *([losses[arm][seed] for seed in seeds] for arm in (verdict.arm, baseline)), level=level
            )
            reach = cost_ratio(curves[verdict.arm], curves[baseline], plateau=1 - design.base.decay, level=level)
        comparisons.append(
            Comparison(
                arm=verdict.arm,
                difference=verdict.difference,
                p_adjusted=verdict.p_adjusted,
                spread=spread,
                reach=reach,
            )
        )
    return tuple(comparisons)


def _remarks(design: Design, runs: Sequence[RunRecord]) -> tuple[str, ...]:
    """What a reader must know before relying on the numbers."""
    remarks = []
    if missing := sum(run.result is None for run in runs):
        failed = sum(run.failed is not None for run in runs)
        remarks.append(
            f"{missing} of {len(runs)} runs are not finished ({failed} failed): only seeds with both runs are compared"
        )
    remarks += [
        f"{run.changed} was changed after the run had finished: the run is left out" for run in runs if run.changed
    ]
    if design.seeds == 1:
        remarks.append("one seed gives no interval and no verdict: use at least 3 seeds")
    machines = {str(_read_optional(run.folder / "environment.json").get("cpu")) for run in runs if run.records}
    if len(machines) > 1:
        remarks.append(f"the runs used different machines ({', '.join(sorted(machines))}): times are not comparable")
    if (worst := max(map(abs, _mismatches(design)))) > MATCHING_TOLERANCE:
        remarks.append(
            f"steps are a multiple of {EVALUATIONS}, so in these short runs the {design.spec.match} of an arm differ "
            f"from the baseline's by up to {worst:.0%}, which can decide a verdict: train for longer"
        )
    return tuple(remarks)


def _mismatches(design: Design) -> list[float]:
    """The relative difference of each arm's FLOPs or seconds from the baseline's, if these are matched."""
    if design.spec.match == "tokens":
        return [0.0]
    seconds = design.spec.match == "seconds"
    costs = [arm.steps * ((arm.seconds_per_step or 0.0) if seconds else arm.flops_per_token) for arm in design.arms]
    return [cost / costs[0] - 1 if costs[0] else 0.0 for cost in costs]


def _read_notes(path: Path, corpus: Mapping[str, Any]) -> tuple[CorpusNote, ...]:
    try:
        return tuple(from_dict(CorpusNote, dict(note)) for note in corpus.get("notes", []))
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path} is damaged ({error}): delete it and resume the study") from error


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
