"""A small task, and experiments on it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qkflow.data.tasks import Instance, Task, TaskConfig
from qkflow.experiment import planner, presets, runner, study_dir
from qkflow.experiment.metrics import measurement
from qkflow.experiment.presets import sharpen_spec
from qkflow.experiment.runner import run_experiment
from qkflow.experiment.spec import ExperimentSpec
from qkflow.training import losses

SENTINEL = "xyzzyword"


def texts(count: int, seed: int) -> tuple[Instance, ...]:
    """One token determines the class; every fifth instance has no rationale."""
    source, instances = random.Random(seed), []
    for number in range(count):
        text = [source.randint(2, 9) for _ in range(source.randint(2, 6))]
        position, label = source.randrange(len(text)), number % 2
        text[position] = 10 + label
        rationale = () if number % 5 == 4 else (position,)
        kind = "long" if len(text) > 4 else "short"
        instance = Instance(tokens=(*text, 1), label=label, rationale=rationale, protected=(len(text),), kind=kind)
        instances.append(instance)
    return tuple(instances)


@pytest.fixture(scope="session")
def task() -> Task:
    """Which of two signs is in the text?"""
    return Task(
        name="signs",
        kind="classification",
        words=("<pad>", "<ask>", SENTINEL, *"bcdefgh", "<no>", "<yes>"),
        classes=("negative", "affirmative"),
        train=texts(24, 0),
        validation=texts(6, 1),
        test=texts(12, 2),
        skipped={"too long": 3},
    )


@pytest.fixture
def use_task(monkeypatch: pytest.MonkeyPatch) -> Callable[[Task], None]:
    """Makes every `open_task` return a task."""

    def use(task: Task) -> None:
        measurement._open.cache_clear()
        for module in (planner, presets, runner, study_dir, measurement, losses):
            monkeypatch.setattr(module, "open_task", lambda config: task)

    return use


@pytest.fixture
def spec_of(task: Task, use_task: Callable[[Task], None]) -> Callable[..., ExperimentSpec]:
    """Makes the spec of an experiment with two arms, two seeds and three steps."""
    use_task(task)

    def make(data: TaskConfig | None = None, **changes: Any) -> ExperimentSpec:
        small = {"ratios": (1.0, 20.0), "seeds": 2, "rates": (0.01,), "steps": 3, "batch": 8, "jobs": 1}
        spec = sharpen_spec(data or TaskConfig(data="pairs.jsonl"), **{**small, **changes})
        return replace(spec, base=replace(spec.base, log_every=1))

    return make


@pytest.fixture
def finished(
    spec_of: Callable[..., ExperimentSpec], inline: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Path], ExperimentSpec]:
    """Copies a finished study of two arms, two seeds and two learning rates into a folder."""

    def put(study: Path) -> ExperimentSpec:
        spec = spec_of(rates=(0.01, 0.02))
        source = tmp_path_factory.getbasetemp() / "finished"
        if not source.exists():
            run_experiment(spec, source, executor=inline())
        shutil.copytree(source, study, dirs_exist_ok=True)
        return spec

    return put
