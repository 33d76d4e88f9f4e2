"""Word vocabularies and subsampling."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data.tasks.vocab import ASK, RESERVED, build_vocabulary, encode_words, subsample

TEXTS = st.lists(st.lists(st.sampled_from(["a", "b", "c", *sorted(RESERVED)])))


@given(texts=TEXTS, max_size=st.integers(1, 8))
@settings(deadline=None, max_examples=25)
def test_tokens_are_consecutive_and_no_word_becomes_a_marker(texts: list[list[str]], max_size: int) -> None:
    vocabulary = build_vocabulary(texts, markers=(ASK,), max_size=max_size)
    assert list(vocabulary.values()) == list(range(len(vocabulary)))
    assert len(vocabulary) <= max(3, max_size)
    assert vocabulary[ASK] not in {token for text in texts for token in encode_words(text, vocabulary)}


@given(seed=st.integers(0, 100), count=st.integers(1, 50))
@settings(deadline=None, max_examples=25)
def test_subsample_keeps_the_order_and_depends_on_the_seed(seed: int, count: int) -> None:
    chosen = subsample(range(50), count, seed)
    assert len(chosen) == count
    assert list(chosen) == sorted(set(chosen))
    assert chosen == subsample(range(50), count, seed)


def test_other_seed_gives_another_subsample() -> None:
    assert subsample(range(50), 10, 0) != subsample(range(50), 10, 1)
