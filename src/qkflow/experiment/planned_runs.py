"""The runs of a design: their folders and configs, and the learning rates that tuning chooses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from qkflow.data import CorpusConfig
from qkflow.data.recall import format_recall_spec, is_recall_task, parse_recall_spec
from qkflow.experiment.budget import EVALUATIONS, TUNING_EVALUATIONS
from qkflow.experiment.decisions import Round
from qkflow.experiment.design import TUNING_SEED, ArmDesign, Design
from qkflow.experiment.spec import parse_arm
from qkflow.io import write_json
from qkflow.training import TrainConfig
from qkflow.training.config import ModelConfig
from qkflow.training.run_dir import finished


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
    """Write tuning.json, which is for the user: qkflow does not read it."""
    table = {
        arm: {
            "chosen": rates.get(arm),
            "tried": [{"lr": rate, "loss": bits} for rate, bits in tried.items()],
        }
        for arm, tried in losses.items()
    }
    write_json(study / "tuning.json", table)
