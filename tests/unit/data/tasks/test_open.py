"""Tasks are opened by name; agreement data by their content."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qkflow.data.tasks import TaskConfig, TaskName, open_task
from qkflow.errors import UsageError

MARVIN = {"file": "simple_agrmt", "case": "sing_MS_MV", "sents": ["the author is", "the author are"]}
BLIMP = {"sentence_good": "The old girl is.", "sentence_bad": "The old girl are."}


def test_agreement_without_data_is_the_built_in_grammar() -> None:
    task = open_task(TaskConfig(train=20, test=10))
    assert (task.name, len(task.train)) == ("agreement (built-in grammar)", 20)


def test_synthetic_needs_no_data() -> None:
    assert len(open_task(TaskConfig(name="synthetic", train=8, test=8)).train) == 8


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("pairs.jsonl", MARVIN, "Marvin & Linzen: 1 sentences"),
        ("distractor_agreement_relative_clause.jsonl", BLIMP, "contains none of the sets"),
        ("regular_plural_subject_verb_agreement_1.jsonl", BLIMP, "BLiMP agreement: 1 sentences"),
        ("pairs.jsonl", {"text": "else"}, "neither `sents` nor `sentence_good`"),
    ],
)
@pytest.mark.parametrize("by_folder", [True, False])
def test_agreement_data_is_recognized_by_its_content(
    tmp_path: Path, name: str, row: dict[str, object], message: str, by_folder: bool
) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(row))
    with pytest.raises(UsageError, match=message) as error:
        open_task(TaskConfig(data=str(tmp_path if by_folder else path)))
    assert "\n" not in str(error.value)


def test_folder_with_two_candidate_files_raises(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(json.dumps(MARVIN))
    with pytest.raises(UsageError, match=r"several files \(a\.jsonl, b\.jsonl\): choose one"):
        open_task(TaskConfig(data=str(tmp_path)))


def test_empty_folder_or_file_raises(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="contains no such file"):
        open_task(TaskConfig(data=str(tmp_path)))
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UsageError, match="is empty"):
        open_task(TaskConfig(data=str(tmp_path / "empty.jsonl")))


@pytest.mark.parametrize("name", ["squad", "hatexplain"])
def test_missing_data_error_says_what_is_needed(name: TaskName, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"the task {name} needs data: set --data"):
        open_task(TaskConfig(name=name))
    with pytest.raises(UsageError, match="no file or folder"):
        open_task(TaskConfig(name=name, data=str(tmp_path / "nowhere")))
    with pytest.raises(UsageError, match=r"contains no \.json files|must contain one file"):
        open_task(TaskConfig(name=name, data=str(tmp_path)))
