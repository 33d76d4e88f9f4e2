"""From the folders of a study to what it says: means, paired differences with intervals, and a sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qkflow.config import to_dict
from qkflow.data.tasks import Task
from qkflow.errors import CheckpointError
from qkflow.experiment.metrics.rationale import (
    AttentionExample,
    MetricName,
    MetricSummary,
    RationaleArm,
    RationaleMetric,
    RationaleSummary,
    TrainingPoint,
)
from qkflow.experiment.sharpen.changes import changes
from qkflow.experiment.sharpen.design import LEVEL, PlannedRun, SharpenDesign
from qkflow.experiment.sharpen.metrics import metrics_of
from qkflow.experiment.sharpen.run import chosen_rates, tried
from qkflow.experiment.sharpen.stored import damaged, read_json, read_path
from qkflow.experiment.sharpen.words import answer
from qkflow.probes.attention import reaches
from qkflow.training.tensors import load_tensors

_NOTHING = 1e-12
"""A loss below counts as this: in single precision it may come to zero, which has no logarithm."""
_LEARNED = 0.95
"""A run that has not come below this part of the loss it began with has hardly learned."""
_TAUS = tuple(round(0.02 * n, 2) for n in range(51))


def read_result(study: Path, made: SharpenDesign, task: Task, *, command: Sequence[str] = ()) -> RationaleSummary:
    """Everything that the finished runs of a study say."""
    runs = _read(study, made)
    metrics = metrics_of(task, made.request.tau)
    paths = {name: [run.path for run in by_seed.values()] for name, by_seed in runs.items()}
    equal = equal_loss([path for some in paths.values() for path in some])
    rates, trials = chosen_rates(study, made), tried(study, made)
    arms = tuple(
        RationaleArm(
            name=arm.name,
            told=arm.told,
            lr=rates.get(arm.name),
            tried=trials[arm.name],
            seeds=tuple(runs[arm.name]),
            readings={metric.name: _reading(metric, runs[arm.name].values()) for metric in metrics},
            curve=_curve([run.values["mass"] for run in runs[arm.name].values()]),
            paths=tuple(tuple(path) for path in paths[arm.name]),
            at_equal_loss=None if equal is None else _mean([mass_at(path, equal) for path in paths[arm.name]]),
            by_kind=_by_kind(task, metrics, list(runs[arm.name].values())),
            failures=_failures(study, made, arm.name),
        )
        for arm in made.arms
    )
    values = {name: {seed: run.values for seed, run in by_seed.items()} for name, by_seed in runs.items()}
    baseline = values.pop(made.arms[0].name)
    found = changes([metric.name for metric in metrics], baseline, values, level=LEVEL)
    whole = len(made.arms) * len(made.seeds)
    finished = sum(len(by_seed) for by_seed in runs.values())
    return RationaleSummary(
        task=task.name,
        digest=task.digest,
        kind=task.kind,
        instances=len(task.test),
        with_rationale=sum(bool(one.rationale) for one in task.test),
        skipped=dict(task.skipped),
        notes=task.notes,
        remarks=_remarks(arms, made),
        arms=arms,
        metrics=metrics,
        changes=found,
        tau=made.request.tau,
        level=LEVEL,
        pooling=made.request.pooling,
        part=made.request.part,
        equal_loss=equal,
        examples=_example_rows(made, task, runs) if task.is_quotable else (),
        published=made.preset.published,
        runs=whole,
        finished=finished,
        answer=answer(task.name, arms, found, LEVEL),
        command=tuple(command),
        design=made.record(),
        environment=read_json(study / "environment.json", whole=True),
    )


class _Run:
    """A finished run, read back."""

    def __init__(self, folder: Path, job: PlannedRun, tau: float) -> None:
        self.folder = folder
        self.path = read_path(folder)
        if read_json(folder / "config.json") != json.loads(json.dumps(to_dict(job.config))):
            raise damaged(folder, "it was made with another config, or another learning rate was chosen since")
        try:
            tensors = load_tensors(folder / "instances.safetensors")
        except CheckpointError as error:
            raise damaged(folder, error) from error
        self.values: dict[str, np.ndarray] = {name: tensor.numpy() for name, tensor in tensors.items()}
        mass = self.values["mass"]
        self.values["confident"] = np.where(np.isfinite(mass), reaches(mass, tau), np.nan)


def _read(study: Path, made: SharpenDesign) -> dict[str, dict[int, _Run]]:
    """The finished runs of each arm by seed."""
    found: dict[str, dict[int, _Run]] = {arm.name: {} for arm in made.arms}
    for job in made.main_jobs(chosen_rates(study, made)):
        folder = study / job.folder
        if folder.exists() and not (folder / "failed.json").exists():
            found[job.arm][job.config.seed] = _Run(folder, job, made.request.tau)
    return found


def equal_loss(paths: Sequence[Sequence[TrainingPoint]]) -> float | None:
    """The lowest loss that every path has come down to."""
    if not paths or any(not path for path in paths):
        return None
    level = max(min(point.loss for point in path) for path in paths)
    return level if all(path[0].loss > level for path in paths) else None


def mass_at(path: Sequence[TrainingPoint], loss: float) -> float:
    """The mass where a path first comes down to a loss, between two looks in proportion to the loss's logarithm."""
    before = path[0]
    for point in path:
        if point.loss <= loss:
            if point is before or point.loss == before.loss:
                return point.mass
            top, level, bottom = (math.log(max(one, _NOTHING)) for one in (before.loss, loss, point.loss))
            share = (top - level) / (top - bottom) if top > bottom else 1.0
            return before.mass + share * (point.mass - before.mass)
        before = point
    return math.nan


def _reading(metric: RationaleMetric, runs: Any) -> MetricSummary:
    means = [_finite_mean(run.values[metric.name]) for run in runs]
    return _mean([mean for mean in means if mean is not None])


def _mean(by_seed: Sequence[float]) -> MetricSummary:
    return MetricSummary(mean=float(np.mean(by_seed)) if len(by_seed) else None, by_seed=tuple(map(float, by_seed)))


def _finite_mean(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def _curve(masses: Sequence[np.ndarray]) -> tuple[tuple[float, float], ...]:
    known = np.concatenate([mass[np.isfinite(mass)] for mass in masses]) if masses else np.empty(0)
    return tuple((tau, float(reaches(known, tau).mean())) for tau in _TAUS) if len(known) else ()


def _by_kind(
    task: Task, metrics: Sequence[RationaleMetric], runs: Sequence[_Run]
) -> dict[str, dict[MetricName, float]]:
    kinds = [one.kind for one in task.test]
    if len(set(kinds)) < 2 or not runs:
        return {}
    found: dict[str, dict[MetricName, float]] = {}
    for kind in sorted(set(kinds)):
        here = np.array([one == kind for one in kinds])
        means: dict[MetricName, float] = {}
        for metric in metrics:
            if (mean := _finite_mean(np.stack([run.values[metric.name][here] for run in runs]))) is not None:
                means[metric.name] = mean
        found[kind] = means
    return found


def _example_rows(
    made: SharpenDesign, task: Task, runs: Mapping[str, Mapping[int, _Run]]
) -> tuple[AttentionExample, ...]:
    """The examples as models of one seed read them: the first that every arm has which finished any run."""
    runs = {name: by_seed for name, by_seed in runs.items() if by_seed}
    seeds = [seed for seed in made.seeds if runs and all(seed in by_seed for by_seed in runs.values())]
    if not seeds:
        return ()
    read = {
        name: {row["place"]: row for row in read_json(by_seed[seeds[0]].folder / "examples.json")}
        for name, by_seed in runs.items()
    }
    first = next(iter(runs))  # the baseline, if it has runs: all arms of a seed begin alike
    return tuple(
        AttentionExample(
            words=tuple(task.words[token] for token in task.test[place].tokens),
            rationale=task.test[place].rationale,
            answer=task.classes[task.test[place].label],
            attention={
                "before training": tuple(read[first][place]["before"]),
                **{name: tuple(rows[place]["after"]) for name, rows in read.items()},
            },
            predicted={name: rows[place]["predicted"] for name, rows in read.items()},
        )
        for place in made.examples
    )


def _failures(study: Path, made: SharpenDesign, arm: str) -> tuple[str, ...]:
    jobs = [*made.tuning_jobs(), *made.main_jobs(chosen_rates(study, made))]
    found = [(job.folder.name, study / job.folder / "failed.json") for job in jobs if job.arm == arm]
    return tuple(f"{name}: {read_json(path)['reason']}" for name, path in found if path.exists())


def _remarks(arms: Sequence[RationaleArm], made: SharpenDesign) -> tuple[str, ...]:
    found = []
    for arm in arms:
        if arm.lr is None:
            found.append(f"{arm.name}: none of its learning rates came to an end.")
            continue
        if len(arm.seeds) < len(made.seeds):
            found.append(
                f"{arm.name}: {len(arm.seeds)} of {len(made.seeds)} runs came to an end: its numbers rest on those."
            )
        if still := [path for path in arm.paths if min(point.loss for point in path) > _LEARNED * path[0].loss]:
            found.append(
                f"{arm.name}: {len(still)} of {len(arm.seeds)} runs have hardly learned (a validation loss of"
                f" {still[0][0].loss:.4g} nats at first, {still[0][-1].loss:.4g} at the end): give more --steps or"
                " other --rates before making anything of its numbers."
            )
        if len(arm.tried) > 1 and arm.lr in (min(arm.tried), max(arm.tried)):
            edge = "lowest" if arm.lr == min(arm.tried) else "highest"
            found.append(
                f"{arm.name} chose the {edge} learning rate it was given ({arm.lr:g}): others may suit it better."
            )
    if (seeds := made.request.seeds) < 3:
        found.append(f"{seeds} seed{'s'[: seeds - 1]} cannot say much about others: intervals are wide, or absent.")
    if made.request.published:
        found.append(
            "The published arm speeds up embeddings as well as W_Q and W_K: what it changes is not the work of r alone."
        )
    return tuple(found)
