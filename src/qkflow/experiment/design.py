"""The design of an experiment: written before the first run and never edited. All runs follow from it.

STUDY/
  design.json              this
  corpus.json              statistics and excerpts of the data
  tuning/ARM/lr-0.003/     one run folder per learning rate, if there is more than one
  tuning.json              the learning rates that tuning chose, derived from the folders
  runs/ARM/seed-0/         one run folder per arm and seed
  lock                     held by the process that runs the experiment
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, cast

import torch

from qkflow.config import from_dict, to_dict
from qkflow.data import Corpus, Split, open_corpus, windows
from qkflow.data.tasks import TaskConfig, open_task
from qkflow.errors import UsageError
from qkflow.experiment.budget import (
    DECAY,
    EVALUATIONS,
    TUNING_EVALUATIONS,
    SizedArms,
    choose_budget,
    evaluation_tokens,
    measure_speeds,
    tuning_steps,
)
from qkflow.experiment.executors.base import Executor
from qkflow.experiment.spec import Device, ExperimentSpec, parse_arm, refuse_duplicate_arms
from qkflow.experiment.stats.verdict import look_rate
from qkflow.io import write_json
from qkflow.training import TrainConfig
from qkflow.training.budget import Speed
from qkflow.training.config import ModelConfig
from qkflow.training.losses import open_objective
from qkflow.training.reproducibility import pick_device
from qkflow.training.run_dir import finished, read_json
from qkflow.training.step import build_model

FORMAT = 2
TUNING_SEED = 1000
"""The seed of every tuning run; no other run has it."""
_FEWEST_SEEDS = 2
_LARGE = 10_000_000
"""Parameters above which a checkpoint is too large to be written every minute."""


@dataclass(frozen=True, kw_only=True)
class ArmDesign:
    """One arm, matched to the baseline."""

    name: str
    """As requested, e.g. `differential:window=64` or `standard:r=20`."""
    folder: str
    """The name as a folder name."""
    model: ModelConfig
    """The model, with the feed-forward width that matching chose."""
    parameters: int
    flops_per_token: int
    """Declared FLOPs of one forward pass at the context length (training costs three times as much); 0: not known."""
    state_bytes: int
    """Size of the state after one context length, per sequence."""
    steps: int
    """Steps per run."""
    tuning_steps: int
    """Steps per tuning run; 0 if there is one learning rate."""
    seconds_per_step: float | None
    """Measured before the experiment with all concurrent runs; None if nothing depended on it."""

    @property
    def step_cost(self) -> float:
        """The relative cost of a step: seconds, or FLOPs, or 1."""
        return self.seconds_per_step or float(self.flops_per_token) or 1.0


@dataclass(frozen=True, kw_only=True)
class ParentStudy:
    """The study that another one extends."""

    folder: str
    digest: str
    """SHA-256 of its design.json."""


@dataclass(frozen=True, kw_only=True)
class Design:
    """An experiment before it is run."""

    spec: ExperimentSpec
    """What was asked for."""
    command: tuple[str, ...]
    """The command that asked for it."""
    date: str
    """When, in UTC."""
    corpus: str
    """The name of the data."""
    digest: str
    """The hash of the data."""
    size: str
    """The named size, `own` for a given model, or `preset`."""
    arms: tuple[ArmDesign, ...]
    """The baseline first."""
    seeds: int
    """Runs per arm. Run i has seed i for initialization and, shared by all arms, seed i for the data."""
    base: TrainConfig
    """What all runs share. `planned_runs` sets model, steps, evaluations, seeds and learning rate."""
    jobs: int
    """Concurrent runs."""
    look: int
    """1, plus one for each extension."""
    error_rate: float
    """The share of the spec's error rate that this look may spend."""
    extends: ParentStudy | None
    """The study that this one extends."""
    expected_seconds: float | None
    """Expected time of all runs; None if nothing was measured."""
    unit: str = "byte"
    """What losses are per: a byte of text, or an answer token of a recall task, or an answer of a task."""
    format: int = FORMAT
    """Version of this file."""

    def arm(self, name: str) -> ArmDesign:
        """The arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def tuned(self) -> bool:
        """Whether each arm chooses among several learning rates."""
        return len(self.spec.learning_rates) > 1

    @property
    def step_items(self) -> tuple[int, str]:
        """What a step trains on: a number of tokens, or of instances of a task."""
        if isinstance(self.base.data, TaskConfig):
            return self.base.batch, "instances"
        return self.base.batch * self.base.context, "tokens"


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run of a design."""

    arm: str
    seed: int
    kind: Literal["tuning", "main"]
    folder: Path
    """The run folder, relative to the study's."""
    steps: int
    config: TrainConfig | None
    """None until tuning has chosen the learning rate."""

    @property
    def name(self) -> str:
        """For messages: `standard seed 3`, or `standard lr-0.003`."""
        return f"{self.arm} {self.folder.name.replace('seed-', 'seed ')}"


def make_design(
    spec: ExperimentSpec, executor: Executor, *, notice: Callable[[str], None], command: Sequence[str] = ()
) -> Design:
    """The design of a new experiment that does not extend another."""
    if spec.base is not None:
        return _preset_design(spec, spec.base, executor, command)
    if isinstance(spec.data, TaskConfig):
        raise UsageError(f"the task {spec.data.name} needs a training config")
    corpus = open_corpus(spec.data)
    _refuse_small_corpus(corpus)
    _refuse_context(spec, corpus)
    device = cast(Device, pick_device("auto").type) if spec.device == "auto" else spec.device
    jobs, threads = allocate_cores(spec, executor.cores(), on_cpu=device == "cpu")

    def measure(arms: SizedArms, seconds: float) -> tuple[Speed, ...]:
        base = base_config(spec, corpus, arms, EVALUATIONS, threads, device)
        open_objective(base)
        configs = {arm.name: run_config(base, arm.name, arm.model, base.steps, 0, base.lr) for arm in arms.arms}
        return measure_speeds(executor, configs, arms, seconds, jobs, notice)

    choice = choose_budget(spec, corpus, jobs=jobs, measure=measure, notice=notice)
    base = base_config(spec, corpus, choice.arms, choice.steps[0], threads, device)
    open_objective(base)
    folders = folder_names(spec.arms)
    arms = tuple(
        ArmDesign(
            name=arm.name,
            folder=folder,
            model=arm.model,
            parameters=arm.parameters,
            flops_per_token=arm.flops_per_token,
            state_bytes=arm.state_bytes,
            steps=steps,
            tuning_steps=tuning_steps(steps) if len(spec.learning_rates) > 1 else 0,
            seconds_per_step=None if choice.speeds is None else choice.speeds[index].step,
        )
        for index, (arm, folder, steps) in enumerate(zip(choice.arms.arms, folders, choice.steps, strict=True))
    )
    return Design(
        spec=spec,
        command=tuple(command),
        date=_now(),
        corpus=corpus.name,
        digest=corpus.digest,
        size=choice.arms.size,
        arms=arms,
        seeds=choice.seeds,
        base=base,
        jobs=jobs,
        look=1,
        error_rate=look_rate(spec.error_rate, 1),
        extends=None,
        expected_seconds=choice.seconds,
        unit=corpus.unit,
    )


def extended_design(spec: ExperimentSpec, parent: Design, digest: str, *, command: Sequence[str]) -> Design:
    """The design of an experiment that extends another: the same but for its seeds and its error rate."""
    seeds, look = spec.seeds or parent.seeds, parent.look + 1
    seconds = parent.expected_seconds
    return replace(
        parent,
        spec=spec,
        command=tuple(command),
        date=_now(),
        seeds=seeds,
        look=look,
        error_rate=look_rate(spec.error_rate, look),
        extends=ParentStudy(folder=spec.extends or "", digest=digest),
        expected_seconds=None if seconds is None else seconds * (seeds / parent.seeds - 1),
    )


def _preset_design(spec: ExperimentSpec, base: TrainConfig, executor: Executor, command: Sequence[str]) -> Design:
    """The design of an experiment whose training config is given: the arms differ in mechanism and ratios."""
    if not isinstance(base.data, TaskConfig):
        raise UsageError("a complete training config is supported for tasks only: give a budget, tokens or a size")
    task = open_task(base.data)
    refuse_duplicate_arms(spec.arms)
    seeds = spec.seeds or 5
    runs = len(spec.arms) * seeds
    models = [_with_mechanism(base.model, parse_arm(arm).mechanism) for arm in spec.arms]
    return Design(
        spec=spec,
        command=tuple(command),
        date=_now(),
        corpus=task.name,
        digest=task.digest,
        size="preset",
        arms=tuple(
            ArmDesign(
                name=name,
                folder=folder,
                model=model,
                parameters=_count_parameters(model),
                flops_per_token=0,
                state_bytes=0,
                steps=base.steps,
                tuning_steps=base.steps if len(spec.learning_rates) > 1 else 0,
                seconds_per_step=None,
            )
            for name, folder, model in zip(spec.arms, folder_names(spec.arms), models, strict=True)
        ),
        seeds=seeds,
        base=base,
        jobs=spec.jobs or max(1, min(runs, sum(executor.cores()) // (base.threads or 1))),
        look=1,
        error_rate=look_rate(spec.error_rate, 1),
        extends=None,
        expected_seconds=None,
        unit="answer token" if task.kind == "generation" else "answer",
    )


def planned_runs(design: Design, rates: Mapping[str, float] | None = None) -> tuple[PlannedRun, ...]:
    """Every run of the design: tuning runs first, then all arms seed by seed, the most expensive arm first.

    `rates` are the learning rates that tuning chose, by arm. The main runs of other arms have no config.
    """
    given = design.spec.learning_rates
    chosen = dict(rates or {}) if design.tuned else dict.fromkeys((arm.name for arm in design.arms), given[0])
    by_cost = sorted(design.arms, key=lambda arm: -arm.steps * arm.step_cost)
    tuning = [_tuning_run(design, arm, rate) for rate in given for arm in by_cost] if design.tuned else []
    main = [_main_run(design, arm, seed, chosen.get(arm.name)) for seed in range(design.seeds) for arm in by_cost]
    return (*tuning, *main)


def run_config(
    base: TrainConfig,
    arm: str,
    model: ModelConfig,
    steps: int,
    seed: int,
    rate: float,
    *,
    evaluations: int | None = EVALUATIONS,
) -> TrainConfig:
    """The config of one run of an arm. `evaluations` None keeps those of `base`."""
    parsed = parse_arm(arm)
    return replace(
        base,
        model=model,
        steps=steps,
        evaluate_every=base.evaluate_every if evaluations is None else steps // evaluations,
        seed=seed,
        data_seed=seed,
        lr=rate,
        qk_ratio=parsed.ratio.start,
        qk_growth=parsed.ratio.end,
        embedding_ratio=parsed.embedding_ratio,
    )


def tuning_losses(study: Path, design: Design) -> dict[str, dict[float, float | None]]:
    """For each arm, the final loss of each learning rate it tried, in the order given.

    None if the run failed or is not finished. Empty if there is one learning rate.
    """
    losses: dict[str, dict[float, float | None]] = {arm.name: {} for arm in design.arms}
    for run in planned_runs(design):
        if run.kind == "tuning" and run.config is not None:
            result = finished(study / run.folder)
            bits = math.inf if result is None else float(result.metrics["bits_per_byte"])
            losses[run.arm][run.config.lr] = bits if math.isfinite(bits) else None
    return losses


def chosen_rates(study: Path, design: Design) -> dict[str, float]:
    """The learning rate of each arm's runs: the only one, or the best that it tried, the smaller of two equal ones.

    An arm whose tuning runs all failed is missing. Meaningful once all tuning runs have ended.
    """
    if not design.tuned:
        return dict.fromkeys((arm.name for arm in design.arms), design.spec.learning_rates[0])
    rates = {}
    for arm, losses in tuning_losses(study, design).items():
        if finite := [(bits, rate) for rate, bits in losses.items() if bits is not None]:
            rates[arm] = min(finite)[1]
    return rates


def write_tuning(study: Path, design: Design) -> None:
    """Write tuning.json for people; the program does not read it."""
    chosen = chosen_rates(study, design)
    table = {}
    for arm, losses in tuning_losses(study, design).items():
        rows = [{"lr": rate, "bits_per_byte": bits} for rate, bits in losses.items()]
        table[arm] = {"chosen": chosen.get(arm), "tried": rows}
    write_json(study / "tuning.json", table)


def allocate_cores(spec: ExperimentSpec, cores: Sequence[int], *, on_cpu: bool) -> tuple[int, int]:
    """Concurrent runs, and CPU threads per run, for machines with these numbers of cores.

    One thread per run uses the cores best if there are enough runs. More threads than cores would be much slower.
    """
    runs = len(spec.arms) * (spec.seeds or _FEWEST_SEEDS)
    if not on_cpu:
        return spec.jobs or 1, spec.threads or max(cores)
    wanted = runs if spec.jobs is None else spec.jobs
    threads = spec.threads or min(max(cores), max(1, sum(cores) // wanted))
    slots = sum(machine // threads for machine in cores)
    return spec.jobs or max(1, min(runs, slots)), threads


def base_config(
    spec: ExperimentSpec, corpus: Corpus, arms: SizedArms, steps: int, threads: int, device: Device
) -> TrainConfig:
    """The config of the baseline's first run, from which all others differ in a few fields."""
    during, final = evaluation_tokens(steps * arms.step_tokens, corpus.validation)
    baseline = arms.arms[0]
    base = TrainConfig(
        data=spec.data,
        model=baseline.model,
        steps=steps,
        context=arms.context,
        batch=arms.batch,
        schedule="stable",
        decay=DECAY,
        evaluate_tokens=during,
        final_tokens=_at_least_two_documents(corpus.validation, final),
        log_every=max(1, min(10, steps // 100)),
        checkpoint_every=None,
        checkpoint_minutes=1.0 if arms.parameters < _LARGE else 10.0,
        device=device,
        threads=threads,
    )
    return run_config(base, baseline.name, baseline.model, steps, 0, spec.learning_rates[0])


def folder_names(names: Sequence[str]) -> tuple[str, ...]:
    """Names as folder names: safe characters, not too long, and distinct on case-insensitive file systems.

    >>> folder_names(["differential:window=64", "differential window=64"])
    ('differential_window=64', 'differential_window=64-2')
    """
    folders: list[str] = []
    for name in names:
        stem = re.sub(r"[^A-Za-z0-9=+,._-]+", "_", name).lstrip(".") or "arm"
        if len(stem) > 80:
            stem = f"{stem[:60]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        taken, number, candidate = {folder.casefold() for folder in folders}, 1, stem
        while candidate.casefold() in taken:
            number += 1
            candidate = f"{stem}-{number}"
        folders.append(candidate)
    return tuple(folders)


def write_design(study: Path, design: Design) -> None:
    """Write the design into the study's folder."""
    write_json(study / "design.json", to_dict(design))


def holds_study(study: Path) -> bool:
    """Whether the folder holds a study."""
    return (study / "design.json").is_file()


def read_design(study: Path | str) -> Design:
    """The design in a study's folder; `UsageError` if there is none."""
    study = Path(study)
    if not holds_study(study):
        raise UsageError(f"{study} is not a study (no design.json): give a folder written by `qkflow compare`")
    data = read_json(study / "design.json")
    if data.get("format") != FORMAT:
        raise UsageError(f"{study / 'design.json'} has format {data.get('format')!r}, expected {FORMAT}")
    return from_dict(Design, data)


def _tuning_run(design: Design, arm: ArmDesign, rate: float) -> PlannedRun:
    config = run_config(
        design.base,
        arm.name,
        arm.model,
        arm.tuning_steps,
        TUNING_SEED,
        rate,
        evaluations=TUNING_EVALUATIONS if design.spec.base is None else None,
    )
    folder = Path("tuning", arm.folder, f"lr-{rate!r}")
    return PlannedRun(
        arm=arm.name, seed=TUNING_SEED, kind="tuning", folder=folder, steps=arm.tuning_steps, config=config
    )


def _main_run(design: Design, arm: ArmDesign, seed: int, rate: float | None) -> PlannedRun:
    evaluations = EVALUATIONS if design.spec.base is None else None
    config = None
    if rate is not None:
        config = run_config(design.base, arm.name, arm.model, arm.steps, seed, rate, evaluations=evaluations)
    folder = Path("runs", arm.folder, f"seed-{seed}")
    return PlannedRun(arm=arm.name, seed=seed, kind="main", folder=folder, steps=arm.steps, config=config)


def _with_mechanism(model: ModelConfig, mechanism: str) -> ModelConfig:
    if hasattr(model, "mechanism"):
        return replace(model, mechanism=mechanism)
    if mechanism != "standard":
        raise UsageError(f"{type(model).__name__} has no mechanism, got {mechanism!r}: use standard")
    return model


def _count_parameters(model: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(model).parameters())


def _refuse_small_corpus(corpus: Corpus) -> None:
    if (documents := len(corpus.validation.documents)) < 2:
        more = "use more text, or shorter documents" if corpus.task is None else "set validation=N of the task"
        raise UsageError(f"{corpus.name} has {documents} held-out documents, at least 2 are needed: {more}")


def _refuse_context(spec: ExperimentSpec, corpus: Corpus) -> None:
    if corpus.context is not None and spec.context not in (None, corpus.context):
        raise UsageError(
            f"the instances of {corpus.name} have {corpus.context} tokens, got a context length of {spec.context}: "
            f"leave it out, or set length={spec.context} of the task"
        )


def _at_least_two_documents(held_out: Split, limit: int | None) -> int | None:
    """The limit, doubled until two whole documents fit."""
    while limit is not None:
        if len({window.document for window in windows(held_out, context=2**20, limit=limit)}) > 1:
            return limit
        limit = 2 * limit if 2 * limit < len(held_out.tokens) else None
    return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
