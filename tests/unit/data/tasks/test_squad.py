"""SQuAD: answers and their positions, and articles that are in one split only."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data.tasks import Instance, Task, TaskConfig
from qkflow.data.tasks.squad import split_words, squad
from qkflow.errors import UsageError


def paragraph(context: str, question: str, *answers: str | tuple[str, int]) -> dict[str, Any]:
    """Return a paragraph with one question; an answer without an offset is at its first occurrence."""
    pairs = [answer if isinstance(answer, tuple) else (answer, context.index(answer)) for answer in answers]
    answer_rows = [{"text": text, "answer_start": start} for text, start in pairs]
    return {"context": context, "qas": [{"id": "1", "question": question, "answers": answer_rows}]}


def write(path: Path, articles: list[list[dict[str, Any]]]) -> None:
    text = json.dumps(
        {"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs} for paragraphs in articles]}
    ).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


TEXT = "It was built in 1889, near the river; Eiffel's tower stands."


def training_articles() -> list[list[dict[str, Any]]]:
    return [[paragraph(f"{TEXT} Number {n}.", "When was it built?", "1889")] for n in range(40)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "nyt_v1.0.json.gz", training_articles())
    write(tmp_path / "squaddev_v1.1.json", [[paragraph("Dev. " + TEXT, "Whose tower?", "Eiffel's tower")]])
    return tmp_path


def decode(task: Task, tokens: tuple[int, ...]) -> str:
    return " ".join(task.words[token] for token in tokens)


def test_instance_is_context_question_and_answer(folder: Path) -> None:
    task = squad(folder, TaskConfig(name="squad"))
    instance = task.train[0]
    text = decode(task, instance.tokens)
    assert text.startswith("it was built in 1889 , near the river ; eiffel ' s tower stands . number ")
    assert text.endswith(" . <question> when was it built ? <answer>")
    assert decode(task, instance.answer) == "1889 <end>"
    assert (instance.label, instance.rationale) == (instance.answer[0], (4,))
    assert (
        decode(task, tuple(instance.tokens[position] for position in instance.protected))
        == "<question> when was it built ? <answer>"
    )
    assert task.kind == "generation"
    assert task.classes == task.words


def test_rationale_is_the_answer_including_punctuation(folder: Path) -> None:
    (instance,) = squad(folder, TaskConfig(name="squad")).test
    task = squad(folder, TaskConfig(name="squad"))
    assert decode(task, tuple(instance.tokens[position] for position in instance.rationale)) == "eiffel ' s tower"
    assert instance.kind == "squaddev_v1.1"


def test_dev_file_is_the_test_split(folder: Path) -> None:
    task = squad(folder, TaskConfig(name="squad"))
    assert {instance.kind for instance in (*task.train, *task.validation)} == {"nyt_v1.0"}
    assert task.notes[0] == "trained on nyt_v1.0, validated on 5 % of its articles, tested on squaddev_v1.1"


def test_train_file_takes_precedence(folder: Path) -> None:
    write(folder / "train-v1.1.json", training_articles())
    task = squad(folder, TaskConfig(name="squad"))
    assert {instance.kind for instance in task.train} == {"train-v1.1"}
    assert "not used: nyt_v1.0" in task.notes[0]


def contexts(instances: tuple[Instance, ...]) -> set[tuple[int, ...]]:
    return {instance.tokens[: instance.protected[0]] for instance in instances}


def test_articles_of_a_single_file_are_in_one_split(tmp_path: Path) -> None:
    write(
        tmp_path / "one.json", [[paragraph(f"Text {n} says yes.", "What?", "yes") for n in (m, m)] for m in range(20)]
    )
    task = squad(tmp_path / "one.json", TaskConfig(name="squad"))
    assert (len(task.train), len(task.validation), len(task.test)) == (34, 2, 4)
    assert not contexts(task.train) & contexts(task.test)
    assert not contexts(task.train) & contexts(task.validation)


def test_paragraphs_of_a_single_article_count_as_articles(tmp_path: Path) -> None:
    write(tmp_path / "reddit.json", [[paragraph(f"Text {n} says yes.", "What?", "yes") for n in range(20)]])
    task = squad(tmp_path, TaskConfig(name="squad"))
    assert (len(task.train), len(task.validation), len(task.test)) == (17, 1, 2)


def test_unusable_questions_are_skipped_and_counted(folder: Path) -> None:
    long = " ".join(["word"] * 300)
    odd = [
        paragraph("The towers stand.", "What?", ("tower", 4)),
        paragraph("The towers stand.", "What?", ("stands", 4)),
        paragraph("The towers stand.", "What?"),
        paragraph(long, "What?", ("word", 0)),
    ]
    write(folder / "reddit_v1.0.json", [odd, *training_articles()])
    assert squad(folder, TaskConfig(name="squad")).skipped == {
        "no answer starts and ends at word borders": 2,
        "no answer given": 1,
        "longer than 256 tokens": 1,
    }


def test_first_answer_at_word_borders_is_used(folder: Path) -> None:
    write(folder / "squaddev_v1.1.json", [[paragraph(TEXT, "Where?", ("iver", 32), " river")]])
    task = squad(folder, TaskConfig(name="squad"))
    assert decode(task, task.test[0].answer) == "river <end>"


def test_unknown_answers_are_dropped_in_training_and_kept_in_test(folder: Path) -> None:
    write(folder / "reddit_v1.0.json", [[paragraph(f"Once {'x' * n} came.", "Who?", "x" * n)] for n in range(1, 60)])
    write(folder / "squaddev_v1.1.json", [[paragraph("In Zanzibar it was.", "Where?", "In Zanzibar")]])
    task = squad(folder, TaskConfig(name="squad"))
    held_out = sum(instance.kind == "reddit_v1.0" for instance in task.validation)
    assert task.skipped == {"training answers with words outside the vocabulary": 59 - held_out}
    assert len(task.train) + len(task.validation) == 40 + held_out
    assert decode(task, task.test[0].answer) == "in <unseen> <end>"
    assert decode(task, task.test[0].tokens).startswith("in <unk> it")
    assert "1 of 1 test answers have words outside the vocabulary" in task.notes[1]
    assert task.words.index("<unseen>") not in {token for instance in task.train for token in instance.tokens}


def test_context_counts_once_in_the_vocabulary(folder: Path) -> None:
    both = paragraph("Zebras ran.", "Who?", "ran")
    write(folder / "nyt_v1.0.json.gz", [[{**both, "qas": both["qas"] * 3}], *training_articles()])
    task = squad(folder, TaskConfig(name="squad", seed=1))
    assert "who" in task.words
    assert "zebras" not in task.words


def test_vocabulary_limit(folder: Path) -> None:
    assert len(squad(folder, TaskConfig(name="squad", vocabulary=12)).words) == 12


@given(text=st.text(max_size=40))
@settings(deadline=None, max_examples=25)
def test_split_words_covers_everything_except_spaces(text: str) -> None:
    words = split_words(text)
    assert [text[start:end].lower() for _, start, end in words] == [word for word, _, _ in words]
    assert "".join(text[start:end] for _, start, end in words) == "".join(text.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("[]", "holds a list"),
        ("{", "is not valid JSON"),
        ("{}", "no list of articles"),
        ('{"data": [{"paragraphs": [{"context": "a"}]}]}', "malformed article"),
        ('{"data": [1]}', "malformed article"),
    ],
)
def test_invalid_file_raises_one_line_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UsageError, match=message) as error:
        squad(tmp_path, TaskConfig(name="squad"))
    assert "\n" not in str(error.value)


def test_folder_without_json_files_raises(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"contains no \.json files: expected SQuAD"):
        squad(tmp_path, TaskConfig(name="squad"))
