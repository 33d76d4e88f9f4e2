"""Two small tasks made by hand: one sign in a text says which class it is, or which answer is to be written."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from qkflow.data.tasks import Instance, Task, TaskConfig
from qkflow.models import ClassifierConfig, DecoderConfig
from qkflow.ops.csrc import build
from qkflow.training.tasks import TaskRunConfig

WORDS = ("<pad>", "<ask>", *"abcdefgh", "<no>", "<yes>", "<end>")
END = WORDS.index("<end>")


def classified(count: int, seed: int) -> tuple[Instance, ...]:
    source, found = random.Random(seed), []
    for number in range(count):
        text = [source.randint(2, 9) for _ in range(source.randint(2, 6))]
        place, label = source.randrange(len(text)), number % 2
        text[place] = 10 + label
        found.append(Instance(tokens=(*text, 1), label=label, rationale=(place,), protected=(len(text),)))
    return tuple(found)


def written(count: int, seed: int) -> tuple[Instance, ...]:
    source, found = random.Random(seed), []
    for _ in range(count):
        text = tuple(source.randint(2, 9) for _ in range(source.randint(2, 6)))
        answer = text[: source.randint(1, 2)]
        found.append(
            Instance(tokens=(*text, 1), label=answer[0], rationale=tuple(range(len(answer))), answer=(*answer, END))
        )
    return tuple(found)


@pytest.fixture(scope="session")
def signs() -> Task:
    """Which of two signs is in the text?"""
    return Task(
        name="signs",
        kind="classification",
        words=WORDS,
        classes=("no", "yes"),
        train=classified(24, 0),
        validation=classified(8, 1),
        test=classified(8, 2),
    )


@pytest.fixture(scope="session")
def copies() -> Task:
    """Write the first word, or two, of the text."""
    return Task(
        name="copies",
        kind="generation",
        words=WORDS,
        classes=WORDS,
        train=written(24, 0),
        validation=written(8, 1),
        test=written(8, 2),
    )


@pytest.fixture(scope="session")
def kernels() -> None:
    """Those of the suite's own cache, which may be built already: a test's own cache is empty."""
    build.load()


@pytest.fixture
def run() -> Callable[..., TaskRunConfig]:
    """Makes a config of five steps of a classifier; what is not said is small."""

    def make(**changes: Any) -> TaskRunConfig:
        shape = ClassifierConfig(width=8, layers=1, heads=2, vocabulary=len(WORDS), classes=2)
        small: dict[str, Any] = {"task": TaskConfig(), "model": shape, "steps": 5, "lr": 0.05, "batch": 7}
        return TaskRunConfig(**{**small, **changes})

    return make


@pytest.fixture
def decoder() -> DecoderConfig:
    return DecoderConfig(width=8, layers=1, heads=2, hidden=12, vocabulary=len(WORDS))
