"""Progress of a study, read from metrics.jsonl."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qkflow.experiment.design import Design
from qkflow.experiment.planned_runs import PlannedRun
from qkflow.experiment.planner import make_design
from qkflow.experiment.progress import ProgressMeter, last_step
from qkflow.experiment.spec import ExperimentSpec


@pytest.fixture
def design(ask: Callable[..., ExperimentSpec], inline: Any) -> Design:
    """Four runs of a hundred steps, two at a time."""
    return make_design(ask(tokens=100 * 64), inline(), notice=lambda text: None)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def write(study: Path, job: PlannedRun, step: int) -> None:
    (study / job.folder).mkdir(parents=True, exist_ok=True)
    with open(study / job.folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"kind": "train", "step": step}) + "\n")


def test_the_last_whole_line_gives_the_step(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert last_step(tmp_path) == (0, 0)
    lines = "".join(json.dumps({"step": step, "more": "x" * 50}) + "\n" for step in range(1000))
    file.write_text(lines)
    assert last_step(tmp_path) == (len(lines), 999)
    file.write_text(lines + '{"step": 1000, "mo')
    assert last_step(tmp_path)[1] == 999
    file.write_text("no json\n")
    assert last_step(tmp_path)[1] == 0


def test_speed_and_time_left_are_those_of_this_session(design: Design, planned_runs: Any, tmp_path: Path) -> None:
    clock, made = Clock(), planned_runs(design)
    write(tmp_path, made[0], 50)  # from an earlier session
    meter = ProgressMeter(tmp_path, design, clock)
    meter.add(made)
    first = meter.read()
    assert (first.items, first.items_per_second, first.seconds_left, first.running) == (50 * 64, None, None, ())
    clock.now = 10.0
    write(tmp_path, made[0], 70)
    write(tmp_path, made[1], 20)
    seen = meter.read()
    assert seen.items == 90 * 64
    assert seen.all_items == 400 * 64
    assert seen.items_per_second == pytest.approx(40 * 64 / 10)
    assert [(run.arm, run.seed, run.step, run.steps) for run in seen.running] == [
        (job.arm, 0, step, 100) for job, step in zip(made[:2], (70, 20), strict=True)
    ]
    assert seen.seconds_left == pytest.approx(80, rel=0.15)  # a slot makes two steps a second; 30 + 100 | 80 + 100 left


def test_finished_runs_count_fully_and_failed_runs_not_at_all(
    design: Design, planned_runs: Any, tmp_path: Path
) -> None:
    clock, made = Clock(), planned_runs(design)
    meter = ProgressMeter(tmp_path, design, clock)
    meter.add(made)
    clock.now = 10.0
    write(tmp_path, made[1], 30)
    meter.finish(made[0])
    meter.fail(made[1])
    seen = meter.read()
    assert (seen.finished, seen.failed, seen.runs) == (1, 1, 4)
    assert (seen.items, seen.all_items) == (100 * 64, 300 * 64)
    assert seen.running == ()


def test_runs_finished_before_do_not_count_towards_speed(design: Design, planned_runs: Any, tmp_path: Path) -> None:
    clock, made = Clock(), planned_runs(design)
    meter = ProgressMeter(tmp_path, design, clock)
    meter.add(made)
    for job in made[:2]:
        meter.count_as_old(job)
    clock.now = 10.0
    assert meter.read().seconds_left is None
    clock.now = 20.0
    write(tmp_path, made[2], 50)
    write(tmp_path, made[3], 50)
    assert meter.read().seconds_left == pytest.approx(20, rel=0.15)


def test_a_run_resumed_from_a_checkpoint_is_not_counted_twice(
    design: Design, planned_runs: Any, tmp_path: Path
) -> None:
    clock, made = Clock(), planned_runs(design)
    write(tmp_path, made[0], 60)
    meter = ProgressMeter(tmp_path, design, clock)
    meter.add(made)
    (tmp_path / made[0].folder / "metrics.jsonl").write_text('{"step": 40}\n')
    clock.now = 10.0
    seen = meter.read()
    assert seen.items == 40 * 64
    assert seen.seconds_left is None
    assert len(seen.running) == 1
