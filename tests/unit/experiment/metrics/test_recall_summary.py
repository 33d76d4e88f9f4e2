"""Recall accuracy over seeds: means, intervals, and differences to the baseline."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t

from qkflow.errors import UsageError
from qkflow.experiment.metrics.recall import (
    LEVEL,
    GridCell,
    RecallGrid,
    RunAnswers,
    Tally,
    read_recall_summary,
    recall,
    seed_mean,
)

NEEDLES = RecallGrid(
    task="s-niah-1",
    chance=0.01,
    axes=("length", "depth"),
    context=32,
    cells=tuple(GridCell(length=length, depth=depth) for length in (32, 64) for depth in (0, 100)),
)


def answered(seed: int, *right: int, questions: int = 10) -> RunAnswers:
    return RunAnswers(seed=seed, tallies=tuple(Tally(instances=questions, questions=questions, right=n) for n in right))


def test_every_cell_has_the_same_weight() -> None:
    run = RunAnswers(
        seed=0,
        tallies=(
            Tally(instances=1, questions=1, right=1),
            Tally(instances=100, questions=100, right=50),
            Tally(instances=10, questions=10, right=3),
            Tally(instances=10, questions=10, right=1),
        ),
    )
    (summary,) = recall(NEEDLES, {"standard": [run]}).arms
    assert [reading.accuracy.mean for reading in summary.cells if reading.accuracy] == pytest.approx(
        [1.0, 0.5, 0.3, 0.1]
    )
    assert [reading.accuracy.mean for reading in summary.along if reading.accuracy] == pytest.approx([0.75, 0.2])
    assert summary.overall.accuracy is not None
    assert summary.overall.accuracy.mean == pytest.approx(0.475)


def test_differences_use_seeds_of_both_arms() -> None:
    summary = recall(
        NEEDLES,
        {
            "standard": [answered(0, 10, 10, 10, 10), answered(1, 8, 8, 8, 8), answered(2, 0, 0, 0, 0)],
            "qdelta": [answered(1, 9, 9, 7, 7), answered(0, 8, 8, 8, 8), answered(5, 10, 10, 10, 10)],
        },
    )
    baseline, arm = summary.arms
    assert baseline.overall.difference is None
    assert arm.overall.difference is not None
    assert dict(zip(arm.overall.difference.seeds, arm.overall.difference.values, strict=True)) == pytest.approx(
        {0: -0.2, 1: 0.0}
    )
    assert arm.overall.difference.mean == pytest.approx(-0.1)
    assert arm.along[0].difference is not None
    assert arm.along[0].difference.mean == pytest.approx(statistics.fmean([-0.2, 0.1]))
    assert summary.places == (32, 64)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
@settings(deadline=None, max_examples=25)
def test_the_interval_is_students_clipped_to_valid_accuracies(values: list[float]) -> None:
    accuracy = seed_mean(dict(enumerate(values)), least=0.0)
    assert accuracy.mean == pytest.approx(statistics.fmean(values))
    if len(values) == 1:
        assert accuracy.half is accuracy.low is accuracy.high is None
        return
    low, high = t.interval(
        LEVEL, len(values) - 1, accuracy.mean, max(1e-300, statistics.stdev(values)) / len(values) ** 0.5
    )
    assert (accuracy.low, accuracy.high) == pytest.approx((max(0.0, low), min(1.0, high)), abs=1e-9)
    assert (accuracy.half or 0) * 2 == pytest.approx(high - low, abs=1e-9)


def test_an_arm_without_a_run_or_a_pair_has_no_accuracy_or_difference() -> None:
    summary = recall(NEEDLES, {"standard": [], "qdelta": [answered(0, 1, 2, 3, 4)], "deltanet": []})
    assert [one.arm for one in summary.arms] == ["standard", "qdelta", "deltanet"]
    assert [one.overall.accuracy is None for one in summary.arms] == [True, False, True]
    assert all(one.overall.difference is None for one in summary.arms)


@pytest.mark.parametrize("run", [answered(0, 1, 2, 3), answered(0, 0, 0, 0, 0, questions=0)])
def test_answers_that_do_not_fit_the_grid_are_refused(run: RunAnswers) -> None:
    with pytest.raises(UsageError, match="altered"):
        recall(NEEDLES, {"standard": [run]})


def record(right: tuple[int, ...], *, spec: str = "mqar") -> dict[str, Any]:
    """A run's recall.json."""
    cells = [
        {"pairs": 2**n, "length": 16, "depth": None, "questions": 20, "right": n_right, "instances": 5, "squares": 1.0}
        for n, n_right in enumerate(right)
    ]
    task = {"name": "mqar", "spec": spec, "context": 16, "chance": 0.125, "axes": ["pairs"]}
    return {"task": task, "split": "test", "step": 20, "cells": cells}


def folders(place: Path, records: dict[str, dict[int, dict[str, Any] | str | None]]) -> dict[str, dict[int, Path]]:
    summary: dict[str, dict[int, Path]] = {}
    for arm, by_seed in records.items():
        for seed, content in by_seed.items():
            folder = place / arm / f"seed-{seed}"
            folder.mkdir(parents=True)
            summary.setdefault(arm, {})[seed] = folder
            if content is not None:
                (folder / "recall.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return summary


def test_recall_files_are_combined_and_missing_ones_left_out(tmp_path: Path) -> None:
    summary = read_recall_summary(
        folders(
            tmp_path,
            {"standard": {0: record((20, 10)), 1: record((20, 20))}, "qdelta": {0: record((10, 0)), 1: None}},
        )
    )
    assert summary is not None
    assert (summary.task, summary.chance, summary.axes, summary.context) == ("mqar", 0.125, ("pairs",), 16)
    assert summary.cells == (GridCell(pairs=1, length=16), GridCell(pairs=2, length=16))
    assert [run.seed for run in summary.arms[1].runs] == [0]
    assert summary.arms[1].overall.difference is not None
    assert summary.arms[1].overall.difference.values == (-0.5,)
    assert summary.arms[0].runs[0].tallies[1] == Tally(instances=5, questions=20, right=10)


def test_runs_on_text_have_no_recall(tmp_path: Path) -> None:
    assert read_recall_summary(folders(tmp_path, {"standard": {0: None}, "qdelta": {0: None}})) is None


def test_runs_that_answered_other_questions_are_not_compared(tmp_path: Path) -> None:
    other = folders(tmp_path, {"standard": {0: record((1, 2))}, "qdelta": {0: record((1, 2), spec="mqar:seed=2")}})
    with pytest.raises(UsageError, match="other questions"):
        read_recall_summary(other)


def test_a_truncated_file_is_left_out(tmp_path: Path) -> None:
    round_steps = json.dumps(record((1, 2)))
    summary = read_recall_summary(folders(tmp_path, {"standard": {0: round_steps, 1: round_steps[:-9]}}))
    assert summary is not None
    assert [run.seed for run in summary.arms[0].runs] == [0]


@pytest.mark.parametrize("axis", ["depth", "width"])
def test_a_grid_without_its_axis_is_refused_on_one_line(tmp_path: Path, axis: str) -> None:
    task = {"spec": "mqar", "chance": 0.1, "axes": [axis]}
    with pytest.raises(UsageError, match=r"recall\.json") as raised:
        read_recall_summary(folders(tmp_path, {"standard": {0: {**record((1, 2)), "task": task}}}))
    assert "\n" not in str(raised.value)
