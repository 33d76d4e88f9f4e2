"""SQuAD sentences: one with the answer and one without, of the same text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qkflow.data.tasks import Task, TaskConfig, open_task

CONTEXT = "The tall tower was built in 1889 . Many people visit it in summer . The river is near the tower ."


@pytest.fixture
def task(tmp_path: Path) -> Task:
    entry = {
        "question": "When was it built?",
        "answers": [{"text": "1889", "answer_start": CONTEXT.index("1889")}],
    }
    articles = [{"paragraphs": [{"context": CONTEXT, "qas": [entry]}]} for _ in range(40)]
    for name in ("train.json", "dev.json"):
        (tmp_path / name).write_text(json.dumps({"data": articles}))
    return open_task(TaskConfig(name="squad-sentences", data=str(tmp_path)))


def test_a_question_comes_with_its_answer_sentence_and_with_another(task: Task) -> None:
    with_answer, without = task.test[:2]
    words = [task.words[token] for token in with_answer.tokens]
    assert words[:5] == ["when", "was", "it", "built", "?"]
    assert " ".join(words[6:-1]) == "the tall tower was built in 1889 ."
    assert [words[position] for position in with_answer.rationale] == ["1889"]
    assert (with_answer.label, without.label, without.rationale) == (1, 0, ())
    assert "1889" not in [task.words[token] for token in without.tokens]
    assert without.tokens[:6] == with_answer.tokens[:6]


def test_the_question_and_the_query_token_are_never_deleted(task: Task) -> None:
    instance = task.test[0]
    assert instance.protected == (*range(6), len(instance.tokens) - 1)


def test_answers_and_non_answers_are_balanced(task: Task) -> None:
    assert 2 * sum(instance.label for instance in task.train) == len(task.train)
