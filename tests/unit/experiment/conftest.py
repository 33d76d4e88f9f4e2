"""A small corpus, specs of tiny studies, an executor that runs in this process, and finished studies."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pytest
import torch

from qkflow.data import CorpusConfig
from qkflow.experiment import run_queue
from qkflow.experiment.decisions import Decisions, Round
from qkflow.experiment.design import Design
from qkflow.experiment.executors.base import CallResult, Resources, describe_error
from qkflow.experiment.planned_runs import PlannedRun, best_rates, round_runs, tuning_runs
from qkflow.experiment.progress import Observer, Progress
from qkflow.experiment.run_status import update_status
from qkflow.experiment.runner import run_experiment
from qkflow.experiment.spec import ExperimentSpec
from qkflow.experiment.worker import RunOutcome, RunSpec
from qkflow.io import checksum
from qkflow.mechanisms import registry
from qkflow.models import DecoderConfig
from qkflow.training.evaluate import DOCUMENT
from qkflow.training.run_dir import begin, finish, write_documents

TINY = DecoderConfig(width=16, layers=1, heads=2, hidden=32)


class Inline:
    """An executor without processes: it makes one call after the other."""

    lock_timeout = 0.0

    def __init__(self) -> None:
        self.stopped = False
        self.calls: list[Any] = []
        self.before: Callable[[Any], None] = lambda argument: None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def cores(self) -> tuple[int, ...]:
        return (2,)

    def run(
        self, function: Callable[[Any], Any], arguments: Sequence[Any], *, workers: int, resources: Resources
    ) -> Iterator[CallResult | None]:
        for index, argument in enumerate(arguments):
            if self.stopped:
                return
            self.calls.append(argument)
            yield None
            try:
                self.before(argument)
                yield CallResult(index=index, value=function(argument))
            except Exception as error:
                yield CallResult(index=index, crash=describe_error(error))

    def stop(self) -> None:
        self.stopped = True


class Watcher(Observer):
    """Keeps all notifications."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.designs: list[Design] = []
        self.progress: list[Progress] = []
        self.failures: list[tuple[str, str]] = []

    def on_notice(self, text: str) -> None:
        self.notices.append(text)

    def on_design(self, design: Design) -> None:
        self.designs.append(design)

    def on_progress(self, progress: Progress) -> None:
        self.progress.append(progress)

    def on_failure(self, job: PlannedRun, reason: str) -> None:
        self.failures.append((job.name, reason))


def planned_runs(design: Design, rates: Mapping[str, float] | None = None) -> tuple[PlannedRun, ...]:
    """All runs of a design, tuning first, as if no arm were decided early."""
    seeds = tuple(range(design.first_seed, design.first_seed + design.seeds))
    rates = best_rates(design, {}) if rates is None else rates
    return (*tuning_runs(design), *round_runs(design, Round(number=1, arms=design.spec.arms, seeds=seeds), rates))


@pytest.fixture
def edit_decisions() -> Callable[..., None]:
    """Rewrites decisions.jsonl with valid checksums, also that of design.json, as a skilled forger would."""

    def edit(study: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = list) -> None:
        records = change(Decisions(study).records)
        (study / "decisions.jsonl").unlink()
        decisions = Decisions(study)
        for record in records:
            if record["kind"] == "design":
                record = {**record, "sha256_design": checksum(study / "design.json")}
            decisions.append(record["kind"], {key: value for key, value in record.items() if key != "kind"})

    return edit


@pytest.fixture(name="planned_runs")
def _planned_runs() -> Callable[..., tuple[PlannedRun, ...]]:
    return planned_runs


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eighty short documents in one file."""
    file = tmp_path_factory.mktemp("study") / "texts.jsonl"
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefgh", k=generator.randint(2, 6))) for _ in range(50)]
    texts = [" ".join(generator.choices(words, k=generator.randint(20, 60))) for _ in range(80)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


@pytest.fixture(autouse=True)
def _alone(
    tmp_path_factory: pytest.TempPathFactory, new_cache: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    monkeypatch.setenv("QKFLOW_CACHE", new_cache(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def ask(texts: Path) -> Callable[..., ExperimentSpec]:
    """Makes the spec of a study with two arms, two seeds and twenty steps."""

    def make(**changes: Any) -> ExperimentSpec:
        small: dict[str, Any] = {
            "data": CorpusConfig(source=str(texts)),
            "arms": ("standard", "differential"),
            "model": TINY,
            "tokens": 20 * 64,
            "seeds": 2,
            "context": 16,
            "batch": 4,
            "device": "cpu",
            "threads": 1,
        }
        return ExperimentSpec(**{**small, **changes})

    return make


@pytest.fixture
def inline() -> type[Inline]:
    return Inline


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


@pytest.fixture
def finish_study(
    ask: Callable[..., ExperimentSpec], inline: type[Inline], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Copies a finished study of one or two seeds, which is trained once, to a path."""

    def finish(path: Path, *, seeds: int = 2) -> Path:
        source = tmp_path_factory.getbasetemp() / f"finished-study-{seeds}"
        if not source.exists():
            run_experiment(ask(seeds=seeds), source, executor=inline())
        return Path(shutil.copytree(source, path))

    return finish


class FakeTraining:
    """Writes finished runs without training: the loss of an arm, a noise per seed, and failures."""

    def __init__(self) -> None:
        self.effects: dict[str, float] = {}
        self.noise: dict[str, float] = {}
        self.failing: set[str] = set()
        self.started: list[str] = []
        self.on_start: Callable[[str], None] = lambda name: None

    def __call__(self, spec: RunSpec) -> RunOutcome:
        folder = Path(spec.folder)
        arm, name = folder.parent.name, f"{folder.parent.name} {folder.name}"
        self.started.append(name)
        self.on_start(name)
        if name in self.failing:
            update_status(folder, failed="it broke")
            return RunOutcome(kind="refused", reason="it broke")
        documents = np.zeros(4, DOCUMENT)
        documents["bytes"] = documents["tokens"] = (900, 1000, 1100, 1200)
        generator = np.random.default_rng(spec.config.seed)
        shared = 0.01 * generator.standard_normal()  # the seed's effect on all arms
        own = np.random.default_rng([spec.config.seed, *arm.encode()]).standard_normal()
        bits = 2 + shared + self.effects.get(arm, 0.0) + self.noise.get(arm, 1e-5) * own
        bits += 1e-6 * abs(math.log(spec.config.lr / 1e-3))
        documents["nats"] = bits * math.log(2) * documents["bytes"]
        folder.mkdir(parents=True, exist_ok=True)
        begin(folder, spec.config, {"cpu": "fake"})
        write_documents(folder / "documents.npy", documents)
        record = {"kind": "eval", "step": spec.config.steps, "tokens": 1, "seconds": 1.0, "bits_per_byte": bits}
        (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        finish(folder, {"weight": torch.zeros(1)})
        update_status(folder, failed=None)
        return RunOutcome(kind="finished")


@pytest.fixture
def fake_training(monkeypatch: pytest.MonkeyPatch) -> FakeTraining:
    fake = FakeTraining()
    monkeypatch.setattr(run_queue, "run_one", fake)
    return fake
