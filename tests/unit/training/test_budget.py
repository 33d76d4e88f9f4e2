"""Conversion of a time budget to steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qkflow.data import Corpus
from qkflow.errors import UsageError
from qkflow.training import budget, steps_for_budget
from qkflow.training.step import Learner


class Clock:
    """A clock that only steps and evaluations advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A step takes half a second (the first takes ten), an evaluation a millisecond per token."""
    clock = Clock()

    def train_step(learner: Learner, should_stop: Any) -> dict[str, Any]:
        learner.step += 1
        seconds = 10.0 if learner.step == 1 else 0.5
        clock.now += seconds
        return {"seconds": seconds}

    def evaluate(learner: Learner, held_out: Any, should_stop: Any) -> None:
        clock.now += held_out.n_tokens() / 1000

    monkeypatch.setattr(Learner, "train_step", train_step)
    monkeypatch.setattr(Learner, "evaluate", evaluate)
    monkeypatch.setattr(budget, "time", clock)
    return clock


def test_steps_fill_the_time_left_by_evaluations(configure: Any, corpus: Corpus, clock: Clock) -> None:
    config = configure(evaluate_every=10, evaluate_tokens=None)
    once = budget.open_objective(config).validation(None).n_tokens() / 1000
    steps = steps_for_budget(config, 100.0)
    assert steps == int((100 - 2 * once) / (0.5 + once / 10))
    assert steps_for_budget(config, 200.0) > 1.9 * steps


def test_a_budget_allows_at_least_one_step(configure: Any, clock: Clock) -> None:
    assert steps_for_budget(configure(), 1e-3) == 1


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_non_positive_budget_is_refused(configure: Any, seconds: float) -> None:
    with pytest.raises(UsageError, match="a budget must be more than 0 seconds"):
        steps_for_budget(configure(), seconds)


def test_measuring_the_speed_writes_no_files(configure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert steps_for_budget(configure(), 0.2) >= 1
    assert not list(tmp_path.iterdir())
