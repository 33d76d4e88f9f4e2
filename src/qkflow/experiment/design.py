"""The design of an experiment: written before the first run and never edited. All runs follow from it.

STUDY/
  design.json              this
  decisions.jsonl          the decisions of each round, and checksums (`decisions`)
  corpus.json              statistics and excerpts of the data
  tuning/ARM/lr-0.003/     one run folder per learning rate, if there is more than one
  tuning.json              the learning rates that each arm tried, for people
  runs/ARM/seed-0/         one run folder per arm and seed
  lock                     held by the process that runs the experiment
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, cast

import torch

from qkflow.config import from_dict, to_dict
from qkflow.data import Corpus, CorpusConfig, open_corpus
from qkflow.data.recall import format_recall_spec, is_recall_task, parse_recall_spec
from qkflow.data.tasks import TaskConfig, open_task
from qkflow.errors import UsageError
from qkflow.experiment.budget import (
    DEFAULT_BUDGET,
    EVALUATIONS,
    TUNING_EVALUATIONS,
    TUNING_FACTORS,
    MatchedArm,
    SizedArms,
    choose_budget,
    evaluation_tokens,
    measure_speeds,
    n_rates,
    tuning_steps,
)
from qkflow.experiment.decisions import Decisions, Round
from qkflow.experiment.executors.base import Executor
from qkflow.experiment.spec import MOST_SEEDS, Device, ExperimentSpec, parse_arm, refuse_duplicate_arms
from qkflow.experiment.stats.rounds import PRIOR, Rule, plan_rounds
from qkflow.io import checksum, write_json
from qkflow.training import TrainConfig
from qkflow.training.budget import Speed
from qkflow.training.config import ModelConfig
from qkflow.training.losses import open_objective
from qkflow.training.regime import Regime, default_regime
from qkflow.training.reproducibility import pick_device
from qkflow.training.run_dir import finished, read_json
from qkflow.training.step import build_model

FORMAT = 3
TUNING_SEED = 10**6
"""The seed of every tuning run; no other run has it."""
_MOST_JOBS = 4096
_FOLDER = re.compile(r"[A-Za-z0-9=+,_-][A-Za-z0-9=+,._-]{0,99}")
_FEWEST_SEEDS = 2
RECALL_RATE = 3e-3
"""The learning rate of recall tasks, which are trained with AdamW."""
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
    rates: tuple[float, ...]
    """Learning rates. If there is more than one, tuning chooses."""
    steps: int
    """Steps per run."""
    tuning_steps: int
    """Steps per tuning run; 0 if there is one learning rate."""
    seconds_per_step: float | None
    """Measured before the experiment with all concurrent runs; None if nothing depended on it."""

    def __post_init__(self) -> None:
        if not _FOLDER.fullmatch(self.folder):
            raise UsageError(f"the arm {self.name!r} has the folder {self.folder!r}: expected a plain folder name")
        for name, least in (
            ("steps", 1),
            ("parameters", 1),
            ("tuning_steps", 0),
            ("flops_per_token", 0),
            ("state_bytes", 0),
        ):
            if (value := getattr(self, name)) < least:
                raise UsageError(f"the arm {self.name!r} has {name} = {value}: expected at least {least}")
        if not self.rates or not all(0 < rate < math.inf for rate in self.rates):
            raise UsageError(f"the arm {self.name!r} needs learning rates above 0, got {self.rates}")
        if self.seconds_per_step is not None and not 0 < self.seconds_per_step < math.inf:
            raise UsageError(f"the arm {self.name!r} has {self.seconds_per_step} seconds per step: expected above 0")

    @property
    def step_cost(self) -> float:
        """The relative cost of a step: seconds, or FLOPs, or 1."""
        return self.seconds_per_step or float(self.flops_per_token) or 1.0


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
    rule: Rule
    """How many seeds each round has, and how verdicts are decided. All arms share the seeds `first_seed`, `first_seed +
    1`, ... for initialization and for the data."""
    first_seed: int
    base: TrainConfig
    """What all runs share. `planned_runs` sets model, steps, evaluations, seeds and learning rate."""
    jobs: int
    """Concurrent runs."""
    budget: float | None
    """Seconds after which no further round starts; None: there is no limit."""
    expected_seconds: float | None
    """Expected time of all runs, if no arm is decided early; None if nothing was measured."""
    unit: str = "byte"
    """What losses are per: a byte of text, or an answer token of a recall task, or an answer of a task."""
    format: int = FORMAT
    """Version of this file."""

    def __post_init__(self) -> None:
        if tuple(arm.name for arm in self.arms) != self.spec.arms:
            raise UsageError("the arms of the design are not those of its spec")
        if len({arm.folder.casefold() for arm in self.arms}) < len(self.arms):
            raise UsageError("two arms of the design share a folder")
        if not 0 <= self.first_seed < TUNING_SEED - MOST_SEEDS:
            raise UsageError(f"first_seed must be from 0 to {TUNING_SEED - MOST_SEEDS - 1}, got {self.first_seed}")
        if self.seeds > MOST_SEEDS:
            raise UsageError(f"a design has at most {MOST_SEEDS} seeds, got {self.seeds}")
        if (self.rule.error_rate, self.rule.margin) != (self.spec.error_rate, self.spec.margin):
            raise UsageError("the error rate and the margin of the rule are not those of the spec")
        if not 1 <= self.jobs <= _MOST_JOBS:
            raise UsageError(f"jobs must be from 1 to {_MOST_JOBS}, got {self.jobs}")
        for name in ("budget", "expected_seconds"):
            if (value := getattr(self, name)) is not None and not 0 <= value < math.inf:
                raise UsageError(f"{name} must be a finite number of seconds, got {value}")

    @property
    def seeds(self) -> int:
        """The most runs per arm."""
        return self.rule.seeds_by_round[-1]

    def arm(self, name: str) -> ArmDesign:
        """The arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)

    def round(self, number: int, arms: Sequence[str], done: int) -> Round:
        """A round, counted from 1, of these arms, after rounds with `done` seeds; the rule gives its last seed."""
        seeds = range(self.first_seed + done, self.first_seed + self.rule.seeds_by_round[number - 1])
        return Round(number=number, arms=tuple(arms), seeds=tuple(seeds))

    @property
    def tuned(self) -> bool:
        """Whether arms choose among several learning rates."""
        return any(len(arm.rates) > 1 for arm in self.arms)

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
    lr: float
    """The learning rate; 0 if tuning has failed."""
    config: TrainConfig | None
    """None if tuning has failed."""

    @property
    def name(self) -> str:
        """For messages: `standard seed 3`, or `standard lr-0.003`."""
        return f"{self.arm} {self.folder.name.replace('seed-', 'seed ')}"


def make_design(
    spec: ExperimentSpec, executor: Executor, *, notice: Callable[[str], None], command: Sequence[str] = ()
) -> Design:
    """The design of a new experiment."""
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
            rates=_arm_rates(spec, arm, choice.arms, is_text=corpus.task is None),
            steps=steps,
            tuning_steps=tuning_steps(steps) if n_rates(spec) > 1 else 0,
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
        rule=plan_rounds(
            choice.seeds,
            is_limited=spec.seeds is not None,
            error_rate=spec.error_rate,
            margin=spec.margin,
            prior=PRIOR if corpus.task is None else None,  # the spread was calibrated on text
        ),
        first_seed=spec.first_seed,
        base=base,
        jobs=jobs,
        budget=spec.budget or (DEFAULT_BUDGET if spec.tokens is None else None),
        expected_seconds=choice.seconds,
        unit=corpus.unit,
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
                rates=spec.learning_rates or (base.lr,),
                steps=base.steps,
                tuning_steps=base.steps if n_rates(spec) > 1 else 0,
                seconds_per_step=None,
            )
            for name, folder, model in zip(spec.arms, folder_names(spec.arms), models, strict=True)
        ),
        rule=Rule(error_rate=spec.error_rate, margin=spec.margin, seeds_by_round=(seeds,), spending=(1.0,)),
        first_seed=spec.first_seed,
        base=base,
        jobs=spec.jobs or max(1, min(runs, sum(executor.cores()) // (base.threads or 1))),
        budget=None,
        expected_seconds=None,
        unit="answer token" if task.kind == "generation" else "answer",
    )


def tuning_runs(design: Design) -> tuple[PlannedRun, ...]:
    """The runs that tune the learning rates, the most expensive arm first; none if there is nothing to tune."""
    return tuple(
        _tuning_run(design, arm, arm.rates[index])
        for index in range(max(len(arm.rates) for arm in design.arms))
        for arm in _by_cost(design)
        if 1 < len(arm.rates) > index
    )


def round_runs(design: Design, round_: Round, rates: Mapping[str, float]) -> tuple[PlannedRun, ...]:
    """The runs of a round, seed by seed, the most expensive arm first.

    `rates` are the learning rates of the arms. The runs of other arms have no config.
    """
    arms = [arm for arm in _by_cost(design) if arm.name in round_.arms]
    return tuple(_main_run(design, arm, seed, rates.get(arm.name)) for seed in round_.seeds for arm in arms)


def _by_cost(design: Design) -> list[ArmDesign]:
    return sorted(design.arms, key=lambda arm: -arm.steps * arm.step_cost)


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
    """For each arm, the final validation loss of each learning rate it tried, in the order given.

    None if the run failed or is not finished. Empty if there is one learning rate.
    """
    losses: dict[str, dict[float, float | None]] = {arm.name: {} for arm in design.arms}
    for run in tuning_runs(design):
        result = finished(study / run.folder)
        bits = math.inf if result is None else float(result.metrics["bits_per_byte"])
        losses[run.arm][run.lr] = bits if math.isfinite(bits) else None
    return losses


def best_rates(design: Design, losses: Mapping[str, Mapping[float, float | None]]) -> dict[str, float]:
    """The learning rate of each arm's runs: the only one, or the best that it tried, the smaller of two equal ones.

    An arm whose tuning runs all failed is missing.
    """
    rates = {arm.name: arm.rates[0] for arm in design.arms if len(arm.rates) == 1}
    for arm, tried in losses.items():
        if finite := [(bits, rate) for rate, bits in tried.items() if bits is not None]:
            rates[arm] = min(finite)[1]
    return rates


def write_tuning(study: Path, losses: Mapping[str, Mapping[float, float | None]], rates: Mapping[str, float]) -> None:
    """Write tuning.json for people; the program does not read it."""
    table = {
        arm: {
            "chosen": rates.get(arm),
            "tried": [{"lr": rate, "bits_per_byte": bits} for rate, bits in tried.items()],
        }
        for arm, tried in losses.items()
    }
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
    baseline = arms.arms[0]
    is_text = corpus.task is None
    held_out = corpus.test if is_text else corpus.validation
    during, final = evaluation_tokens(steps * arms.step_tokens, arms.context, len(held_out.tokens))
    base = TrainConfig(
        data=spec.data,
        model=baseline.model,
        steps=steps,
        context=arms.context,
        batch=arms.batch,
        schedule="stable",
        evaluate_tokens=during,
        final_tokens=final,
        final_split="test" if is_text else "validation",
        log_every=max(1, min(10, steps // 100)),
        checkpoint_every=None,
        checkpoint_minutes=1.0 if arms.parameters < _LARGE else 10.0,
        device=device,
        threads=threads,
    )
    if is_text:
        regime = _regime(spec, baseline, arms)
        base = replace(base, optimizer=regime.optimizer, betas=regime.betas, decay=regime.decay, floor=regime.floor)
    rate = _arm_rates(spec, baseline, arms, is_text=is_text)[0]
    return run_config(base, baseline.name, baseline.model, steps, 0, rate)


def _arm_rates(spec: ExperimentSpec, arm: MatchedArm, arms: SizedArms, *, is_text: bool) -> tuple[float, ...]:
    """The learning rates of an arm: those given, or the default of its mechanism, or those around it to be tuned."""
    if spec.learning_rates is not None:
        return spec.learning_rates
    default = _regime(spec, arm, arms).lr if is_text else RECALL_RATE
    factors = TUNING_FACTORS if n_rates(spec) > 1 else (1.0,)
    return tuple(float(f"{factor * default:.3g}") for factor in factors)


def _regime(spec: ExperimentSpec, arm: MatchedArm, arms: SizedArms) -> Regime:
    return default_regime(
        parameters=arm.parameters,
        batch=arms.batch,
        context=arms.context,
        mechanism=parse_arm(arm.name).mechanism,
        optimizer=spec.optimizer,
    )


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
    path = study / "design.json"
    data = read_json(path)
    if data.get("format") != FORMAT:
        raise UsageError(f"{path} has format {data.get('format')!r}, expected {FORMAT}")
    try:
        return from_dict(Design, data)
    except (UsageError, ValueError, OverflowError) as error:  # an integer may be too large for a float
        raise UsageError(f"{path}: {error}") from error


def read_decisions(study: Path, design: Design) -> Decisions:
    """The decisions of a study; `UsageError` if they are not those of its design, or the design was changed."""
    decisions, path = Decisions(study), study / "design.json"
    if not decisions.records:  # killed after writing the design
        if any((study / name).exists() for name in ("runs", "tuning")):
            raise UsageError(f"{decisions.path} is missing: restore it from a copy, or start a new study")
        return decisions
    if decisions.records[0].get("sha256_design") != checksum(path):
        raise UsageError(
            f"{path} was changed after the study was started: restore it from a copy, or start a new study"
        )
    names, done = design.spec.arms, 0
    for number, round_ in enumerate(decisions.rounds(), 1):
        arms = tuple(name for name in names if name in round_.arms)
        if number > len(design.rule.seeds_by_round) or names[0] not in arms:
            raise UsageError(f"{decisions.path}: round {number} does not follow the design")
        planned = design.round(number, arms, done)
        if round_ != replace(planned, seeds=planned.seeds[: len(round_.seeds)]):  # a round may be cut short by time
            raise UsageError(f"{decisions.path}: round {number} does not follow the design")
        done += len(round_.seeds)
    for arm, rate in decisions.rates().items():
        if arm not in names or rate not in design.arm(arm).rates:
            raise UsageError(f"{decisions.path}: the learning rate {rate} of {arm!r} is not in the design")
    judged = decisions.of_kind("verdicts")
    if [record["round"] for record in judged] != list(range(1, len(judged) + 1)) or len(judged) > len(
        decisions.rounds()
    ):
        raise UsageError(f"{decisions.path}: the verdicts are not those of its rounds")
    for verdict in decisions.verdicts().values():
        if verdict.arm not in names[1:]:
            raise UsageError(f"{decisions.path}: there is no arm {verdict.arm!r} in the design")
    return decisions


def refuse_links(study: Path) -> None:
    """Raise `UsageError` if a link in a study's folder leads out of it: nothing is written elsewhere."""
    for folder, folders, files in os.walk(study):
        for path in (Path(folder, name) for name in (*folders, *files)):
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(study)):
                raise UsageError(f"{path} leads out of {study}: remove the link")


def _tuning_run(design: Design, arm: ArmDesign, rate: float) -> PlannedRun:
    evaluations = TUNING_EVALUATIONS if design.spec.base is None else None
    base = _tuning_base(design.base)
    config = run_config(base, arm.name, arm.model, arm.tuning_steps, TUNING_SEED, rate, evaluations=evaluations)
    folder = Path("tuning", arm.folder, f"lr-{rate!r}")
    return PlannedRun(
        arm=arm.name, seed=TUNING_SEED, kind="tuning", folder=folder, steps=arm.tuning_steps, lr=rate, config=config
    )


def _tuning_base(base: TrainConfig) -> TrainConfig:
    """The base config for tuning, which must not see what verdicts are based on.

    For text, that is the test documents. The instances of a recall task are generated: tuning has its own.
    """
    base = replace(base, final_split="validation", warmup=None)
    if isinstance(base.data, CorpusConfig) and is_recall_task(base.data.source):
        task = parse_recall_spec(base.data.source)
        own = format_recall_spec(replace(task, seed=task.seed + TUNING_SEED))
        return replace(base, data=replace(base.data, source=own))
    return base


def _main_run(design: Design, arm: ArmDesign, seed: int, rate: float | None) -> PlannedRun:
    evaluations = EVALUATIONS if design.spec.base is None else None
    config = None
    if rate is not None:
        config = run_config(design.base, arm.name, arm.model, arm.steps, seed, rate, evaluations=evaluations)
    folder = Path("runs", arm.folder, f"seed-{seed}")
    return PlannedRun(
        arm=arm.name, seed=seed, kind="main", folder=folder, steps=arm.steps, lr=rate or 0.0, config=config
    )


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


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
