"""What a task holds a reader of data to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from qkflow.config import from_dict
from qkflow.data.tasks import Instance, Task, TaskConfig
from qkflow.data.tasks.base import existing, numbered
from qkflow.errors import UsageError

FIRST = Instance(tokens=(2, 3), label=0, rationale=(1,))
SECOND = Instance(tokens=(4,), label=1, rationale=(0,))


def task(**changes: Any) -> Task:
    parts: dict[str, Any] = {
        "name": "signs",
        "kind": "classification",
        "words": ("<pad>", "<unk>", "a", "b", "c"),
        "classes": ("no", "yes"),
        "train": (FIRST, SECOND),
        "validation": (FIRST,),
        "test": (SECOND,),
    }
    return Task(**{**parts, **changes})


@pytest.mark.parametrize("part", ["train", "validation", "test"])
@pytest.mark.parametrize(
    "wrong",
    [
        {"label": 2},
        {"label": -1},
        {"tokens": (2, 5)},
        {"tokens": (2, -1)},
        {"answer": (0, 5)},
    ],
)
def test_a_label_or_a_word_that_is_not_known_is_refused(part: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"an instance of {part} has a label or a word that is not known"):
        task(**{part: (FIRST, SECOND, replace(FIRST, **wrong))})


@pytest.mark.parametrize("part", ["train", "validation", "test"])
def test_a_part_without_instances_is_refused(part: str) -> None:
    with pytest.raises(UsageError, match=f"has no {part} instances"):
        task(**{part: ()})


def test_a_label_that_training_never_shows_is_refused_by_its_name() -> None:
    with pytest.raises(UsageError, match="no training instance has the label 'yes'"):
        task(train=(FIRST,))


def test_a_generated_answer_may_be_new_but_begins_with_its_label() -> None:
    words = task().words
    right = Instance(tokens=(2,), label=3, rationale=(), answer=(3, 4))
    made = task(kind="generation", classes=words, train=(right,), validation=(right,), test=(replace(right, label=3),))
    assert made.test[0].answer == (3, 4)
    new = replace(right, label=2, answer=(2, 4))
    assert task(kind="generation", classes=words, train=(right,), validation=(new,), test=(new,)).kind == "generation"
    for wrong in ((), (4, 3)):
        with pytest.raises(UsageError, match="an answer that its label does not begin"):
            task(kind="generation", classes=words, train=(replace(right, answer=wrong),))


@pytest.mark.parametrize("places", [{"rationale": (2,)}, {"rationale": (-1,)}, {"kept": (5,)}])
def test_a_place_outside_of_the_text_is_refused(places: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="outside of it"):
        replace(FIRST, **places)


def test_an_instance_without_a_text_is_refused() -> None:
    with pytest.raises(UsageError, match="an instance of 0 tokens"):
        Instance(tokens=(), label=0, rationale=())


@pytest.mark.parametrize(
    "changes",
    [
        {"words": ("<pad>", "<unk>", "a", "b", "d")},
        {"train": (SECOND, FIRST)},
        {"test": (replace(SECOND, rationale=()),)},
        {"validation": (SECOND,)},
        {"classes": ("no", "perhaps")},
    ],
)
def test_the_digest_tells_tasks_apart(changes: dict[str, Any]) -> None:
    assert task().digest == task().digest == task(notes=("another note",)).digest
    assert task(**changes).digest != task().digest


def test_words_are_numbered_by_how_often_they_occur() -> None:
    texts = [["b", "a", "c"], ["a", "c", "a"], ["b", "d"]]
    assert list(numbered(texts)) == ["<pad>", "<unk>", "a", "b", "c"]
    assert list(numbered(texts, most=3)) == ["<pad>", "<unk>", "a"]
    assert list(numbered(texts, least=1))[-1] == "d"
    assert list(numbered(texts, most=1)) == ["<pad>", "<unk>"]


def test_a_config_that_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'squad'"):
        from_dict(TaskConfig, {"name": "squat"})
    for name in ("train", "test", "longest", "vocabulary"):
        with pytest.raises(UsageError, match=f"{name} must be at least 1, got 0"):
            TaskConfig(**{name: 0})


def test_data_that_are_missing_are_asked_for() -> None:
    with pytest.raises(UsageError, match="the task squad needs its data: give --data PATH, a folder"):
        existing(None, "squad", "a folder")
    with pytest.raises(UsageError, match="there is no /nowhere/at/all: give --data PATH, a folder"):
        existing("/nowhere/at/all", "squad", "a folder")
