"""Accuracy by cell, its interval, and its file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.training import CellResult, Evaluation, RecallResult, by_cell, read_recall, together, write_recall
from qkflow.training.evaluate import DOCUMENT
from qkflow.training.recall import GRADED


def evaluated(*rows: tuple[int, int, int, int, int]) -> Evaluation:
    """Return an evaluation of instances with pairs, length, depth, questions and correct answers."""
    return Evaluation(np.ones(len(rows), DOCUMENT), np.array(list(rows), GRADED))


def cell_of(rights: list[int], questions: int) -> CellResult:
    (cell,) = by_cell(evaluated(*((questions, 64, -1, questions, right) for right in rights)))
    return cell


def test_instances_are_counted_per_cell() -> None:
    cells = by_cell(evaluated((8, 64, -1, 8, 4), (4, 64, -1, 4, 4), (8, 64, -1, 8, 8), (4, 64, -1, 4, 1)))
    assert [(cell.pairs, cell.length, cell.depth) for cell in cells] == [(4, 64, None), (8, 64, None)]
    assert [(cell.instances, cell.questions, cell.right) for cell in cells] == [(2, 8, 5), (2, 16, 12)]
    assert [cell.squares for cell in cells] == pytest.approx([1 + 1 / 16, 1 / 4 + 1])
    lengths_and_depths = [
        (cell.length, cell.depth) for cell in by_cell(evaluated((-1, 512, 0, 1, 1), (-1, 256, 100, 1, 1)))
    ]
    assert lengths_and_depths == [(256, 100), (512, 0)]
    assert by_cell(Evaluation(np.ones(3, DOCUMENT))) == ()


def test_one_question_per_instance_gives_wilsons_interval() -> None:
    cell = cell_of([1] * 45 + [0] * 5, 1)
    assert cell.interval == pytest.approx((0.7864, 0.9565), abs=1e-4)
    assert cell_of([1] * 50, 1).interval == pytest.approx((0.9287, 1.0), abs=1e-4)


def test_correlated_questions_widen_the_interval() -> None:
    spread, joined = cell_of([4] * 50, 8), cell_of([8] * 25 + [0] * 25, 8)
    assert spread.accuracy == joined.accuracy == 0.5
    assert joined.interval == pytest.approx(cell_of([1] * 25 + [0] * 25, 1).interval, abs=0.005)
    assert joined.high - joined.low > 2 * (spread.high - spread.low)
    assert cell_of([8] * 50, 8).interval == cell_of([1] * 50, 1).interval  # all correct: their correlation is unknown


@pytest.mark.parametrize(
    ("alike", "accuracy", "instances"),
    [(0.5, 0.7, 60), (20.0, 0.7, 60), (1.0, 0.95, 60), (2.0, 0.6, 5), (1.0, 0.7, 10)],
)
def test_the_interval_has_its_nominal_coverage(alike: float, accuracy: float, instances: int) -> None:
    """Instances differ in difficulty: the smaller `alike`, the more correlated the questions of an instance."""
    generator = np.random.default_rng(0)
    parts = generator.beta(accuracy * alike, (1 - accuracy) * alike, (600, instances))
    rights = generator.binomial(8, parts)
    is_covered = [cell.low <= accuracy <= cell.high for cell in (cell_of(row.tolist(), 8) for row in rights)]
    assert 0.9 <= np.mean(is_covered) <= 0.98  # with independent questions, the first would be 0.6


@given(rights=st.lists(st.integers(0, 6), min_size=1, max_size=8))
@settings(deadline=None, max_examples=25)
def test_an_interval_contains_the_accuracy_and_has_positive_width(rights: list[int]) -> None:
    cell = cell_of(rights, 6)
    assert 0 <= cell.low <= cell.accuracy <= cell.high <= 1
    assert cell.high - cell.low > 0.01


def test_pooled_cells_keep_shared_coordinates() -> None:
    rows = [(-1, 256, depth, 1, right) for depth in (0, 100) for right in (1, 0, 1)]
    whole = together(by_cell(evaluated(*rows)))
    assert (whole.pairs, whole.length, whole.depth) == (None, 256, None)
    assert (whole.instances, whole.questions, whole.right, whole.squares) == (6, 6, 4, 4.0)


def test_recall_results_survive_the_round_trip_to_disk(tmp_path: Path) -> None:
    cells = by_cell(evaluated((4, 64, -1, 4, 1), (8, 64, -1, 8, 5), (8, 64, -1, 8, 7)))
    result = RecallResult(task={"spec": "mqar", "chance": 0.25, "axes": ["pairs"]}, split="test", step=7, cells=cells)
    write_recall(tmp_path, result)
    assert read_recall(tmp_path) == result
    first = json.loads((tmp_path / "recall.json").read_text())["cells"][0]
    counts = {"instances": 1, "questions": 4, "right": 1, "squares": 0.0625}
    assert first == {"pairs": 4, "length": 64, "depth": None, **counts}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"right": 1', '"right": 9'),
        ('"right": 1', '"right": "1"'),
        ('"right": 1', '"wrong": 1'),
        ('"instances": 1', '"instances": 0'),
        ('"pairs": 4', '"pairs": [4]'),
        ('"step": 7', '"step": null'),
        ('"squares": 0.0625', '"squares": 2.0'),
        ('"chance": 0.25', '"chance": null'),
        ('"spec"', '"sort"'),
        ('"axes"', '"ways"'),
        ('"mqar"', '"mqar'),
    ],
)
def test_a_damaged_recall_file_reads_as_none(tmp_path: Path, old: str, new: str) -> None:
    cells = by_cell(evaluated((4, 64, -1, 4, 1)))
    task = {"spec": "mqar", "chance": 0.25, "axes": ["pairs"]}
    write_recall(tmp_path, RecallResult(task=task, split="test", step=7, cells=cells))
    path = tmp_path / "recall.json"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    assert read_recall(tmp_path) is None
