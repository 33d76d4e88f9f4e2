"""Needle tasks: each text has one needle, at its depth, with one right answer."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data.recall import Needle, RecallCell, needle_words
from qkflow.errors import UsageError

QUICK = settings(deadline=None, max_examples=25)
LONGEST = max(len(pattern.split()) for pattern in (*needle_words.VARIED, *needle_words.REPEATED))
OVERHEAD = len(needle_words.NEEDLE.split()) + len(needle_words.QUESTION.split()) - 2


def decode(config: Needle, row: np.ndarray) -> list[str]:
    return [config.words[token] for token in row]


OPTIONS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from((1, 2, 3)),
        "answer": st.sampled_from((None, "number", "id", "word")),
        "digits": st.integers(1, 6),
        "characters": st.integers(1, 14),
    }
)


@QUICK
@given(kwargs=OPTIONS, spare=st.integers(0, 150), depth=st.integers(0, 100), seed=st.integers(0, 2**65))
def test_text_has_one_needle_at_its_depth_and_one_answer(
    kwargs: dict[str, Any], spare: int, depth: int, seed: int
) -> None:
    config = Needle(**kwargs)
    size = {"number": config.digits, "id": config.characters, "word": 1}[config.answer_kind]
    length = OVERHEAD + 2 * size + spare
    instances = config.draw(RecallCell(None, length, depth), seed=seed, count=4)
    assert instances.tokens.shape == (4, length)
    assert instances.answers.tolist() == [[n, length - size, length] for n in range(4)]
    assert instances.cells.tolist() == [(-1, length, depth)] * 4
    for row in instances.tokens:
        words = decode(config, row)
        answer, key = words[-size:], words[-size - 4]
        assert key in needle_words.KEYS
        question = needle_words.QUESTION.replace("WHAT", config.answer_kind).replace("KEY", key)
        assert words[-size - 9 :] == question.replace("ANSWER", " ".join(answer)).split()

        needle = needle_words.NEEDLE.replace("WHAT", config.answer_kind).replace("KEY", key)
        needle = needle.replace("ANSWER", " ".join(answer)).split()
        text = words[: -size - 9]
        positions = [t for t in range(len(text)) if text[t : t + len(needle)] == needle]
        assert len(positions) == 1
        assert abs(100 * positions[0] - depth * spare) <= 50 * LONGEST
        assert positions[0] == 0 or text[positions[0] - 1] == "."
        hay = text[: positions[0]] + text[positions[0] + len(needle) :]
        assert len(hay) == spare
        assert set(hay) <= set(needle_words.HAYSTACK)
        assert not {key, *answer, config.answer_kind} & set(hay)
        assert not hay or hay[-1] == "."


@pytest.mark.parametrize("kind", [1, 2, 3])
def test_haystacks_are_complete_sentences_except_the_last(kind: int) -> None:
    config = Needle(kind=kind)
    patterns = [pattern.split() for pattern in (needle_words.REPEATED if kind == 1 else needle_words.VARIED)]
    instances = config.draw(RecallCell(None, 300, 100), seed=0, count=3)
    for row in instances.tokens:
        text = " ".join(decode(config, row)).split(f" the {config.answer_kind} of ")[0].removesuffix(" .")
        for number, sentence in enumerate(text.split(" . ")[:-1]):
            words = [*sentence.split(), "."]
            fits = [
                len(words) == len(pattern)
                and all(w in needle_words.LISTS.get(p, (p,)) for w, p in zip(words, pattern, strict=True))
                for pattern in patterns
            ]
            assert any(fits)
            if kind == 1:
                assert fits[number % len(patterns)]


def test_only_the_first_kind_has_a_repeated_haystack() -> None:
    plain, varied = (Needle(kind=kind).draw(RecallCell(None, 400, 0), seed=0, count=2).tokens for kind in (1, 2))
    period = sum(len(sentence.split()) for sentence in needle_words.REPEATED)
    hay = slice(11, 380)
    assert (plain[0, hay][period:] == plain[0, hay][:-period]).all()
    assert (plain[0, hay] == plain[1, hay]).all()
    assert (varied[0, hay] == varied[1, hay]).mean() < 0.4
    assert max((varied[0, hay][step:] == varied[0, hay][:-step]).mean() for step in range(1, 200)) < 0.5


def test_word_lists_are_disjoint_and_kinds_share_a_vocabulary() -> None:
    lists = [needle_words.HAYSTACK, needle_words.KEYS, needle_words.ANSWERS, needle_words.CHARACTERS]
    for first, second in combinations(lists, 2):
        assert not set(first) & set(second)
    assert sum(map(len, needle_words.LISTS.values())) == len(
        {w for words in needle_words.LISTS.values() for w in words}
    )
    assert sum(map(len, needle_words.LISTS.values())) >= 150
    assert len(needle_words.KEYS) == len(needle_words.ANSWERS) == 64
    assert len(set(needle_words.WORDS)) == len(needle_words.WORDS)
    assert Needle(kind=1).words == Needle(kind=3, answer="word", length=512).words


@pytest.mark.parametrize(
    ("config", "answers"),
    [
        (Needle(kind=1, digits=1), 10),
        (Needle(kind=2, answer="word"), 64),
        (Needle(kind=3, characters=2), 256),
    ],
)
def test_chance_is_the_accuracy_of_guessing(config: Needle, answers: int) -> None:
    assert config.chance == 1 / answers
    instances = config.draw(RecallCell(None, 60, None), seed=0, count=40 * answers)
    begin = instances.answers[0, 1]
    _, counts = np.unique(instances.tokens[:, begin:], axis=0, return_counts=True)
    assert len(counts) == answers
    assert counts.max() < 80
    assert Needle().chance == 10.0**-5
    assert Needle(kind=3).chance == 16.0**-12


def test_training_depths_are_uniform_and_recorded() -> None:
    config = Needle(kind=2)
    instances = config.draw(RecallCell(None, 100, None), seed=0, count=2000)
    assert np.bincount(instances.cells["depth"], minlength=101).min() >= 5
    key = config.words.index("number")
    begin = (instances.tokens == key).argmax(axis=1) - 1
    hay_length = 100 - OVERHEAD - 2 * config.digits
    assert (np.abs(100 * begin - instances.cells["depth"] * hay_length) <= 50 * LONGEST).all()


def test_instance_depends_only_on_seed_and_index() -> None:
    config = Needle(kind=2, length=90)
    whole, later = config.draw(seed=3, count=9), config.draw(seed=3, count=4, first=5)
    np.testing.assert_array_equal(later.tokens, whole.tokens[5:])
    np.testing.assert_array_equal(later.cells, whole.cells[5:])


def test_default_test_lengths_are_multiples_up_to_8192() -> None:
    assert Needle().test_lengths == (256, 512, 1024, 2048)
    assert Needle(length=4096).test_lengths == (4096, 8192)
    assert Needle(length=9000).test_lengths == (9000,)
    cells = Needle(lengths=(64, 128), depths=(0, 100)).grid()
    assert [(cell.length, cell.depth) for cell in cells] == [(64, 0), (64, 100), (128, 0), (128, 100)]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"length": 24},
            "needle of 11 tokens and a question with answer of 14 tokens do not fit into length 24: use a length of 25",
        ),
        (
            {"kind": 3, "characters": 300},
            "needle of 306 tokens .* 309 tokens do not fit into length 256: use a length of 615",
        ),
        ({"lengths": (256, 8)}, "do not fit into length 8"),
        ({"depths": (0, 101)}, "depth must be from 0 to 100 percent, got 101"),
        ({"depths": (-1,)}, "depths must be at least 0, got -1"),
        ({"digits": 0}, "digits must be at least 1, got 0"),
    ],
)
def test_invalid_options_raise(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Needle(**kwargs)


def test_length_argument_is_checked() -> None:
    with pytest.raises(UsageError, match="do not fit into length 20"):
        Needle().draw(RecallCell(None, 20, None), seed=0, count=1)
