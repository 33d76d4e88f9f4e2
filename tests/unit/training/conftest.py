"""Fixtures of the training tests: a small corpus, a separate cache, one thread, and small configs."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qkflow.data import Corpus, CorpusConfig, open_corpus
from qkflow.data.tasks import Instance, Task, TaskConfig
from qkflow.errors import Interrupted
from qkflow.models import ClassifierConfig, DecoderConfig
from qkflow.training import Callback, Result, Run, TrainConfig, task_defaults, train

Configure = Callable[..., TrainConfig]
TASK = "mqar:pairs=1+4,length=16,keys=6,values=3,train=60,validation=12,each=6"


class Watcher(Callback):
    """Records all events, and optionally acts on the model after a step."""

    def __init__(self, act: Callable[[int, nn.Module], None] = lambda step, model: None) -> None:
        self.events: list[tuple[str, Any]] = []
        self.act = act

    def on_start(self, run: Run) -> None:
        self.model = run.model
        self.events.append(("start", run.step))

    def on_step(self, record: Mapping[str, Any]) -> None:
        self.events.append(("step", record["step"]))
        self.act(record["step"], self.model)

    def on_evaluate(self, record: Mapping[str, Any]) -> None:
        self.events.append(("evaluate", record["step"]))

    def on_checkpoint(self, path: Path) -> None:
        self.events.append(("checkpoint", int(path.name[5:])))

    def on_notice(self, text: str) -> None:
        self.events.append(("notice", text))

    def on_end(self, result: Result) -> None:
        self.events.append(("end", result.step))

    @property
    def notices(self) -> list[str]:
        return [text for kind, text in self.events if kind == "notice"]


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sixty short documents."""
    folder = tmp_path_factory.mktemp("training") / "texts"
    folder.mkdir()
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefgh", k=generator.randint(2, 6))) for _ in range(50)]
    for number in range(60):
        (folder / f"{number}.txt").write_text(" ".join(generator.choices(words, k=generator.randint(20, 60))))
    return folder


@pytest.fixture(autouse=True)
def _isolate(texts: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("QKFLOW_CACHE", str(texts.parent / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def corpus(texts: Path) -> Corpus:
    return open_corpus(CorpusConfig(source=str(texts)))


@pytest.fixture
def configure(texts: Path) -> Configure:
    """Returns a config with small defaults."""

    def make(*, model: dict[str, Any] | None = None, **changes: Any) -> TrainConfig:
        shape = {"width": 16, "layers": 2, "heads": 2, "hidden": 32, **(model or {})}
        small = {"steps": 4, "context": 16, "batch": 4, "log_every": 1, "evaluate_tokens": 300, "device": "cpu"}
        return TrainConfig(data=CorpusConfig(source=str(texts)), model=DecoderConfig(**shape), **{**small, **changes})

    return make


@pytest.fixture
def task_configure(configure: Configure) -> Configure:
    """Returns a config for a small recall task with different numbers of questions per instance."""

    def make(*, spec: str = TASK, model: dict[str, Any] | None = None, **changes: Any) -> TrainConfig:
        corpus = CorpusConfig(source=spec)
        data = open_corpus(corpus)
        shape = {"vocabulary": data.vocabulary, **(model or {})}
        config = configure(**{"model": shape, "context": data.context, **changes})
        return dataclasses.replace(config, data=corpus)

    return make


@pytest.fixture
def watcher() -> type[Watcher]:
    return Watcher


@pytest.fixture
def at() -> Callable[..., Watcher]:
    """Returns a watcher that acts on the model after a step."""

    def make(step: int, act: Callable[[nn.Module], None]) -> Watcher:
        return Watcher(lambda now, model: act(model) if now == step else None)

    return make


@pytest.fixture
def stop_at(at: Callable[..., Watcher]) -> Callable[[int], Watcher]:
    """Returns a watcher that stops the process with SIGTERM after a step."""
    return lambda step: at(step, lambda model: os.kill(os.getpid(), signal.SIGTERM))


@pytest.fixture
def stopped_run(stop_at: Callable[[int], Watcher]) -> Callable[..., Path]:
    """Returns the folder of a run that was stopped after a step."""

    def make(config: TrainConfig, folder: Path, step: int) -> Path:
        with pytest.raises(Interrupted):
            train(config, folder, callbacks=[stop_at(step)])
        return folder

    return make


TASK_WORDS = ("<pad>", "<ask>", *"abcdefgh", "<no>", "<yes>", "<end>")


def sign_instances(count: int, seed: int) -> tuple[Instance, ...]:
    """Texts with one of two signs, which decides the class."""
    generator, instances = random.Random(seed), []
    for number in range(count):
        text = [generator.randint(2, 9) for _ in range(generator.randint(2, 6))]
        position, label = generator.randrange(len(text)), number % 2
        text[position] = 10 + label
        instances.append(Instance(tokens=(*text, 1), label=label, rationale=(position,)))
    return tuple(instances)


def copy_instances(count: int, seed: int) -> tuple[Instance, ...]:
    """Texts whose first one or two words are the answer."""
    generator, end, instances = random.Random(seed), TASK_WORDS.index("<end>"), []
    for _ in range(count):
        text = tuple(generator.randint(2, 9) for _ in range(generator.randint(2, 6)))
        answer = text[: generator.randint(1, 2)]
        rationale = tuple(range(len(answer)))
        instances.append(Instance(tokens=(*text, 1), label=answer[0], rationale=rationale, answer=(*answer, end)))
    return tuple(instances)


@pytest.fixture(scope="session")
def sign_task() -> Task:
    """A classification task."""
    train, validation, test = sign_instances(24, 0), sign_instances(8, 1), sign_instances(8, 2)
    splits = {"train": train, "validation": validation, "test": test}
    return Task(name="signs", kind="classification", words=TASK_WORDS, classes=("no", "yes"), **splits)


@pytest.fixture(scope="session")
def copy_task() -> Task:
    """A generation task."""
    train, validation, test = copy_instances(24, 0), copy_instances(8, 1), copy_instances(8, 2)
    splits = {"train": train, "validation": validation, "test": test}
    return Task(name="copies", kind="generation", words=TASK_WORDS, classes=TASK_WORDS, **splits)


@pytest.fixture(scope="session")
def answer_decoder() -> DecoderConfig:
    return DecoderConfig(width=8, layers=1, heads=2, hidden=12, vocabulary=len(TASK_WORDS))


@pytest.fixture
def task_config() -> Configure:
    """Returns a config for five steps of a small classifier."""

    def make(**changes: Any) -> TrainConfig:
        model = ClassifierConfig(width=8, layers=1, heads=2, vocabulary=len(TASK_WORDS), classes=2)
        config = task_defaults(data=TaskConfig(), model=model, steps=5, lr=0.05)
        return replace(config, **{"batch": 7, "log_every": 1, **changes})

    return make
