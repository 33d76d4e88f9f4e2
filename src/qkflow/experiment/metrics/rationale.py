"""Attention on rationales: does it lie on the words that determine the answer, and does the answer rest on them?

Every metric is a number per test instance. Arms are compared with the baseline by paired differences over seeds and
instances (`qkflow.experiment.stats.paired.mean_difference`), with Holm's correction over the arms of each metric.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from qkflow.config import to_dict
from qkflow.data.tasks import TaskConfig
from qkflow.errors import CheckpointError
from qkflow.experiment.design import Design
from qkflow.experiment.presets import preset_for
from qkflow.experiment.spec import RationaleSpec, parse_arm
from qkflow.experiment.stats.multiplicity import holm
from qkflow.experiment.stats.paired import MeanDifference, mean_difference
from qkflow.probes.attention import reaches
from qkflow.training.run_dir import read_json
from qkflow.training.tensors import load_tensors

_SMALLEST_LOSS = 1e-12
"""Smaller losses count as this: in single precision they may be zero, which has no logarithm."""
_LEARNED = 0.95
"""A run whose loss stays above this fraction of its initial loss has hardly learned."""
_TAUS = tuple(round(0.02 * n, 2) for n in range(51))

MetricName = Literal[
    "performance", "mass", "confident", "comprehensiveness", "sufficiency", "effective", "random", "gradient"
]

_LARGEST_CHANGE: dict[MetricName, float] = {
    **dict.fromkeys(("performance", "mass", "confident"), 1.0),  # fractions, from 0 to 1
    **dict.fromkeys(("comprehensiveness", "sufficiency", "random", "gradient"), 2.0),  # of probabilities: from -1 to 1
}
"""The largest possible difference of two means of a metric; an interval ends there at the latest."""


@dataclass(frozen=True, kw_only=True)
class RationaleMetric:
    """A number per test instance, and how to read it."""

    name: MetricName
    title: str
    """The column header, such as `AC(0.5)`."""
    unit: Literal["percent", "", "tokens"]
    """Percent: the number is a fraction, shown times a hundred."""
    better: Literal["higher", "lower", "neither"]
    description: str
    """What it is, in one sentence."""


@dataclass(frozen=True, kw_only=True)
class MetricSummary:
    """A metric of an arm: the mean over test instances and seeds."""

    mean: float | None
    """None if no run is finished, or no instance has the number."""
    by_seed: tuple[float, ...]
    """The mean over instances of each seed."""


@dataclass(frozen=True, kw_only=True)
class MetricChange:
    """A metric of an arm minus the baseline's, paired by seed and by instance."""

    arm: str
    metric: MetricName
    mean: float
    low: float | None
    """Lower end of the interval; None with one seed."""
    high: float | None
    p: float | None
    """Two-sided; None with one seed."""
    p_holm: float | None
    """After Holm's correction over the arms, for this metric."""


@dataclass(frozen=True, kw_only=True)
class TrainingPoint:
    """A run after some steps, on validation instances."""

    step: int
    loss: float
    """Nats."""
    mass: float
    """Mean attention mass on the rationale."""
    performance: float


@dataclass(frozen=True, kw_only=True)
class RationaleArm:
    """One arm, over its seeds."""

    name: str
    """The label, such as `r = 20`."""
    description: str
    """What learns how fast."""
    lr: float | None
    """The learning rate that tuning chose; None if every trial failed."""
    tried: Mapping[float, float | None]
    """Validation loss of each learning rate tried, in nats; None if that run failed."""
    seeds: tuple[int, ...]
    """Seeds of finished runs."""
    readings: Mapping[MetricName, MetricSummary]
    curve: tuple[tuple[float, float], ...]
    """(tau, AC(tau)): the fraction of instances with at least that much attention on the rationale."""
    paths: tuple[tuple[TrainingPoint, ...], ...]
    """The training of each seed."""
    at_equal_loss: MetricSummary | None
    """Mass at the loss that every run has reached (`RationaleSummary.equal_loss`)."""
    by_kind: Mapping[str, Mapping[MetricName, float]]
    """Means over each kind of instance, if the task has kinds."""
    failures: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AttentionExample:
    """A test instance, and the attention of one model per arm on it."""

    words: tuple[str, ...]
    rationale: tuple[int, ...]
    answer: str
    """The right answer."""
    attention: Mapping[str, tuple[float, ...]]
    """For each arm, and `before training`: pooled attention of the last token on the words."""
    predicted: Mapping[str, str]
    """For each arm: its answer with its probability, such as `plural (0.93)`."""


@dataclass(frozen=True, kw_only=True)
class RationaleSummary:
    """Attention on rationales in an experiment; the first arm is the baseline."""

    task: str
    digest: str
    kind: Literal["classification", "generation"]
    instances: int
    """Test instances."""
    with_rationale: int
    """Test instances with a known rationale."""
    skipped: Mapping[str, int]
    notes: tuple[str, ...]
    """Notes of the task."""
    remarks: tuple[str, ...]
    """What a reader must know, such as failed runs."""
    arms: tuple[RationaleArm, ...]
    metrics: tuple[RationaleMetric, ...]
    changes: tuple[MetricChange, ...]
    """For each arm but the baseline, and each metric; missing for an arm without a finished pair."""
    tau: float
    level: float
    pooling: str
    fraction: float
    """The fraction of tokens deleted for comprehensiveness."""
    equal_loss: float | None
    """A validation loss, in nats, that every finished run has reached; None if there is none."""
    examples: tuple[AttentionExample, ...]
    """Empty if texts may not be shown."""
    published: tuple[tuple[str, float, float, float], ...]
    """The paper's results: (arm, performance in percent, AC in percent, comprehensiveness)."""
    runs: int
    finished: int
    answer: str
    """The answer in one or two sentences."""
    command: tuple[str, ...]
    design: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)

    def change(self, arm: str, metric: MetricName) -> MetricChange | None:
        """The paired difference of an arm in a metric."""
        return next((change for change in self.changes if change.arm == arm and change.metric == metric), None)


class RationaleRun:
    """The measurements of a finished run."""

    def __init__(self, folder: Path, records: Sequence[Mapping[str, Any]], tau: float) -> None:
        self.folder = folder
        measured = [record for record in records if record["kind"] == "measure"]
        if not measured:
            raise _damaged(folder, "metrics.jsonl has no measurements")
        self.path = tuple(
            TrainingPoint(
                step=record["step"], loss=record["loss"], mass=record["mass"], performance=record["performance"]
            )
            for record in measured
        )
        self.initial_attention: list[list[float]] = measured[0].get("attention", [])
        try:
            tensors = load_tensors(folder / "instances.safetensors")
        except CheckpointError as error:
            raise _damaged(folder, error) from error
        self.values: dict[str, np.ndarray] = {name: tensor.numpy() for name, tensor in tensors.items()}
        mass = self.values["mass"]
        self.values["confident"] = np.where(np.isfinite(mass), reaches(mass, tau), np.nan)


def read_rationale(
    design: Design,
    spec: RationaleSpec,
    task: Mapping[str, Any],
    runs: Mapping[str, Mapping[int, tuple[Path, Sequence[Mapping[str, Any]]]]],
    *,
    rates: Mapping[str, float],
    tuning: Mapping[str, Mapping[float, float | None]],
    failures: Mapping[str, tuple[str, ...]],
    environment: Mapping[str, Any],
) -> RationaleSummary:
    """Summarise the finished runs of each arm, by seed: their folders and the records of metrics.jsonl."""
    data = design.spec.data
    if not isinstance(data, TaskConfig):
        raise TypeError(f"rationales are measured on tasks, got {type(data).__name__}")
    metrics = metrics_of(task["kind"], spec.tau)
    labels = arm_labels([arm.name for arm in design.arms])
    measured = {
        labels[name]: {seed: RationaleRun(folder, records, spec.tau) for seed, (folder, records) in by_seed.items()}
        for name, by_seed in runs.items()
    }
    paths = {label: [run.path for run in by_seed.values()] for label, by_seed in measured.items()}
    equal = equal_loss([path for arm_paths in paths.values() for path in arm_paths])
    arms = tuple(
        RationaleArm(
            name=label,
            description=_describe_arm(name),
            lr=rates.get(name),
            tried={rate: None if bits is None else bits * math.log(2) for rate, bits in tuning[name].items()},
            seeds=tuple(measured[label]),
            readings={metric.name: _summarise(metric, measured[label].values()) for metric in metrics},
            curve=_confidence_curve([run.values["mass"] for run in measured[label].values()]),
            paths=tuple(paths[label]),
            at_equal_loss=None if equal is None else _mean([mass_at(path, equal) for path in paths[label]]),
            by_kind=_by_kind(task["kinds"], metrics, list(measured[label].values())),
            failures=failures[name],
        )
        for name, label in labels.items()
    )
    values = {label: {seed: run.values for seed, run in by_seed.items()} for label, by_seed in measured.items()}
    baseline = values.pop(arms[0].name)
    changes = metric_changes([metric.name for metric in metrics], baseline, values, level=spec.level)
    return RationaleSummary(
        task=task["name"],
        digest=design.digest,
        kind=task["kind"],
        instances=task["instances"],
        with_rationale=task["with_rationale"],
        skipped=task["skipped"],
        notes=tuple(task["notes"]),
        remarks=_remarks(arms, design),
        arms=arms,
        metrics=metrics,
        changes=changes,
        tau=spec.tau,
        level=spec.level,
        pooling=spec.pooling,
        fraction=spec.fraction,
        equal_loss=equal,
        examples=_examples(task["examples"], design.seeds, measured),
        published=preset_for(data).published,
        runs=len(arms) * design.seeds,
        finished=sum(len(by_seed) for by_seed in measured.values()),
        answer=answer(task["name"], arms, changes, spec.level),
        command=design.command,
        design=to_dict(design),
        environment=environment,
    )


def metrics_of(kind: str, tau: float) -> tuple[RationaleMetric, ...]:
    """The metrics of a kind of task, in the order of a table's columns."""
    generates = kind == "generation"
    accuracy = "Fraction of test instances with the right answer."
    f1 = "Overlap of the generated and the right answer, as bags of words."
    columns: list[tuple[MetricName, str, str, str, str]] = [
        ("performance", "F1" if generates else "accuracy", "percent", "higher", f1 if generates else accuracy),
        ("mass", "mass", "percent", "higher", "Attention of the last token on the rationale."),
        (
            "confident",
            f"AC({tau:g})",
            "percent",
            "higher",
            f"Fraction of test instances with a mass of at least {tau:g} on the rationale.",
        ),
        (
            "comprehensiveness",
            "comprehensiveness",
            "",
            "higher",
            "Drop in the answer's probability if the most attended words are deleted.",
        ),
        ("sufficiency", "sufficiency", "", "lower", "Drop in the answer's probability if all other words are deleted."),
        ("random", "random words", "", "neither", "Comprehensiveness of random words, for reference."),
        (
            "gradient",
            "gradient's words",
            "",
            "neither",
            "Comprehensiveness of the words with the largest gradient, for reference.",
        ),
        (
            "effective",
            "effective tokens",
            "tokens",
            "neither",
            "Number of uniformly attended tokens with the same entropy.",
        ),
    ]
    return tuple(
        RationaleMetric(name=name, title=title, unit=unit, better=better, description=description)  # pyright: ignore[reportArgumentType]
        for name, title, unit, better, description in columns
    )


def arm_labels(arms: Sequence[str]) -> dict[str, str]:
    """The labels of arms: their names if they differ in more than how fast queries and keys learn.

    >>> arm_labels(["standard:r=1", "standard:r=20"])
    {'standard:r=1': 'r = 1', 'standard:r=20': 'r = 20'}
    >>> arm_labels(["standard", "coupled"])
    {'standard': 'standard', 'coupled': 'coupled'}
    """
    one_mechanism = len({parse_arm(arm).mechanism for arm in arms}) == 1
    return {arm: arm_label(arm) if one_mechanism else arm for arm in arms}


def arm_label(arm: str) -> str:
    """The label of an arm in tables and figures.

    >>> arm_label("standard:r=20"), arm_label("standard:r=1,growth=40"), arm_label("standard:r=100,embeddings=100")
    ('r = 20', 'r = 1 to 40', 'published')
    """
    _, ratio, embedding_ratio = parse_arm(arm)
    if embedding_ratio != 1:
        return "published"
    return f"r = {ratio.start:g}" + ("" if ratio.end is None else f" to {ratio.end:g}")


def _describe_arm(arm: str) -> str:
    _, ratio, embedding_ratio = parse_arm(arm)
    if embedding_ratio != 1:
        return f"W_Q and W_K {ratio.start:g} times as fast, embeddings {embedding_ratio:g} times"
    if ratio.end is not None:
        return f"W_Q and W_K up to {ratio.end:g} times as fast, growing linearly"
    return "all parameters at one rate" if ratio.start == 1 else f"W_Q and W_K {ratio.start:g} times as fast"


def metric_changes(
    metrics: Sequence[MetricName],
    baseline: Mapping[int, Mapping[str, np.ndarray]],
    others: Mapping[str, Mapping[int, Mapping[str, np.ndarray]]],
    *,
    level: float,
) -> tuple[MetricChange, ...]:
    """Every arm's runs (by seed) against the baseline's in every metric, with Holm's correction over arms.

    Seeds that one of the two lacks are left out, and instances without the number in any of the runs.
    """
    changes: list[MetricChange] = []
    for metric in metrics:
        differences: dict[str, MeanDifference] = {}
        for arm, runs in others.items():
            seeds = [seed for seed in baseline if seed in runs]
            if not seeds:
                continue
            ours, theirs = (np.stack([arm_runs[seed][metric] for seed in seeds]) for arm_runs in (runs, baseline))
            finite = np.isfinite(ours).all(0) & np.isfinite(theirs).all(0)
            if finite.any():
                differences[arm] = mean_difference(ours[:, finite], theirs[:, finite], level=level)
        corrected = holm([difference.p for difference in differences.values()])
        most = _LARGEST_CHANGE.get(metric, math.inf)
        for (arm, (mean, low, high, p)), p_holm in zip(differences.items(), corrected, strict=True):
            low, high = (None if end is None else min(most, max(-most, end)) for end in (low, high))
            changes.append(MetricChange(arm=arm, metric=metric, mean=mean, low=low, high=high, p=p, p_holm=p_holm))
    return tuple(changes)


def equal_loss(paths: Sequence[Sequence[TrainingPoint]]) -> float | None:
    """The lowest loss that every path has reached."""
    if not paths or any(not path for path in paths):
        return None
    level = max(min(point.loss for point in path) for path in paths)
    return level if all(path[0].loss > level for path in paths) else None


def mass_at(path: Sequence[TrainingPoint], loss: float) -> float:
    """The mass where a path first reaches a loss, interpolated in the logarithm of the loss."""
    before = path[0]
    for point in path:
        if point.loss <= loss:
            if point is before or point.loss == before.loss:
                return point.mass
            top, level, bottom = (math.log(max(value, _SMALLEST_LOSS)) for value in (before.loss, loss, point.loss))
            share = (top - level) / (top - bottom) if top > bottom else 1.0
            return before.mass + share * (point.mass - before.mass)
        before = point
    return math.nan


def answer(task: str, arms: Sequence[RationaleArm], changes: Sequence[MetricChange], level: float) -> str:
    """What each arm but the baseline does to attention and performance."""
    clauses = [_effects(arm, changes, level) for arm in arms[1:]]
    return f"On {task}, compared with {arms[0].name}: " + "; ".join(clauses) + "."


def _effects(arm: RationaleArm, changes: Sequence[MetricChange], level: float) -> str:
    by_metric = {change.metric: change for change in changes if change.arm == arm.name}
    if "performance" not in by_metric:
        return f"{arm.name} has no finished pair of runs"
    effects = []
    if "mass" in by_metric:
        words = ("higher attention mass on the rationale", "lower attention mass", "no significant change in mass")
        effects.append(_effect(by_metric["mass"], level, words))
    words = ("better performance", "worse performance", "no significant change in performance")
    effects.append(_effect(by_metric["performance"], level, words))
    return f"{arm.name} has " + ", ".join(effects)


def _effect(change: MetricChange, level: float, words: tuple[str, str, str]) -> str:
    points = f"{100 * change.mean:+.1f} points"
    if change.low is None or change.high is None:
        return f"no interval from one seed ({points})"
    is_significant = change.p_holm is not None and change.p_holm < 1 - level
    word = words[2] if not is_significant else words[0] if change.mean > 0 else words[1]
    return f"{word} ({points}, {100 * change.low:+.1f} to {100 * change.high:+.1f})"


def _summarise(metric: RationaleMetric, runs: Iterable[RationaleRun]) -> MetricSummary:
    means = [_finite_mean(run.values[metric.name]) for run in runs]
    return _mean([mean for mean in means if mean is not None])


def _mean(by_seed: Sequence[float]) -> MetricSummary:
    return MetricSummary(mean=float(np.mean(by_seed)) if len(by_seed) else None, by_seed=tuple(map(float, by_seed)))


def _finite_mean(values: np.ndarray) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


def _confidence_curve(masses: Sequence[np.ndarray]) -> tuple[tuple[float, float], ...]:
    finite = np.concatenate([mass[np.isfinite(mass)] for mass in masses]) if masses else np.empty(0)
    return tuple((tau, float(reaches(finite, tau).mean())) for tau in _TAUS) if len(finite) else ()


def _by_kind(
    kinds: Sequence[str], metrics: Sequence[RationaleMetric], runs: Sequence[RationaleRun]
) -> dict[str, dict[MetricName, float]]:
    if len(set(kinds)) < 2 or not runs:
        return {}
    table: dict[str, dict[MetricName, float]] = {}
    for kind in sorted(set(kinds)):
        selected = np.array([instance_kind == kind for instance_kind in kinds])
        table[kind] = {}
        for metric in metrics:
            if (mean := _finite_mean(np.stack([run.values[metric.name][selected] for run in runs]))) is not None:
                table[kind][metric.name] = mean
    return table


def _examples(
    examples: Sequence[Mapping[str, Any]], seeds: int, runs: Mapping[str, Mapping[int, RationaleRun]]
) -> tuple[AttentionExample, ...]:
    """The examples as read by the models of one seed: the first that every arm with a finished run has finished."""
    runs = {name: by_seed for name, by_seed in runs.items() if by_seed}
    shared = [seed for seed in range(seeds) if runs and all(seed in by_seed for by_seed in runs.values())]
    if not shared or not examples:
        return ()
    models = {name: by_seed[shared[0]] for name, by_seed in runs.items()}
    rows = {name: read_json(run.folder / "examples.json")["examples"] for name, run in models.items()}
    initial = next(iter(models.values())).initial_attention  # all arms of a seed start alike
    return tuple(
        AttentionExample(
            words=tuple(example["words"]),
            rationale=tuple(example["rationale"]),
            answer=example["answer"],
            attention={
                "before training": tuple(initial[number]),
                **{name: tuple(arm_rows[number]["attention"]) for name, arm_rows in rows.items()},
            },
            predicted={name: arm_rows[number]["predicted"] for name, arm_rows in rows.items()},
        )
        for number, example in enumerate(examples)
    )


def _remarks(arms: Sequence[RationaleArm], design: Design) -> tuple[str, ...]:
    remarks = []
    for arm in arms:
        if arm.lr is None:
            remarks.append(f"{arm.name}: every learning-rate trial failed.")
            continue
        if len(arm.seeds) < design.seeds:
            remarks.append(f"{arm.name}: only {len(arm.seeds)} of {design.seeds} runs are finished.")
        stuck = [path for path in arm.paths if min(point.loss for point in path) > _LEARNED * path[0].loss]
        if stuck:
            remarks.append(
                f"{arm.name}: {len(stuck)} of {len(arm.seeds)} runs have hardly learned (validation loss "
                f"{stuck[0][0].loss:.4g} nats at the start, {stuck[0][-1].loss:.4g} at the end): use more --steps or "
                "other --rates."
            )
        if len(arm.tried) > 1 and arm.lr in (min(arm.tried), max(arm.tried)):
            edge = "lowest" if arm.lr == min(arm.tried) else "highest"
            remarks.append(f"{arm.name} chose the {edge} learning rate ({arm.lr:g}): extend the range of --rates.")
    if design.seeds < 3:
        remarks.append(f"{design.seeds} seed{'s'[: design.seeds - 1]} give wide intervals or none: use at least 3.")
    if any(parse_arm(arm.name).embedding_ratio != 1 for arm in design.arms):
        remarks.append(
            "The published arm speeds up embeddings as well as W_Q and W_K: its effect is not that of r alone."
        )
    return tuple(remarks)


def _damaged(folder: Path, reason: object) -> CheckpointError:
    text = " ".join(str(reason).split())
    return CheckpointError(f"{folder} cannot be read ({text}): delete it, and resume the study to train it again")
