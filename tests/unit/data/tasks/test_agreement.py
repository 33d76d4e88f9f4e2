"""The built-in grammar: only the head noun determines the label, and the splits share no template-noun pair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data.tasks import Instance, Task, TaskConfig
from qkflow.data.tasks.agreement import OPENING_ADVERBS, OTHERS, PREPOSITIONS, SIZES, SUBJECTS, VERBS, agreement
from qkflow.errors import UsageError

NUMBER = {form: number for noun in (*SUBJECTS, *OTHERS) for number, form in enumerate(noun)}
LEMMA = {form: noun[0] for noun in SUBJECTS for form in noun}


@pytest.fixture(scope="module")
def task() -> Task:
    return agreement(TaskConfig(train=2000))


def words_of(task: Task, instance: Instance) -> list[str]:
    return [task.words[token] for token in instance.tokens]


def nouns(task: Task, instance: Instance) -> list[int]:
    return [position for position, word in enumerate(words_of(task, instance)) if word in NUMBER]


def test_sentences_are_distinct_and_as_many_as_requested(task: Task) -> None:
    assert SIZES == {"train": 20000, "validation": 500, "test": 1000}
    instances = (*task.train, *task.validation, *task.test)
    assert (len(task.train), len(task.validation), len(task.test)) == (2000, 500, 1000)
    assert len({instance.tokens for instance in instances}) == 3500
    assert all(task.words.index("<unk>") not in instance.tokens for instance in instances)


def test_rationale_is_the_head_noun(task: Task) -> None:
    for instance in task.test:
        (head,) = instance.rationale
        assert NUMBER[words_of(task, instance)[head]] == instance.label
        assert f"{sum(position > head for position in nouns(task, instance))} attractor" in instance.kind


def test_attractors_and_labels_are_balanced(task: Task) -> None:
    assert set(Counter((instance.kind, instance.label) for instance in task.train).values()) == {200}


def guess_last_noun(task: Task, instance: Instance) -> int:
    return NUMBER[words_of(task, instance)[nouns(task, instance)[-1]]]


def guess_most_other_nouns(task: Task, instance: Instance) -> int:
    numbers = [NUMBER[words_of(task, instance)[n]] for n in nouns(task, instance) if n not in instance.rationale]
    return int(2 * sum(numbers) > len(numbers))


def guess_last_verb(task: Task, instance: Instance) -> int:
    numbers = {form: number for verb in VERBS for number, form in enumerate(verb[:2])}
    return next((numbers[word] for word in reversed(words_of(task, instance)) if word in numbers), 0)


def guess_first_other_noun(task: Task, instance: Instance) -> int:
    others = [n for n in nouns(task, instance) if n not in instance.rationale]
    return NUMBER[words_of(task, instance)[others[0]]]


@pytest.mark.parametrize(
    "guess",
    [guess_last_noun, guess_most_other_nouns, guess_last_verb, guess_first_other_noun],
    ids=lambda guess: guess.__name__,
)
def test_rules_without_the_head_noun_are_at_chance(task: Task, guess: Callable[[Task, Instance], int]) -> None:
    instances = [instance for instance in task.train if instance.kind != "0 attractors"]
    assert sum(guess(task, instance) == instance.label for instance in instances) / len(instances) == pytest.approx(
        0.5, abs=0.04
    )


def test_no_other_word_correlates_with_the_label(task: Task) -> None:
    counts: dict[str, Counter[int]] = {}
    for instance in task.train:
        for position, word in enumerate(words_of(task, instance)):
            if position not in instance.rationale:
                counts.setdefault(word, Counter())[instance.label] += 1
    for count in counts.values():
        assert abs(count[0] - count[1]) < 5 * count.total() ** 0.5


def test_verb_in_a_clause_agrees_with_its_own_subject(task: Task) -> None:
    numbers = {form: number for verb in VERBS for number, form in enumerate(verb[:2])}
    n_checked = 0
    for instance in task.test:
        words = words_of(task, instance)
        for verb in (position for position, word in enumerate(words) if word in numbers):
            before = [noun for noun in nouns(task, instance) if noun < verb]
            clause = max((n for n in range(verb) if words[n : n + 2] == ["that", "the"]), default=None)
            subject = before[-1] if clause is None else next(noun for noun in before if noun > clause)
            assert NUMBER[words[subject]] == numbers[words[verb]]
            n_checked += 1
    assert n_checked > 300


def test_head_noun_has_many_positions(task: Task) -> None:
    positions = Counter(instance.rationale[0] for instance in task.train)
    assert len(positions) > 5
    assert positions[1] < 0.4 * len(task.train)


def test_template_noun_pairs_are_in_one_split(task: Task) -> None:
    def skeletons(instances: tuple[Instance, ...]) -> set[tuple[str, ...]]:
        return {
            (LEMMA[words_of(task, instance)[instance.rationale[0]]], *_skeleton(words_of(task, instance)))
            for instance in instances
        }

    train, validation, test = skeletons(task.train), skeletons(task.validation), skeletons(task.test)
    assert not train & test
    assert not train & validation
    assert not test & validation


def _skeleton(words: list[str]) -> list[str]:
    """Return the order of openings, nouns, clauses, prepositions and verbs, which the template determines."""
    kinds = (
        dict.fromkeys(OPENING_ADVERBS, "start")
        | {phrase.split()[0]: "prep" for phrase in PREPOSITIONS}
        | {"that": "that"}
    )
    kinds |= dict.fromkeys(NUMBER, "noun")
    for singular, plural, past in VERBS:
        kinds |= {singular: "verb", plural: "verb", past: "past"}
    return [kinds[word] for word in words if word in kinds]


def test_every_subject_noun_is_trained_in_both_numbers(task: Task) -> None:
    assert {words_of(task, instance)[instance.rationale[0]] for instance in task.train} == {
        form for noun in SUBJECTS for form in noun
    }


@given(seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=2)
def test_task_depends_on_the_seed(seed: int) -> None:
    config = TaskConfig(seed=seed, train=40, test=10)
    digest = agreement(config).digest
    assert digest == agreement(config).digest
    assert digest != agreement(TaskConfig(seed=seed + 1, train=40, test=10)).digest


def test_long_sentences_are_skipped_and_counted() -> None:
    task = agreement(TaskConfig(train=100, test=50, longest=6))
    assert max(len(instance.tokens) for instance in task.train) <= 6
    assert task.skipped == {"longer than 6 tokens": 200 - len(task.train) - len(task.validation) - len(task.test)}


def test_length_limit_that_excludes_all_sentences_raises() -> None:
    with pytest.raises(UsageError, match="no train instances"):
        agreement(TaskConfig(train=20, test=10, longest=1))
