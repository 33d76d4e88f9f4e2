"""SQuAD entities: the question, the sentence with its answer, and rare words as numbered markers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from qkflow.data.tasks import Task, TaskConfig, open_task

CONTEXT = "The tower of {0} was built in 1889 . Many people visit the tower . The works were large ."
QUESTIONS = {
    "When was the tower of {0} built?": "1889",
    "Who built the tower?": "{0}",
    "What was built?": "The tower of {0} was",
    "What is large?": "The tower",
    "What is in the text?": "{0} was built in 1889",
    "What is visited?": "the tower . The works",
}


def article(name: str) -> dict[str, Any]:
    """An article about somebody whose name, two words, occurs in no other article."""
    context = CONTEXT.format(name)
    answers = {question.format(name): answer.format(name) for question, answer in QUESTIONS.items()}
    questions = [
        {"question": question, "answers": [{"text": answer, "answer_start": context.index(answer)}]}
        for question, answer in answers.items()
    ]
    return {"paragraphs": [{"context": context, "qas": questions}]}


@pytest.fixture
def task(tmp_path: Path) -> Task:
    names = [f"G{a}{b} E{b}{a}" for a, b in itertools.product("abcdefgh", repeat=2)]
    for file, some in (("train.json", names[:56]), ("dev.json", names[56:])):
        (tmp_path / file).write_text(json.dumps({"data": [article(name) for name in some]}))
    return open_task(TaskConfig(name="squad-entities", data=str(tmp_path), vocabulary=19))


def words_of(task: Task, index: int) -> list[str]:
    return [task.words[token] for token in task.test[index].tokens]


def test_rare_words_and_numbers_become_markers_that_the_question_shares(task: Task) -> None:
    words = words_of(task, 0)
    entity, number = words[5], words[-3]
    assert entity.startswith("<entity ")
    assert number.startswith("<number ")
    assert " ".join(words) == (
        f"when was the tower of {entity} built ? <question> the tower of {entity} was built in {number} . <ask>"
    )


def test_the_label_is_the_number_of_the_marker_and_the_rationale_its_position(task: Task) -> None:
    for index, instance in enumerate(task.test):
        (position,) = instance.rationale
        assert words_of(task, index)[position].split()[1] == f"{task.classes[instance.label]}>"
    kinds = [words_of(task, index)[task.test[index].rationale[0]].split()[0] for index in range(3)]
    assert kinds == ["<number", "<entity", "<entity"]


def test_numbers_of_markers_carry_no_information(task: Task) -> None:
    labels = [instance.label for instance in task.train]
    assert set(labels) == set(range(16))
    assert max(map(labels.count, labels)) < 0.15 * len(labels)


def test_answers_that_are_not_one_entity_are_skipped_and_counted(task: Task) -> None:
    n_validation = len(task.validation) // 3
    assert (len(task.test), len(task.train)) == (3 * 8, 4 * 3 * (56 - n_validation))
    questions = 8 + n_validation + 4 * (56 - n_validation)
    assert task.skipped == {"answer is not one entity": 2 * questions, "answer in more than one sentence": questions}


def test_the_question_and_the_query_token_are_never_deleted(task: Task) -> None:
    instance = task.test[0]
    assert instance.protected == (*range(9), len(instance.tokens) - 1)
