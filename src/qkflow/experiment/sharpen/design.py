"""The design of a study of sharper attention: fixed before the first run, and written down."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qkflow.config import to_dict
from qkflow.data.tasks import Task
from qkflow.errors import UsageError
from qkflow.experiment.sharpen.presets import Preset, model_for, preset_for
from qkflow.experiment.sharpen.request import ArmDesign, RationaleRequest, arms
from qkflow.io import write_json
from qkflow.training.tasks import TaskRunConfig

LEVEL = 0.95
_TUNING_SEED = 10_007
"""Tuning runs share a seed that no run of the study has."""
_EXAMPLES = 6
_POINTS = 16


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run to be made."""

    arm: str
    folder: Path
    """Inside the study."""
    config: TaskRunConfig
    tuning: bool


@dataclass(frozen=True, kw_only=True)
class SharpenDesign:
    """Everything a study is a function of, besides the task's content."""

    request: RationaleRequest
    preset: Preset
    task: str
    digest: str
    base: TaskRunConfig
    """The baseline's config at its first learning rate; arms differ from it in how fast what learns."""
    arms: tuple[ArmDesign, ...]
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    moments: tuple[int, ...]
    """Steps at which validation instances are looked at."""
    examples: tuple[int, ...]
    """Test instances that are shown."""

    def record(self) -> dict[str, Any]:
        """The design as plain data."""
        return to_dict(self)

    def tuning_jobs(self) -> list[PlannedRun]:
        """Every arm with every learning rate, where there are several."""
        if len(self.rates) < 2:
            return []
        return [
            PlannedRun(
                arm=arm.name,
                folder=Path("tuning") / f"{_slug(arm.name)}-lr{rate:g}",
                config=self._config(arm, rate, _TUNING_SEED),
                tuning=True,
            )
            for rate in self.rates
            for arm in self.arms
        ]

    def main_jobs(self, chosen: Mapping[str, float]) -> list[PlannedRun]:
        """Every arm that found a learning rate with every seed; all arms of a seed, then the next."""
        return [
            PlannedRun(
                arm=arm.name,
                folder=Path("runs") / f"{_slug(arm.name)}-seed{seed}",
                config=self._config(arm, chosen[arm.name], seed),
                tuning=False,
            )
            for seed in self.seeds
            for arm in self.arms
            if arm.name in chosen
        ]

    def _config(self, arm: ArmDesign, rate: float, seed: int) -> TaskRunConfig:
        return replace(
            self.base,
            lr=rate,
            qk_ratio=arm.ratio,
            qk_growth=arm.growth,
            embedding_ratio=arm.embeddings,
            seed=seed,
            data_seed=seed,
        )


def design(request: RationaleRequest, task: Task) -> SharpenDesign:
    """The design that follows from a request and its task."""
    preset = preset_for(request.task)
    rates = preset.rates if request.rates is None else request.rates
    steps = request.steps or preset.steps
    return SharpenDesign(
        request=request,
        preset=preset,
        task=task.name,
        digest=task.digest,
        base=TaskRunConfig(
            task=request.task,
            model=model_for(request, task),
            steps=steps,
            lr=rates[0],
            batch=request.batch or preset.batch,
            optimizer=preset.optimizer,
            momentum=preset.momentum,
            clip=preset.clip,
        ),
        arms=arms(request, published=preset.published_arm),
        rates=rates,
        seeds=tuple(range(request.seeds)),
        moments=tuple(sorted({round(steps * (n / _POINTS) ** 1.5) for n in range(_POINTS + 1)})),
        examples=_examples(task) if task.is_quotable else (),
    )


def write_design(study: Path, made: SharpenDesign) -> None:
    """Put the design on record, if it is not there already."""
    if not (study / "design.json").exists():
        write_json(study / "design.json", made.record())


def refuse_foreign(study: Path, made: SharpenDesign) -> None:
    """Raise `UsageError` where the folder holds another study, or something else."""
    path = study / "design.json"
    if study.exists() and not study.is_dir():
        raise UsageError(f"{study} is a file: choose a folder for the study")
    if not path.exists():
        there = [one.name for one in study.iterdir()] if study.exists() else []
        if foreign := sorted(name for name in there if name != "lock" and not name.endswith(".tmp")):
            raise UsageError(f"{study} holds other things ({foreign[0]}) and no study: choose another folder")
        return
    try:
        there, here = json.loads(path.read_text()), json.loads(json.dumps(made.record()))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({error}): choose another folder") from error
    if changed := _changed(there, here):
        raise UsageError(f"{study} holds a study of another design (other {', '.join(changed)}): choose another folder")


def _changed(there: Any, here: dict[str, Any]) -> list[str]:
    """What two designs differ in: parts of their requests, or of what came of them; runs at a time change nothing."""
    if not isinstance(there, dict) or not isinstance(there.get("request"), dict):
        return ["format"]
    for one, other in (
        ({**there["request"], "jobs": None}, {**here["request"], "jobs": None}),
        ({**there, "request": None}, {**here, "request": None}),
    ):
        if changed := sorted(name for name in {*one, *other} if one.get(name) != other.get(name)):
            return changed
    return []


def _examples(task: Task) -> tuple[int, ...]:
    """Test instances with a rationale, of as many kinds as there are, in the order of the test set."""
    found: dict[str, list[int]] = {}
    for place, one in enumerate(task.test):
        if one.rationale:
            found.setdefault(one.kind, []).append(place)
    kinds, picked = list(found.values()), []
    for turn in range(_EXAMPLES):
        picked += [places[turn] for places in kinds if turn < len(places)]
    return tuple(sorted(picked[:_EXAMPLES]))


def _slug(name: str) -> str:
    return re.sub(r"[^\w.+]+", "-", name.replace(" = ", "")).strip("-")
