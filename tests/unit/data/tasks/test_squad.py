"""SQuAD: the answer's words, where they stand, and articles that are in one part only."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data.tasks import Instance, Task, TaskConfig
from qkflow.data.tasks.squad import squad, words
from qkflow.errors import UsageError


def asked(context: str, question: str, *answers: str | tuple[str, int]) -> dict[str, Any]:
    """A paragraph with one question; an answer stands where it occurs first, unless told otherwise."""
    pairs = [one if isinstance(one, tuple) else (one, context.index(one)) for one in answers]
    given = [{"text": text, "answer_start": start} for text, start in pairs]
    return {"context": context, "qas": [{"id": "1", "question": question, "answers": given}]}


def stored(path: Path, articles: list[list[dict[str, Any]]]) -> None:
    text = json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": one} for one in articles]}).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


TEXT = "It was built in 1889, near the river; Eiffel's tower stands."


def training() -> list[list[dict[str, Any]]]:
    return [[asked(f"{TEXT} Number {n}.", "When was it built?", "1889")] for n in range(40)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    stored(tmp_path / "nyt_v1.0.json.gz", training())
    stored(tmp_path / "squaddev_v1.1.json", [[asked("Dev. " + TEXT, "Whose tower?", "Eiffel's tower")]])
    return tmp_path


def spelled(task: Task, tokens: tuple[int, ...]) -> str:
    return " ".join(task.words[token] for token in tokens)


def test_an_instance_is_context_question_and_answer(folder: Path) -> None:
    task = squad(folder, TaskConfig(name="squad"))
    one = task.train[0]
    text = spelled(task, one.tokens)
    assert text.startswith("it was built in 1889 , near the river ; eiffel ' s tower stands . number ")
    assert text.endswith(" . <question> when was it built ? <answer>")
    assert spelled(task, one.answer) == "1889 <end>"
    assert (one.label, one.rationale) == (one.answer[0], (4,))
    assert (
        spelled(task, tuple(one.tokens[place] for place in one.protected)) == "<question> when was it built ? <answer>"
    )
    assert task.kind == "generation"
    assert task.classes == task.words


def test_the_rationale_spells_the_answer_wherever_there_is_punctuation(folder: Path) -> None:
    (one,) = squad(folder, TaskConfig(name="squad")).test
    task = squad(folder, TaskConfig(name="squad"))
    assert spelled(task, tuple(one.tokens[place] for place in one.rationale)) == "eiffel ' s tower"
    assert one.kind == "squaddev_v1.1"


def test_shifts_train_and_dev_tests_and_the_notes_say_so(folder: Path) -> None:
    task = squad(folder, TaskConfig(name="squad"))
    assert {one.kind for one in (*task.train, *task.validation)} == {"nyt_v1.0"}
    assert task.notes[0] == "trained on nyt_v1.0, validated on 5 % of its articles, tested on squaddev_v1.1"


def test_squads_own_training_part_is_used_alone_where_it_is(folder: Path) -> None:
    stored(folder / "train-v1.1.json", training())
    task = squad(folder, TaskConfig(name="squad"))
    assert {one.kind for one in task.train} == {"train-v1.1"}
    assert "not used: nyt_v1.0" in task.notes[0]


def contexts(part: tuple[Instance, ...]) -> set[tuple[int, ...]]:
    return {one.tokens[: one.protected[0]] for one in part}


def test_no_article_is_in_two_parts_of_a_single_file(tmp_path: Path) -> None:
    stored(tmp_path / "one.json", [[asked(f"Text {n} says yes.", "What?", "yes") for n in (m, m)] for m in range(20)])
    task = squad(tmp_path / "one.json", TaskConfig(name="squad"))
    assert (len(task.train), len(task.validation), len(task.test)) == (34, 2, 4)
    assert not contexts(task.train) & contexts(task.test)
    assert not contexts(task.train) & contexts(task.validation)


def test_paragraphs_of_a_lone_article_are_articles(tmp_path: Path) -> None:
    stored(tmp_path / "reddit.json", [[asked(f"Text {n} says yes.", "What?", "yes") for n in range(20)]])
    task = squad(tmp_path, TaskConfig(name="squad"))
    assert (len(task.train), len(task.validation), len(task.test)) == (17, 1, 2)


def test_what_cannot_be_used_is_skipped_and_counted(folder: Path) -> None:
    long = " ".join(["word"] * 300)
    odd = [
        asked("The towers stand.", "What?", ("tower", 4)),
        asked("The towers stand.", "What?", ("stands", 4)),
        asked("The towers stand.", "What?"),
        asked(long, "What?", ("word", 0)),
    ]
    stored(folder / "reddit_v1.0.json", [odd, *training()])
    assert squad(folder, TaskConfig(name="squad")).skipped == {
        "no answer begins and ends with a word of the text": 2,
        "no answer given": 1,
        "longer than 256 tokens": 1,
    }


def test_a_later_answer_is_taken_where_the_first_cuts_a_word(folder: Path) -> None:
    stored(folder / "squaddev_v1.1.json", [[asked(TEXT, "Where?", ("iver", 32), " river")]])
    task = squad(folder, TaskConfig(name="squad"))
    assert spelled(task, task.test[0].answer) == "river <end>"


def test_unknown_answers_leave_training_and_stay_unanswerable_in_the_test(folder: Path) -> None:
    stored(folder / "reddit_v1.0.json", [[asked(f"Once {'x' * n} came.", "Who?", "x" * n)] for n in range(1, 60)])
    stored(folder / "squaddev_v1.1.json", [[asked("In Zanzibar it was.", "Where?", "In Zanzibar")]])
    task = squad(folder, TaskConfig(name="squad"))
    held_out = sum(one.kind == "reddit_v1.0" for one in task.validation)
    assert task.skipped == {"training answers with words outside the vocabulary": 59 - held_out}
    assert len(task.train) + len(task.validation) == 40 + held_out
    assert spelled(task, task.test[0].answer) == "in <unseen> <end>"
    assert spelled(task, task.test[0].tokens).startswith("in <unk> it")
    assert "1 of 1 test answers have words outside the vocabulary" in task.notes[1]
    assert task.words.index("<unseen>") not in {token for one in task.train for token in one.tokens}


def test_a_word_is_counted_once_however_many_questions_its_text_has(folder: Path) -> None:
    both = asked("Zebras ran.", "Who?", "ran")
    stored(folder / "nyt_v1.0.json.gz", [[{**both, "qas": both["qas"] * 3}], *training()])
    task = squad(folder, TaskConfig(name="squad", seed=1))
    assert "who" in task.words
    assert "zebras" not in task.words


def test_the_vocabulary_keeps_its_size(folder: Path) -> None:
    assert len(squad(folder, TaskConfig(name="squad", vocabulary=12)).words) == 12


@given(text=st.text(max_size=40))
@settings(deadline=None, max_examples=25)
def test_words_stand_where_they_say_and_cover_all_but_space(text: str) -> None:
    found = words(text)
    assert [text[start:end].lower() for _, start, end in found] == [word for word, _, _ in found]
    assert "".join(text[start:end] for _, start, end in found) == "".join(text.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("[]", "holds a list"),
        ("{", "is not JSON"),
        ("{}", "no list of articles"),
        ('{"data": [{"paragraphs": [{"context": "a"}]}]}', "not what it should be"),
        ('{"data": [1]}', "not what it should be"),
    ],
)
def test_a_file_of_another_format_is_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UsageError, match=message) as error:
        squad(tmp_path, TaskConfig(name="squad"))
    assert "\n" not in str(error.value)


def test_a_folder_without_questions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no \.json files: expected SQuAD"):
        squad(tmp_path, TaskConfig(name="squad"))
