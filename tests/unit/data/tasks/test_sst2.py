"""SST-2: a test part that shares no phrase with the training part."""

from __future__ import annotations

from pathlib import Path

import pytest

from qkflow.data.tasks import TaskConfig, open_task
from qkflow.errors import UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A training file of sentences, their halves, and single words."""
    lines = ["sentence\tlabel"]
    for number in range(60):
        words = [f"w{number}x{position % 7}" for position in range(10)]
        label = number % 2
        lines += [f"{' '.join(part)} \t{label}" for part in (words, words[:5], words[5:], ["good" if label else "bad"])]
    (tmp_path / "train.tsv").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_no_training_phrase_contains_a_held_out_phrase_or_is_part_of_one(folder: Path) -> None:
    task = open_task(TaskConfig(name="sst2", data=str(folder)))
    text = {
        split: [tuple(task.words[token] for token in instance.tokens[:-1]) for instance in getattr(task, split)]
        for split in ("train", "validation", "test")
    }
    assert text["test"]
    assert text["validation"]
    assert all(len(phrase) >= 8 for phrase in (*text["test"], *text["validation"]))
    sentences = {
        line.partition("\t")[0].strip(): number // 4
        for number, line in enumerate((folder / "train.tsv").read_text().splitlines()[1:])
    }
    trained = sum(len(phrase) > 1 for phrase in text["train"])
    held_out = len(text["test"]) + len(text["validation"])
    assert trained == 3 * (len({*sentences.values()}) - held_out)  # whole sentences leave with their parts
    assert task.skipped == {"phrases that contain a test or validation phrase, or are part of one": 2 * held_out}
    assert all(not instance.rationale for instance in task.test)


@pytest.mark.parametrize("content", ["a phrase without a label\n", "a phrase\t2\n"])
def test_lines_without_a_label_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "train.tsv").write_text(content)
    with pytest.raises(UsageError, match=r"train\.tsv:1"):
        open_task(TaskConfig(name="sst2", data=str(tmp_path)))


def test_a_folder_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"one file train\.tsv"):
        open_task(TaskConfig(name="sst2", data=str(tmp_path)))
