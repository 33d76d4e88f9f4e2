"""Executors: results, crashes, stopping, and the lifetime of processes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qkflow.data import CorpusConfig
from qkflow.data.tasks import TaskConfig
from qkflow.errors import UsageError
from qkflow.experiment import worker
from qkflow.experiment.executors.base import CallResult, Executor, Resources, make_executor
from qkflow.experiment.executors.local import LocalExecutor
from qkflow.experiment.planner import make_design
from qkflow.experiment.run_status import read_status
from qkflow.experiment.runner import run_experiment
from qkflow.experiment.spec import ExperimentSpec
from qkflow.experiment.worker import RunOutcome, RunSpec
from qkflow.models import DecoderConfig
from qkflow.training import TrainConfig
from qkflow.training.run_dir import finished

NEED = Resources()
CALLED = """
import os, signal, threading
def double(x):
    return 2 * x
def process(x):
    return os.getpid(), os.getsid(0)
def leave(code):
    os._exit(code)
def die(number):
    os.kill(os.getpid(), number)
def fail(text):
    raise RuntimeError(text)
def variable(name):
    return os.environ.get(name)
def wait_for_term(path):
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    open(path, "w").close()
    signal.pause()
    return "stopped"
"""
MECHANISMS = """
import os, torch
from dataclasses import dataclass
from qkflow.mechanisms import StandardAttention, StandardConfig
class Broken(StandardAttention):
    kind = ""
    def forward(self, x, state=None, layout=None):
        if self.training and self.kind == "raises":
            raise RuntimeError("a mechanism of mine")
        if self.training and self.kind == "exits":
            os._exit(7)
        y, state = super().forward(x, state, layout)
        return (y * float("nan") if self.training and self.kind == "diverges" else y), state
@dataclass(frozen=True, kw_only=True)
class BrokenConfig(StandardConfig):
    kind: str = "raises"
    def __call__(self, width, heads, layer, layers):
        made = Broken(width, heads, layer, layers, config=StandardConfig(qk_norm=True))
        made.kind = self.kind
        return made
"""


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with functions that misbehave, which processes can import too."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "called_here.py").write_text(CALLED)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    yield __import__("called_here")
    del sys.modules["called_here"]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package whose mechanism `broken` breaks in training, each `kind` of it in a way of its own."""
    place = tmp_path / "site"
    (place / "broken-1.dist-info").mkdir(parents=True)
    (place / "broken-1.dist-info" / "METADATA").write_text("Name: broken\nVersion: 1\n")
    (place / "broken-1.dist-info" / "entry_points.txt").write_text(
        "[qkflow.mechanisms]\nbroken = broken_mechanism:BrokenConfig\n"
    )
    (place / "broken_mechanism.py").write_text(MECHANISMS)
    monkeypatch.syspath_prepend(place)


def work(function: Callable[[Any], Any], *arguments: Any, workers: int = 2) -> list[CallResult]:
    with LocalExecutor() as executor:
        found = [
            done for done in executor.run(function, arguments, workers=workers, resources=NEED) if done is not None
        ]
    return sorted(found, key=lambda done: done.index)


def test_every_call_runs_in_its_own_process(called: Any) -> None:
    assert [done.value for done in work(called.double, 1, 2, 3)] == [2, 4, 6]
    processes = [done.value for done in work(called.process, 0, 1, 2, workers=1)]
    assert len({pid for pid, _ in processes}) == 3
    assert os.getpid() not in {pid for pid, _ in processes}
    assert all(pid == session for pid, session in processes)  # a terminal's Ctrl-C goes to the parent alone


def test_a_failing_call_reports_the_reason_and_does_not_affect_others(called: Any) -> None:
    assert work(called.fail, "too\nbad")[0].crash == "RuntimeError: too bad"
    assert work(called.leave, 3)[0].crash == "its process exited with code 3"
    killed, terminated = work(called.die, signal.SIGKILL, signal.SIGTERM)
    assert killed.crash == "its process was killed by SIGKILL, possibly out of memory"
    assert terminated.crash == "its process was killed by SIGTERM"


def test_calls_see_the_environment_of_their_caller(called: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the server that forks them began with another."""
    assert work(called.double, 1)[0].value == 2
    monkeypatch.setenv("QKFLOW_DATA", "there")
    assert work(called.variable, "QKFLOW_DATA", "OMP_NUM_THREADS")[0].value == "there"


def test_stop_signals_running_calls_and_starts_no_others(called: Any, tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in "abc"]
    found = []
    with LocalExecutor() as executor:
        for done in executor.run(called.wait_for_term, files, workers=2, resources=NEED):
            if all(Path(file).exists() for file in files[:2]):
                executor.stop()
            found += [] if done is None else [done]
    assert [done.value for done in found] == ["stopped", "stopped"]
    assert not Path(files[2]).exists()


def test_leaving_the_executor_ends_its_processes(called: Any, tmp_path: Path) -> None:
    with LocalExecutor() as executor:
        calls = executor.run(called.wait_for_term, [str(tmp_path / "a")], workers=1, resources=NEED)
        assert next(calls) is None
        process = executor._running[0].process
        number = process.pid
    assert number is not None
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


def test_an_unknown_executor_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="unknown executor 'locale': did you mean 'local'"):
        make_executor("locale")
    with pytest.raises(UsageError, match="use --executor ray"):
        make_executor("local", address="10.0.0.1:6379")


def test_a_missing_ray_explains_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'qkflow\[ray\]'"), make_executor("ray"):
        pass


def test_executors_implement_the_protocol(inline: Any) -> None:
    assert isinstance(LocalExecutor(), Executor)
    assert isinstance(inline(), Executor)


@pytest.mark.usefixtures("plugin")
def test_an_arm_that_crashes_is_recorded_and_the_others_finish(
    ask: Callable[..., ExperimentSpec], watcher: Any, tmp_path: Path
) -> None:
    study = tmp_path / "study"
    arms = ("standard", "broken:kind=raises", "broken:kind=exits", "broken:kind=diverges")
    run_experiment(ask(arms=arms, seeds=1), study, observer=watcher)
    reasons = dict(watcher.failures)
    assert reasons["broken:kind=raises seed 0"] == "RuntimeError: a mechanism of mine"
    assert reasons["broken:kind=exits seed 0"] == "its process exited with code 7"
    assert reasons["broken:kind=diverges seed 0"].startswith("the loss of step 1 is not finite")
    assert finished(study / "runs" / "standard" / "seed-0") is not None
    records = {kind: read_status(study / "runs" / f"broken_kind={kind}" / "seed-0") for kind in ("exits", "diverges")}
    assert (records["exits"].attempts, records["exits"].failed_for_good) == (3, False)
    assert (records["diverges"].attempts, records["diverges"].failed_for_good) == (1, True)


@pytest.mark.usefixtures("plugin")
def test_an_arm_that_cannot_be_measured_does_not_prevent_the_design(ask: Callable[..., ExperimentSpec]) -> None:
    notices: list[str] = []
    spec = ask(arms=("broken", "standard"), tokens=None, budget=60.0, passes=1000.0)
    with LocalExecutor() as executor:
        design = make_design(spec, executor, notice=notices.append)
    assert "could not measure the speed of broken: RuntimeError: a mechanism of mine" in notices
    assert all(arm.seconds_per_step is not None for arm in design.arms)


@pytest.mark.parametrize(
    ("data", "flags"),
    [(CorpusConfig(), "--batch, --context, --size or --jobs"), (TaskConfig(), "--batch, --longest or --jobs")],
)
def test_a_run_without_enough_memory_says_what_to_reduce(
    data: CorpusConfig | TaskConfig, flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(spec: RunSpec, folder: Path) -> None:
        raise MemoryError

    monkeypatch.setattr(worker, "_train", fail)
    (tmp_path / "run").mkdir()
    config = TrainConfig(data=data, model=DecoderConfig(width=8, layers=1, heads=2, hidden=8), steps=1)
    spec = RunSpec(folder=str(tmp_path / "run"), config=config, command=(), lock_timeout=0.0)
    assert worker.run_one(spec) == RunOutcome(kind="crashed", reason=f"out of memory: reduce {flags}")
