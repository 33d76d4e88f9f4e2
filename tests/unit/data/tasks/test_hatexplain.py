"""HateXplain: majority labels and rationales, the official split, and no post in any error message."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from qkflow.data.tasks import TaskConfig
from qkflow.data.tasks.hatexplain import hatexplain
from qkflow.errors import UsageError

CONFIG = TaskConfig(name="hatexplain")
SECRET = "mudblood"


def post(labels: str, *marks: list[int], words: str = f"that {SECRET} again") -> dict[str, Any]:
    """Return a post with labels given by their first letters."""
    names = {"h": "hatespeech", "o": "offensive", "n": "normal"}
    annotators = [{"label": names[letter], "annotator_id": 1, "target": []} for letter in labels]
    return {"post_tokens": words.split(), "annotators": annotators, "rationales": list(marks)}


def posts() -> dict[str, Any]:
    return {
        "1_gab": post("hhh", [0, 1, 1], [0, 1, 0], [1, 1, 0]),
        "2_twitter": post("oon", [1, 1, 0], [0, 1, 0]),
        "3_gab_2": post("nnn"),
        "4_gab": post("hhn", [0, 1, 0], [0, 1, 1], words="That AGAIN again"),
        "5_twitter": post("hhh", [0, 0, 1], [0, 0, 1, 1], [1, 0, 1]),
        "6_gab": post("hon", [0, 1, 0]),
        "7_gab": post("nno", [1, 1, 1, 1], words="that again <pad> <ask>"),
    }


DIVISIONS = {"train": ["1_gab", "2_twitter", "3_gab_2"], "val": ["4_gab"], "test": ["5_twitter", "7_gab"]}


def write(folder: Path, data: object, divisions: object = DIVISIONS) -> Path:
    (folder / "dataset_rebuilt.json.xz").write_bytes(lzma.compress(json.dumps(data).encode()))
    (folder / "post_id_divisions.json").write_text(json.dumps(divisions))
    return folder


def test_labels_and_rationales_are_majorities(tmp_path: Path) -> None:
    task = hatexplain(write(tmp_path, posts()), CONFIG)
    assert [task.classes[instance.label] for instance in task.train] == ["hatespeech", "offensive", "normal"]
    assert [instance.rationale for instance in task.train] == [(1,), (1,), ()]
    assert [instance.kind for instance in task.train] == ["gab", "twitter", "gab"]
    assert [instance.rationale for instance in task.validation] == [(1,)]
    assert not task.is_quotable


def test_official_split_is_used_and_skipped_posts_are_counted(tmp_path: Path) -> None:
    data = {**posts(), "8_gab": post("nnn")}
    divisions = {**DIVISIONS, "train": [*DIVISIONS["train"], "9_gab"]}
    task = hatexplain(write(tmp_path, data, divisions), CONFIG)
    assert (len(task.train), len(task.validation), len(task.test)) == (3, 1, 2)
    assert task.skipped == {
        "no majority label": 1,
        "not in the official split": 1,
        "in the split, but not in the data": 1,
        "rationales of one annotator with another length than the post (the post is kept)": 1,
    }


def test_rationale_of_another_length_is_ignored(tmp_path: Path) -> None:
    task = hatexplain(write(tmp_path, posts()), CONFIG)
    assert task.test[0].rationale == (2,)


def test_normal_posts_have_no_rationale(tmp_path: Path) -> None:
    assert hatexplain(write(tmp_path, posts()), CONFIG).test[1].rationale == ()


def test_query_token_is_last_protected_and_unique(tmp_path: Path) -> None:
    task = hatexplain(write(tmp_path, posts()), CONFIG)
    ask = task.words.index("<ask>")
    for instance in (*task.train, *task.validation, *task.test):
        assert instance.protected == (len(instance.tokens) - 1,)
        assert [position for position, token in enumerate(instance.tokens) if token == ask] == [
            len(instance.tokens) - 1
        ]
        assert 0 not in instance.tokens


def test_long_posts_are_skipped(tmp_path: Path) -> None:
    data = {**posts(), "1_gab": post("nnn", words="a b c d")}
    divisions = {**DIVISIONS, "train": ["1_gab", "2_twitter", "3_gab_2", "4_gab"]}
    task = hatexplain(write(tmp_path, data, divisions), TaskConfig(name="hatexplain", longest=4))
    assert task.skipped["longer than 4 tokens"] == 2
    assert len(task.train) == 3


def test_label_missing_in_training_raises(tmp_path: Path) -> None:
    divisions = {"train": ["3_gab_2"], "val": ["3_gab_2"], "test": ["1_gab"]}
    with pytest.raises(UsageError, match="no training instance has the label 'hatespeech'"):
        hatexplain(write(tmp_path, posts(), divisions), CONFIG)


@pytest.mark.parametrize(
    ("data", "divisions", "message"),
    [
        ([SECRET], DIVISIONS, "holds a list, not a JSON object"),
        (
            {"1_gab": {"post_tokens": [SECRET]}},
            {**DIVISIONS, "train": ["1_gab"]},
            "post 1_gab is malformed",
        ),
        ({"1_gab": post("hh", 3, words=SECRET)}, DIVISIONS, "post 1_gab is malformed"),  # pyright: ignore
        (posts(), {"train": ["1_gab"]}, "no list of ids under 'val'"),
        (posts(), {**DIVISIONS, "train": "all"}, "no list of ids under 'train'"),
        ({**posts(), "1_gab": {**post("h"), "annotators": [{"label": "rude"}]}}, DIVISIONS, "unknown label 'rude'"),
    ],
)
def test_invalid_files_raise_one_line_errors_without_quotes(
    tmp_path: Path, data: object, divisions: object, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as error:
        hatexplain(write(tmp_path, data, divisions), CONFIG)
    assert "\n" not in str(error.value)
    assert SECRET not in str(error.value)


def test_invalid_json_is_not_quoted(tmp_path: Path) -> None:
    write(tmp_path, posts())
    (tmp_path / "dataset_rebuilt.json.xz").write_bytes(lzma.compress(f'{{"1_gab": {SECRET}'.encode()))
    with pytest.raises(UsageError, match="is not valid JSON") as error:
        hatexplain(tmp_path, CONFIG)
    assert SECRET not in str(error.value)


def test_missing_file_raises(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"must contain one file dataset\*\.json, found none"):
        hatexplain(tmp_path, CONFIG)
    write(tmp_path, posts())
    (tmp_path / "post_id_divisions.json").unlink()
    with pytest.raises(UsageError, match=r"must contain one file post_id_divisions\*\.json, found none"):
        hatexplain(tmp_path, CONFIG)
    (tmp_path / "dataset.json").write_text("{}")
    with pytest.raises(UsageError, match=r"found dataset\.json, dataset_rebuilt"):
        hatexplain(tmp_path, CONFIG)


def test_path_of_the_posts_file_is_accepted(tmp_path: Path) -> None:
    folder = write(tmp_path, posts())
    assert hatexplain(folder / "dataset_rebuilt.json.xz", CONFIG).digest == hatexplain(folder, CONFIG).digest
