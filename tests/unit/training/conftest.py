"""A small corpus of documents, a cache of its own, one thread, and a config that trains in a moment."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qkflow.data import Corpus, CorpusConfig, open_corpus
from qkflow.errors import Interrupted
from qkflow.models import DecoderConfig
from qkflow.ops.csrc import build
from qkflow.training import Callback, Result, Run, TrainConfig, train

Configure = Callable[..., TrainConfig]
TASK = "mqar:pairs=1+4,length=16,keys=6,values=3,train=60,validation=12,each=6"


class Watcher(Callback):
    """Keeps everything it is told, and does something at a step if asked to."""

    def __init__(self, act: Callable[[int, nn.Module], None] = lambda step, model: None) -> None:
        self.told: list[tuple[str, Any]] = []
        self.act = act

    def on_start(self, run: Run) -> None:
        self.model = run.model
        self.told.append(("start", run.step))

    def on_step(self, record: Mapping[str, Any]) -> None:
        self.told.append(("step", record["step"]))
        self.act(record["step"], self.model)

    def on_evaluate(self, record: Mapping[str, Any]) -> None:
        self.told.append(("evaluate", record["step"]))

    def on_checkpoint(self, path: Path) -> None:
        self.told.append(("checkpoint", int(path.name[5:])))

    def on_notice(self, text: str) -> None:
        self.told.append(("notice", text))

    def on_end(self, result: Result) -> None:
        self.told.append(("end", result.step))

    @property
    def notices(self) -> list[str]:
        return [text for kind, text in self.told if kind == "notice"]


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
def _alone(texts: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    build.load()  # from the suite's own cache, where they may be built already
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
    """Makes a config; what is not said is small."""

    def make(*, model: dict[str, Any] | None = None, **changes: Any) -> TrainConfig:
        shape = {"width": 16, "layers": 2, "heads": 2, "hidden": 32, **(model or {})}
        small = {"steps": 4, "context": 16, "batch": 4, "log_every": 1, "evaluate_tokens": 300, "device": "cpu"}
        return TrainConfig(data=CorpusConfig(source=str(texts)), model=DecoderConfig(**shape), **{**small, **changes})

    return make


@pytest.fixture
def task_configure(configure: Configure) -> Configure:
    """Makes a config that learns a small task, whose instances ask unequal numbers of questions."""

    def make(*, spec: str = TASK, model: dict[str, Any] | None = None, **changes: Any) -> TrainConfig:
        corpus = CorpusConfig(source=spec)
        validate_input = open_corpus(corpus)
        shape = {"vocabulary": validate_input.vocabulary, **(model or {})}
        config = configure(**{"model": shape, "context": validate_input.context, **changes})
        return dataclasses.replace(config, data=corpus)

    return make


@pytest.fixture
def watcher() -> type[Watcher]:
    return Watcher


@pytest.fixture
def at() -> Callable[..., Watcher]:
    """Makes a watcher that does something to the model after a step."""

    def make(step: int, act: Callable[[nn.Module], None]) -> Watcher:
        return Watcher(lambda now, model: act(model) if now == step else None)

    return make


@pytest.fixture
def stop_at(at: Callable[..., Watcher]) -> Callable[[int], Watcher]:
    """Makes a watcher that asks its own process to stop after a step."""
    return lambda step: at(step, lambda model: os.kill(os.getpid(), signal.SIGTERM))


@pytest.fixture
def begun(stop_at: Callable[[int], Watcher]) -> Callable[..., Path]:
    """Makes a run that was stopped after some steps."""

    def make(config: TrainConfig, folder: Path, step: int) -> Path:
        with pytest.raises(Interrupted):
            train(config, folder, callbacks=[stop_at(step)])
        return folder

    return make
