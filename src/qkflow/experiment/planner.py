"""From a spec to a design: matches the arms, fits the budget, and chooses the training config."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import cast

import torch

from qkflow.data import Corpus, open_corpus
from qkflow.data.tasks import TaskConfig, open_task
from qkflow.errors import UsageError
from qkflow.experiment.budget import (
    DEFAULT_BUDGET,
    EVALUATIONS,
    TUNING_FACTORS,
    BudgetChoice,
    MatchedArm,
    SizedArms,
    choose_budget,
    evaluation_tokens,
    measure_speeds,
    n_rates,
    tuning_steps,
)
from qkflow.experiment.design import ArmDesign, Design
from qkflow.experiment.executors.base import Executor
from qkflow.experiment.planned_runs import run_config
from qkflow.experiment.spec import Device, ExperimentSpec, parse_arm, refuse_duplicate_arms
from qkflow.experiment.stats.prior import PRIOR, Prior
from qkflow.experiment.stats.rounds import Rule, plan_rounds
from qkflow.training import TrainConfig
from qkflow.training.budget import Speed
from qkflow.training.config import ModelConfig
from qkflow.training.losses import open_objective
from qkflow.training.regime import Regime, default_regime
from qkflow.training.reproducibility import pick_device
from qkflow.training.step import build_model

_FEWEST_SEEDS = 2
RECALL_RATE = 3e-3
"""The learning rate of recall tasks, which are trained with AdamW."""
_LARGE = 10_000_000
"""Parameters above which a checkpoint is too large to be written every minute."""


def make_design(
    spec: ExperimentSpec, executor: Executor, *, notice: Callable[[str], None], command: Sequence[str] = ()
) -> Design:
    """The design of a new experiment."""
    if spec.base is not None:
        return _preset_design(spec, spec.base, executor, command)
    if isinstance(spec.data, TaskConfig):
        raise UsageError(f"the task {spec.data.name} needs a training config")
    corpus = open_corpus(spec.data)
    for text in corpus.notices:
        notice(f"note: {text}")
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
    return Design(
        spec=spec,
        command=tuple(command),
        date=_now(),
        corpus=corpus.name,
        digest=corpus.digest,
        size=choice.arms.size,
        arms=_arm_designs(spec, choice, is_text=corpus.task is None),
        rule=_rule(spec, choice.seeds, prior=PRIOR if corpus.task is None else None),  # calibrated on text
        first_seed=spec.first_seed,
        base=base,
        jobs=jobs,
        budget=spec.budget or (DEFAULT_BUDGET if spec.tokens is None else None),
        expected_seconds=choice.seconds,
        unit=corpus.unit,
    )


def _rule(spec: ExperimentSpec, seeds: int, *, prior: Prior | None) -> Rule:
    if not spec.adaptive:
        return Rule(
            error_rate=spec.error_rate, margin=spec.margin, prior=prior, seeds_by_round=(seeds,), spending=(1.0,)
        )
    return plan_rounds(
        seeds, is_limited=spec.seeds is not None, error_rate=spec.error_rate, margin=spec.margin, prior=prior
    )


def _arm_designs(spec: ExperimentSpec, choice: BudgetChoice, *, is_text: bool) -> tuple[ArmDesign, ...]:
    return tuple(
        ArmDesign(
            name=arm.name,
            folder=folder,
            model=arm.model,
            parameters=arm.parameters,
            flops_per_token=arm.flops_per_token,
            state_bytes=arm.state_bytes,
            rates=_arm_rates(spec, arm, choice.arms, is_text=is_text),
            steps=steps,
            tuning_steps=tuning_steps(steps) if n_rates(spec) > 1 else 0,
            seconds_per_step=None if choice.speeds is None else choice.speeds[index].step,
        )
        for index, (arm, folder, steps) in enumerate(
            zip(choice.arms.arms, folder_names(spec.arms), choice.steps, strict=True)
        )
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
