"""Words as numbers, and the seeded choice."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data.tasks.vocab import ASK, RESERVED, read, subsample, vocabulary

TEXTS = st.lists(st.lists(st.sampled_from(["a", "b", "c", *sorted(RESERVED)])))


@given(texts=TEXTS, most=st.integers(1, 8))
@settings(deadline=None, max_examples=25)
def test_numbers_are_places_and_no_word_of_a_text_is_a_marker(texts: list[list[str]], most: int) -> None:
    numbers = vocabulary(texts, markers=(ASK,), most=most)
    assert list(numbers.values()) == list(range(len(numbers)))
    assert len(numbers) <= max(3, most)
    assert numbers[ASK] not in {token for text in texts for token in read(text, numbers)}


@given(seed=st.integers(0, 100), most=st.integers(1, 50))
@settings(deadline=None, max_examples=25)
def test_a_choice_keeps_the_order_and_rests_on_the_seed(seed: int, most: int) -> None:
    chosen = subsample(range(50), most, seed)
    assert len(chosen) == most
    assert list(chosen) == sorted(set(chosen))
    assert chosen == subsample(range(50), most, seed)


def test_another_seed_chooses_others() -> None:
    assert subsample(range(50), 10, 0) != subsample(range(50), 10, 1)
