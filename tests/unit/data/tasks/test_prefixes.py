"""Splitting by template and noun leaks nothing from test to training."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data.tasks import TaskConfig
from qkflow.data.tasks.prefixes import Prefix, prefix_task, split_by_noun
from qkflow.errors import UsageError

PAIRS = st.sets(st.tuples(st.sampled_from("abcdef"), st.integers(0, 25).map(str)), min_size=1)


@given(pairs=PAIRS, seed=st.integers(0, 100))
@settings(deadline=None, max_examples=25)
def test_every_pair_has_a_split_and_every_noun_is_trained(pairs: set[tuple[str, str]], seed: int) -> None:
    split_of = split_by_noun(pairs, seed)
    assert split_of.keys() == pairs
    assert {noun for (_, noun), split in split_of.items() if split == "train"} == {noun for _, noun in pairs}


@given(seed=st.integers(0, 100))
@settings(deadline=None, max_examples=10)
def test_each_template_holds_out_a_fifth_of_its_nouns(seed: int) -> None:
    split_of = split_by_noun([(template, str(noun)) for template in "abcd" for noun in range(20)], seed)
    for template in "abcd":
        assert sum(split == "test" for (name, _), split in split_of.items() if name == template) == 4
        assert sum(split == "validation" for (name, _), split in split_of.items() if name == template) == 2


def test_other_seed_holds_out_other_nouns() -> None:
    pairs = [(template, str(noun)) for template in "ab" for noun in range(20)]
    assert split_by_noun(pairs, 0) != split_by_noun(pairs, 1)


def prefix(template: str, noun: str) -> Prefix:
    return Prefix(words=(template, noun), label=int(noun) % 2, head=1, noun=noun, template=template, kind=template)


def test_repeated_prefixes_are_dropped_and_counted() -> None:
    prefixes = [prefix(template, str(noun)) for template in "abc" for noun in range(20)]
    task = prefix_task("t", [*prefixes, *prefixes], TaskConfig(), skipped={"odd": 2}, notes=("n",))
    assert len(task.train) + len(task.validation) + len(task.test) == 60
    assert task.skipped == {"odd": 2, "repeated prefixes": 60}
    assert task.notes[-1] == "n"


def test_limits_subsample_by_seed() -> None:
    prefixes = [prefix(template, str(noun)) for template in "abc" for noun in range(20)]
    first, again, other = (
        prefix_task("t", prefixes, TaskConfig(train=12, test=5, seed=seed), skipped={}, notes=()) for seed in (0, 0, 1)
    )
    assert (len(first.train), len(first.validation), len(first.test)) == (12, 5, 5)
    assert first.digest == again.digest != other.digest


def test_too_few_nouns_raise() -> None:
    with pytest.raises(UsageError, match="2 sentences with 2 subject nouns in 1 templates are too few"):
        prefix_task("t", [prefix("a", "0"), prefix("a", "1")], TaskConfig(), skipped={}, notes=())
