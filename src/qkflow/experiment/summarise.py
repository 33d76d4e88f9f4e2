"""From a study's folder to its summary: whatever runs are finished, read, paired, compared, judged."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qkflow.config import from_dict, to_dict
from qkflow.errors import UsageError
from qkflow.experiment.answers import read_answers
from qkflow.experiment.design import DECAY, EVALUATIONS, ArmDesign, Design, PlannedRun, jobs, read_design
from qkflow.experiment.run_status import read_status
from qkflow.experiment.stats.curves import Curve, cost_ratio
from qkflow.experiment.stats.paired import difference, holm, spread_ratio
from qkflow.experiment.stats.verdict import judge
from qkflow.experiment.summary import ArmSummary, Comparison, CorpusNote, ExperimentResult
from qkflow.experiment.tuning import rates, tried
from qkflow.training import Result, read_metrics
from qkflow.training.run_dir import finished, read_json

ROUNDING = 0.02
"""How far an arm may be from what is matched before it is remarked upon."""


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One run as the summary needs it; `result` is None until it is finished."""

    job: PlannedRun
    result: Result | None
    records: list[dict[str, Any]]
    failed: str | None
    peak_bytes: int | None


def read_result(study: Path | str) -> ExperimentResult:
    """All that the finished runs of a study say."""
    study = Path(study)
    design = read_design(study)
    chosen, tuning = rates(study, design), tried(study, design)
    runs = [_read(study, job) for job in jobs(design, chosen)]
    main = {
        arm.name: [run for run in runs if run.job.kind == "main" and run.job.arm == arm.name] for arm in design.arms
    }
    arms = tuple(_arm(design, arm, main[arm.name], chosen, tuning[arm.name]) for arm in design.arms)
    comparisons = _comparisons(design, main, {arm.name: arm.curves for arm in arms})
    baseline = arms[0]
    loss = baseline.mean or 1.0  # of no importance before the baseline has a run: then there is nothing to judge
    margin = design.request.margin * loss
    notes, environment = _record(study / "corpus.json"), _environment(study, runs)
    return ExperimentResult(
        folder=str(study),
        corpus=design.corpus,
        digest=design.digest,
        baseline=baseline.name,
        match=design.request.match,
        size=design.size,
        context=design.base.context,
        margin=margin,
        error_rate=design.error_rate,
        finished=sum(run.result is not None for run in runs),
        runs=len(runs),
        arms=arms,
        comparisons=comparisons,
        verdicts=judge(
            {item.arm: item.difference for item in comparisons},
            baseline=baseline.name,
            loss=loss,
            alpha=design.error_rate,
            seeds=design.seeds,
            margin=margin,
            unit=design.unit,
        ),
        notes=tuple(from_dict(CorpusNote, note) for note in notes.get("notes", [])),
        remarks=_remarks(study, design, runs),
        design=to_dict(design),
        environment=environment,
        command=design.command,
        unit=design.unit,
        recall=read_answers({name: _folders(study, found) for name, found in main.items()}),
    )


def run_folders(study: Path | str) -> dict[str, Path]:
    """For each arm the folder of its first finished run, or of its first where none is."""
    study = Path(study)
    design = read_design(study)
    found: dict[str, Path] = {}
    for job in jobs(design, rates(study, design)):
        folder = study / job.folder
        done = (folder / "weights.safetensors").exists()
        if job.kind == "main" and (
            job.arm not in found or (done and not (found[job.arm] / "weights.safetensors").exists())
        ):
            found[job.arm] = folder
    return {arm.name: found[arm.name] for arm in design.arms}


def _folders(study: Path, runs: list[_Run]) -> dict[int, Path]:
    """The folders of finished runs, by seed."""
    return {run.job.seed: study / run.job.folder for run in runs if run.result is not None}


def _read(study: Path, job: PlannedRun) -> _Run:
    folder = study / job.folder
    attempts = read_status(folder)
    result = finished(folder)
    return _Run(
        job=job,
        result=result,
        records=read_metrics(folder / "metrics.jsonl"),
        failed=None if result is not None else attempts.failed,
        peak_bytes=attempts.peak_bytes,
    )


def _arm(
    design: Design,
    arm: ArmDesign,
    runs: list[_Run],
    chosen: Mapping[str, float],
    tuning: Mapping[float, float | None],
) -> ArmSummary:
    done = [run for run in runs if run.result is not None]
    losses = [float(run.result.metrics["bits_per_byte"]) for run in done if run.result is not None]
    peaks = [run.peak_bytes for run in done if run.peak_bytes is not None]
    speeds = [speed for run in done if (speed := _speed(run)) is not None]
    return ArmSummary(
        name=arm.name,
        parameters=arm.parameters,
        parameters_off=arm.parameters / design.arms[0].parameters - 1,
        hidden=arm.model.hidden,
        flops_per_token=arm.flops_per_token,
        steps=arm.steps,
        tokens=arm.steps * design.base.batch * design.base.context,
        learning_rate=chosen.get(arm.name) if design.tuned else design.request.learning_rates[0],
        tuning=tuple(tuning.items()),
        seeds=tuple(run.job.seed for run in done),
        bits_per_byte=tuple(losses),
        mean=statistics.fmean(losses) if losses else None,
        spread=statistics.stdev(losses) if len(losses) > 1 else None,
        tokens_per_second=statistics.median(speeds) if speeds else None,
        peak_bytes=max(peaks) if peaks else None,
        state_bytes=arm.state_bytes,
        curves=tuple(_curve(run) for run in runs if any(record["kind"] == "eval" for record in run.records)),
        failures=tuple(f"seed {run.job.seed}: {run.failed}" for run in runs if run.failed is not None),
    )


def _speed(run: _Run) -> float | None:
    last = run.records[-1] if run.records else {}
    return last["tokens"] / last["seconds"] if last.get("seconds") else None


def _curve(run: _Run) -> Curve:
    points = [record for record in run.records if record["kind"] == "eval"]
    return Curve(
        seed=run.job.seed,
        tokens=tuple(int(point["tokens"]) for point in points),
        seconds=tuple(float(point["seconds"]) for point in points),
        bits_per_byte=tuple(float(point["bits_per_byte"]) for point in points),
    )


def _comparisons(
    design: Design, runs: Mapping[str, list[_Run]], curves: Mapping[str, tuple[Curve, ...]]
) -> tuple[Comparison, ...]:
    """Every arm against the baseline, over the seeds that both have finished."""
    baseline, others = design.arms[0].name, [arm.name for arm in design.arms[1:]]
    results = {
        name: {run.job.seed: run.result for run in of_arm if run.result is not None} for name, of_arm in runs.items()
    }
    differences, spreads = {}, {}
    for name in others:
        seeds = sorted(results[name].keys() & results[baseline].keys())
        if not seeds:
            continue
        one, other = ([results[arm][seed] for seed in seeds] for arm in (name, baseline))
        sizes = other[0].documents["bytes"]
        if any(not np.array_equal(result.documents["bytes"], sizes) for result in (*one, *other)):
            raise UsageError(
                f"the runs of {name} and {baseline} scored different documents: the study's folder was altered, "
                "restore it from a copy"
            )
        nats, baseline_nats = (np.stack([result.documents["nats"] for result in arm]) for arm in (one, other))
        differences[name] = difference(
            nats,
            baseline_nats,
            sizes,
            level=1 - design.error_rate,
            comparisons=len(others),
            calibrated=design.unit == "byte",  # the spread was measured on text
        )
        losses = [[float(result.metrics["bits_per_byte"]) for result in arm] for arm in (one, other)]
        spreads[name] = spread_ratio(*losses, level=1 - design.error_rate)
    adjusted = holm([differences[name].p if name in differences else None for name in others])
    return tuple(
        Comparison(
            arm=name,
            difference=differences.get(name),
            p_holm=p,
            spread=spreads.get(name),
            reach=cost_ratio(curves[name], curves[baseline], plateau=1 - DECAY, level=1 - design.error_rate)
            if name in differences
            else None,
        )
        for name, p in zip(others, adjusted, strict=True)
    )


def _remarks(study: Path, design: Design, runs: list[_Run]) -> tuple[str, ...]:
    """What a reader must know before believing the figures."""
    found = []
    if missing := sum(run.result is None for run in runs):
        failed = sum(run.failed is not None for run in runs)
        found.append(f"{missing} of {len(runs)} runs are not finished ({failed} failed): only pairs of both arms count")
    if design.seeds == 1:
        found.append("there is one seed only: no interval and no verdict can be given")
    machines = {str(_record(study / run.job.folder / "environment.json").get("cpu")) for run in runs if run.records}
    if len(machines) > 1:
        found.append(
            f"the runs were made on different machines ({', '.join(sorted(machines))}): seconds do not compare"
        )
    if (worst := max(map(abs, _unmatched(design)))) > ROUNDING:
        found.append(
            f"a run's steps are a multiple of {EVALUATIONS}: in these short runs an arm's {design.request.match} are "
            f"off by up to {worst:.0%} from the baseline's, which can decide a verdict by itself: train for longer"
        )
    if design.extends is not None:
        found.append(
            f"this is look {design.look}, and extends {design.extends.folder}: it may spend {design.error_rate:.2%} "
            f"of the {design.request.error_rate:.0%} error rate"
        )
    return tuple(found)


def _unmatched(design: Design) -> list[float]:
    """How far each arm's FLOPs or seconds are from the baseline's, as a part of them, where those are matched."""
    if design.request.match == "tokens":
        return [0.0]
    seconds = design.request.match == "seconds"
    costs = [arm.steps * ((arm.seconds_per_step or 0.0) if seconds else arm.flops_per_token) for arm in design.arms]
    return [cost / costs[0] - 1 if costs[0] else 0.0 for cost in costs]


def _environment(study: Path, runs: list[_Run]) -> dict[str, Any]:
    folders = [study / run.job.folder / "environment.json" for run in runs]
    return next((_record(path) for path in folders if path.exists()), {})


def _record(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
