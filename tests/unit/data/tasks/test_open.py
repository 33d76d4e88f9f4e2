"""A task from its name and, for agreement, from what its file holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qkflow.data.tasks import TaskConfig, TaskName, open_task
from qkflow.errors import UsageError

MARVIN = {"file": "simple_agrmt", "case": "sing_MS_MV", "sents": ["the author is", "the author are"]}
BLIMP = {"sentence_good": "The old girl is.", "sentence_bad": "The old girl are."}


def test_agreement_without_data_is_the_grammar() -> None:
    task = open_task(TaskConfig(train=20, test=10))
    assert (task.name, len(task.train)) == ("agreement (built-in grammar)", 20)


def test_synthetic_needs_no_data() -> None:
    assert len(open_task(TaskConfig(name="synthetic", train=8, test=8)).train) == 8


@pytest.mark.parametrize(
    ("name", "row", "reader"),
    [
        ("pairs.jsonl", MARVIN, "Marvin & Linzen: 1 sentences"),
        ("distractor_agreement_relative_clause.jsonl", BLIMP, "none of the sets"),
        ("regular_plural_subject_verb_agreement_1.jsonl", BLIMP, "BLiMP agreement: 1 sentences"),
        ("pairs.jsonl", {"text": "else"}, "neither sents nor sentence_good"),
    ],
)
@pytest.mark.parametrize("by_folder", [True, False])
def test_agreement_data_is_told_by_its_content(
    tmp_path: Path, name: str, row: dict[str, object], reader: str, by_folder: bool
) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(row))
    with pytest.raises(UsageError, match=reader) as error:
        open_task(TaskConfig(data=str(tmp_path if by_folder else path)))
    assert "\n" not in str(error.value)


def test_a_folder_with_two_sets_of_pairs_is_not_guessed(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(json.dumps(MARVIN))
    with pytest.raises(UsageError, match=r"holds a\.jsonl, b\.jsonl: name one"):
        open_task(TaskConfig(data=str(tmp_path)))


def test_a_folder_or_file_with_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds neither"):
        open_task(TaskConfig(data=str(tmp_path)))
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UsageError, match="is empty"):
        open_task(TaskConfig(data=str(tmp_path / "empty.jsonl")))


@pytest.mark.parametrize("name", ["squad", "hatexplain"])
def test_a_task_without_its_data_says_what_it_needs(name: TaskName, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"the task {name} needs its data: give --data PATH"):
        open_task(TaskConfig(name=name))
    with pytest.raises(UsageError, match="there is no"):
        open_task(TaskConfig(name=name, data=str(tmp_path / "nowhere")))
    with pytest.raises(UsageError, match=r"has no \.json files|should have one file"):
        open_task(TaskConfig(name=name, data=str(tmp_path)))
