"""A small task made by hand, requests for tiny studies of it, and what they leave behind."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qkflow.data.tasks import Instance, Task, TaskConfig
from qkflow.experiment.sharpen.design import SharpenDesign, design
from qkflow.experiment.sharpen.request import RationaleRequest
from qkflow.experiment.sharpen.run import run_sharpen

SENTINEL = "xyzzyword"


def texts(count: int, seed: int) -> tuple[Instance, ...]:
    """One sign in each says the class; every fifth does not tell where it is."""
    source, found = random.Random(seed), []
    for number in range(count):
        text = [source.randint(2, 9) for _ in range(source.randint(2, 6))]
        place, label = source.randrange(len(text)), number % 2
        text[place] = 10 + label
        rationale = () if number % 5 == 4 else (place,)
        kind = "long" if len(text) > 4 else "short"
        found.append(Instance(tokens=(*text, 1), label=label, rationale=rationale, protected=(len(text),), kind=kind))
    return tuple(found)


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
def ask() -> Callable[..., RationaleRequest]:
    """Makes a request for a study of two arms, two seeds and three steps; what is not said is small."""

    def make(**changes: Any) -> RationaleRequest:
        small: dict[str, Any] = {
            "task": TaskConfig(data="pairs.jsonl"),  # no file: the task is made already
            "ratios": (1.0, 20.0),
            "seeds": 2,
            "rates": (0.01,),
            "steps": 3,
            "batch": 8,
            "jobs": 1,
        }
        return RationaleRequest(**{**small, **changes})

    return make


@pytest.fixture
def finished(
    ask: Callable[..., RationaleRequest], task: Task, inline: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Path], SharpenDesign]:
    """Puts a study of two arms, two seeds and two learning rates, which is made once, into a folder."""

    def put(study: Path) -> SharpenDesign:
        made = tmp_path_factory.getbasetemp() / "finished"
        if not made.exists():
            run_sharpen(ask(rates=(0.01, 0.02)), task, made, engine=inline())
        shutil.copytree(made, study, dirs_exist_ok=True)
        return design(ask(rates=(0.01, 0.02)), task)

    return put


@pytest.fixture
def left() -> Callable[[Path], dict[str, bytes]]:
    """Reads every file of a study but its lock."""

    def read(study: Path) -> dict[str, bytes]:
        files = sorted(path for path in study.rglob("*") if path.is_file() and path.name != "lock")
        return {str(path.relative_to(study)): path.read_bytes() for path in files}

    return read
