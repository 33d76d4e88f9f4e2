"""The built-in grammar: only the head noun tells the number, and nothing of the test is in training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data.tasks import Instance, Task, TaskConfig
from qkflow.data.tasks.agreement import OTHERS, PREPOSITIONS, SIZES, STARTS, SUBJECTS, VERBS, agreement
from qkflow.errors import UsageError

NUMBER = {form: number for noun in (*SUBJECTS, *OTHERS) for number, form in enumerate(noun)}
LEMMA = {form: noun[0] for noun in SUBJECTS for form in noun}


@pytest.fixture(scope="module")
def task() -> Task:
    return agreement(TaskConfig(train=4000))


def spelled(task: Task, instance: Instance) -> list[str]:
    return [task.words[token] for token in instance.tokens]


def nouns(task: Task, instance: Instance) -> list[int]:
    return [place for place, word in enumerate(spelled(task, instance)) if word in NUMBER]


def test_there_are_as_many_distinct_sentences_as_asked_for_or_the_usual_number(task: Task) -> None:
    assert SIZES == {"train": 20000, "validation": 500, "test": 1000}
    everything = (*task.train, *task.validation, *task.test)
    assert (len(task.train), len(task.validation), len(task.test)) == (4000, 500, 1000)
    assert len({one.tokens for one in everything}) == 5500
    assert all(task.words.index("<unk>") not in one.tokens for one in everything)


def test_the_rationale_is_the_head_noun_and_its_number_the_label(task: Task) -> None:
    for one in task.test:
        (head,) = one.rationale
        assert NUMBER[spelled(task, one)[head]] == one.label
        assert f"{sum(place > head for place in nouns(task, one))} attractor" in one.kind


def test_kinds_and_labels_are_balanced(task: Task) -> None:
    assert set(Counter((one.kind, one.label) for one in task.train).values()) == {400}


def guess_last_noun(task: Task, one: Instance) -> int:
    return NUMBER[spelled(task, one)[nouns(task, one)[-1]]]


def guess_most_other_nouns(task: Task, one: Instance) -> int:
    found = [NUMBER[spelled(task, one)[place]] for place in nouns(task, one) if place not in one.rationale]
    return int(2 * sum(found) > len(found))


def guess_last_verb(task: Task, one: Instance) -> int:
    numbers = {form: number for verb in VERBS for number, form in enumerate(verb[:2])}
    return next((numbers[word] for word in reversed(spelled(task, one)) if word in numbers), 0)


def guess_first_other_noun(task: Task, one: Instance) -> int:
    others = [place for place in nouns(task, one) if place not in one.rationale]
    return NUMBER[spelled(task, one)[others[0]]]


@pytest.mark.parametrize(
    "guess",
    [guess_last_noun, guess_most_other_nouns, guess_last_verb, guess_first_other_noun],
    ids=lambda one: one.__name__,
)
def test_a_rule_that_does_not_look_at_the_head_noun_is_at_chance(
    task: Task, guess: Callable[[Task, Instance], int]
) -> None:
    asked = [one for one in task.train if one.kind != "0 attractors"]
    assert sum(guess(task, one) == one.label for one in asked) / len(asked) == pytest.approx(0.5, abs=0.04)


def test_no_word_but_the_head_noun_goes_with_a_number(task: Task) -> None:
    counts: dict[str, Counter[int]] = {}
    for one in task.train:
        for place, word in enumerate(spelled(task, one)):
            if place not in one.rationale:
                counts.setdefault(word, Counter())[one.label] += 1
    for count in counts.values():
        assert abs(count[0] - count[1]) < 5 * count.total() ** 0.5


def test_a_verb_inside_a_clause_agrees_with_the_subject_of_its_clause(task: Task) -> None:
    numbers = {form: number for verb in VERBS for number, form in enumerate(verb[:2])}
    checked = 0
    for one in task.test:
        words = spelled(task, one)
        for place in (place for place, word in enumerate(words) if word in numbers):
            before = [at for at in nouns(task, one) if at < place]
            clause = max((at for at in range(place) if words[at : at + 2] == ["that", "the"]), default=None)
            subject = before[-1] if clause is None else next(at for at in before if at > clause)
            assert NUMBER[words[subject]] == numbers[words[place]]
            checked += 1
    assert checked > 300


def test_the_head_noun_is_at_many_places(task: Task) -> None:
    places = Counter(one.rationale[0] for one in task.train)
    assert len(places) > 5
    assert places[1] < 0.4 * len(task.train)


def test_a_template_with_its_head_noun_is_in_one_part_only(task: Task) -> None:
    def skeletons(part: tuple[Instance, ...]) -> set[tuple[str, ...]]:
        return {(LEMMA[spelled(task, one)[one.rationale[0]]], *_skeleton(spelled(task, one))) for one in part}

    train, validation, test = skeletons(task.train), skeletons(task.validation), skeletons(task.test)
    assert not train & test
    assert not train & validation
    assert not test & validation


def _skeleton(words: list[str]) -> list[str]:
    """The order of openings, nouns, clauses, prepositions and verbs: what a template fixes."""
    kinds = dict.fromkeys(STARTS, "start") | {one.split()[0]: "prep" for one in PREPOSITIONS} | {"that": "that"}
    kinds |= dict.fromkeys(NUMBER, "noun")
    for singular, plural, past in VERBS:
        kinds |= {singular: "verb", plural: "verb", past: "past"}
    return [kinds[word] for word in words if word in kinds]


def test_every_subject_noun_is_trained_in_both_numbers(task: Task) -> None:
    assert {spelled(task, one)[one.rationale[0]] for one in task.train} == {form for noun in SUBJECTS for form in noun}


@given(seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=2)
def test_the_same_seed_gives_the_same_task_and_another_seed_another(seed: int) -> None:
    config = TaskConfig(seed=seed, train=40, test=10)
    digest = agreement(config).digest
    assert digest == agreement(config).digest
    assert digest != agreement(TaskConfig(seed=seed + 1, train=40, test=10)).digest


def test_long_sentences_are_skipped_and_counted() -> None:
    task = agreement(TaskConfig(train=100, test=50, longest=6))
    assert max(len(one.tokens) for one in task.train) <= 6
    assert task.skipped == {"longer than 6 tokens": 200 - len(task.train) - len(task.validation) - len(task.test)}


def test_a_limit_no_sentence_meets_is_refused() -> None:
    with pytest.raises(UsageError, match="no train instances"):
        agreement(TaskConfig(train=20, test=10, longest=1))
