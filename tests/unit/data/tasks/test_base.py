"""Validation of tasks, instances and their configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from qkflow.config import from_dict
from qkflow.data.tasks import Instance, Task, TaskConfig
from qkflow.data.tasks.vocab import build_vocabulary
from qkflow.errors import UsageError

FIRST = Instance(tokens=(2, 3), label=0, rationale=(1,))
SECOND = Instance(tokens=(4,), label=1, rationale=(0,))


def task(**changes: Any) -> Task:
    fields: dict[str, Any] = {
        "name": "signs",
        "kind": "classification",
        "words": ("<pad>", "<unk>", "a", "b", "c"),
        "classes": ("no", "yes"),
        "train": (FIRST, SECOND),
        "validation": (FIRST,),
        "test": (SECOND,),
    }
    return Task(**{**fields, **changes})


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_empty_split_raises(split: str) -> None:
    with pytest.raises(UsageError, match=f"has no {split} instances"):
        task(**{split: ()})


def test_label_missing_in_training_raises() -> None:
    with pytest.raises(UsageError, match="no training instance has the label 'yes'"):
        task(train=(FIRST,))


@pytest.mark.parametrize("positions", [{"rationale": (2,)}, {"rationale": (-1,)}, {"protected": (5,)}])
def test_position_outside_the_text_raises(positions: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="outside an instance of 2 tokens"):
        replace(FIRST, **positions)


def test_instance_without_tokens_raises() -> None:
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
def test_digest_depends_on_the_content(changes: dict[str, Any]) -> None:
    assert task().digest == task().digest == task(notes=("another note",)).digest
    assert task(**changes).digest != task().digest


def test_vocabulary_is_sorted_by_frequency() -> None:
    texts = [["b", "a", "c"], ["a", "c", "a"], ["b", "d"]]
    assert list(build_vocabulary(texts)) == ["<pad>", "<unk>", "a", "b", "c"]
    assert list(build_vocabulary(texts, max_size=3)) == ["<pad>", "<unk>", "a"]
    assert list(build_vocabulary(texts, min_count=1))[-1] == "d"
    assert list(build_vocabulary(texts, max_size=1)) == ["<pad>", "<unk>"]


def test_invalid_config_raises() -> None:
    with pytest.raises(UsageError, match="did you mean 'squad'"):
        from_dict(TaskConfig, {"name": "squat"})
    for name in ("train", "test", "longest", "vocabulary"):
        with pytest.raises(UsageError, match=f"{name} must be at least 1, got 0"):
            TaskConfig(**{name: 0})
