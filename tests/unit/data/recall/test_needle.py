"""What single-needle retrieval promises of every text: one needle, at its depth, with one right answer."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data.recall import Needle, needles, vocabulary
from qkflow.errors import UsageError

QUICK = settings(deadline=None, max_examples=25)
LONGEST = max(len(pattern.split()) for pattern in (*vocabulary.VARIED, *vocabulary.DULL))
OVERHEAD = len(vocabulary.NEEDLE.split()) + len(vocabulary.QUESTION.split()) - 2


def spelled(config: Needle, row: np.ndarray) -> list[str]:
    return [config.words[token] for token in row]


ASKED = st.fixed_dictionaries(
    {
        "kind": st.sampled_from((1, 2, 3)),
        "answer": st.sampled_from((None, "number", "id", "word")),
        "digits": st.integers(1, 6),
        "characters": st.integers(1, 14),
    }
)


@QUICK
@given(asked=ASKED, spare=st.integers(0, 150), depth=st.integers(0, 100), seed=st.integers(0, 2**65))
def test_a_text_has_one_needle_at_its_depth_and_one_right_answer(
    asked: dict[str, Any], spare: int, depth: int, seed: int
) -> None:
    config = Needle(**asked)
    size = {"number": config.digits, "id": config.characters, "word": 1}[config.what]
    length = OVERHEAD + 2 * size + spare
    made = needles(config, seed=seed, count=4, length=length, depth=depth)
    assert made.tokens.shape == (4, length)
    assert made.answers.tolist() == [[n, length - size, length] for n in range(4)]
    assert made.cells.tolist() == [(-1, length, depth)] * 4
    for row in made.tokens:
        words = spelled(config, row)
        answer, key = words[-size:], words[-size - 4]
        assert key in vocabulary.KEYS
        question = vocabulary.QUESTION.replace("WHAT", config.what).replace("KEY", key)
        assert words[-size - 9 :] == question.replace("ANSWER", " ".join(answer)).split()

        needle = vocabulary.NEEDLE.replace("WHAT", config.what).replace("KEY", key)
        needle = needle.replace("ANSWER", " ".join(answer)).split()
        text = words[: -size - 9]
        found = [at for at in range(len(text)) if text[at : at + len(needle)] == needle]
        assert len(found) == 1
        assert abs(100 * found[0] - depth * spare) <= 50 * LONGEST
        assert found[0] == 0 or text[found[0] - 1] == "."
        hay = text[: found[0]] + text[found[0] + len(needle) :]
        assert len(hay) == spare
        assert set(hay) <= set(vocabulary.HAYSTACK)
        assert not {key, *answer, config.what} & set(hay)
        assert not hay or hay[-1] == "."


@pytest.mark.parametrize("kind", [1, 2, 3])
def test_haystacks_are_whole_sentences_but_for_the_last(kind: int) -> None:
    config = Needle(kind=kind)
    patterns = [pattern.split() for pattern in (vocabulary.DULL if kind == 1 else vocabulary.VARIED)]
    made = needles(config, seed=0, count=3, length=300, depth=100)
    for row in made.tokens:
        text = " ".join(spelled(config, row)).split(f" the {config.what} of ")[0].removesuffix(" .")
        for number, sentence in enumerate(text.split(" . ")[:-1]):
            words = [*sentence.split(), "."]
            fits = [
                len(words) == len(pattern)
                and all(w in vocabulary.LISTS.get(p, (p,)) for w, p in zip(words, pattern, strict=True))
                for pattern in patterns
            ]
            assert any(fits)
            if kind == 1:
                assert fits[number % len(patterns)]


def test_the_first_haystack_repeats_itself_and_the_others_do_not() -> None:
    plain, varied = (needles(Needle(kind=kind), seed=0, count=2, length=400, depth=0).tokens for kind in (1, 2))
    period = sum(len(sentence.split()) for sentence in vocabulary.DULL)
    hay = slice(11, 380)
    assert (plain[0, hay][period:] == plain[0, hay][:-period]).all()
    assert (plain[0, hay] == plain[1, hay]).all()
    assert (varied[0, hay] == varied[1, hay]).mean() < 0.4
    assert max((varied[0, hay][step:] == varied[0, hay][:-step]).mean() for step in range(1, 200)) < 0.5


def test_lists_share_no_word_and_one_vocabulary_serves_all_kinds() -> None:
    lists = [vocabulary.HAYSTACK, vocabulary.KEYS, vocabulary.ANSWERS, vocabulary.CHARACTERS]
    for one, other in combinations(lists, 2):
        assert not set(one) & set(other)
    assert sum(map(len, vocabulary.LISTS.values())) == len({w for words in vocabulary.LISTS.values() for w in words})
    assert sum(map(len, vocabulary.LISTS.values())) >= 150
    assert len(vocabulary.KEYS) == len(vocabulary.ANSWERS) == 64
    assert len(set(vocabulary.WORDS)) == len(vocabulary.WORDS)
    assert Needle(kind=1).words == Needle(kind=3, answer="word", length=512).words


@pytest.mark.parametrize(
    ("config", "answers"),
    [
        (Needle(kind=1, digits=1), 10),
        (Needle(kind=2, answer="word"), 64),
        (Needle(kind=3, characters=2), 256),
    ],
)
def test_chance_is_the_accuracy_of_the_best_guess(config: Needle, answers: int) -> None:
    assert config.chance == 1 / answers
    made = needles(config, seed=0, count=40 * answers, length=60)
    begin = made.answers[0, 1]
    _, counts = np.unique(made.tokens[:, begin:], axis=0, return_counts=True)
    assert len(counts) == answers
    assert counts.max() < 80
    assert Needle().chance == 10.0**-5
    assert Needle(kind=3).chance == 16.0**-12


def test_training_depths_are_uniform_and_on_record() -> None:
    config = Needle(kind=2)
    made = needles(config, seed=0, count=2000, length=100)
    assert np.bincount(made.cells["depth"], minlength=101).min() >= 5
    key = config.words.index("number")
    begin = (made.tokens == key).argmax(axis=1) - 1
    room = 100 - OVERHEAD - 2 * config.digits
    assert (np.abs(100 * begin - made.cells["depth"] * room) <= 50 * LONGEST).all()


def test_an_instance_depends_on_the_seed_and_its_own_number_alone() -> None:
    config = Needle(kind=2, length=90)
    whole, later = needles(config, seed=3, count=9), needles(config, seed=3, count=4, first=5)
    np.testing.assert_array_equal(later.tokens, whole.tokens[5:])
    np.testing.assert_array_equal(later.cells, whole.cells[5:])


def test_the_grid_has_multiples_of_the_training_length_up_to_8192() -> None:
    assert Needle().test_lengths == (256, 512, 1024, 2048)
    assert Needle(length=4096).test_lengths == (4096, 8192)
    assert Needle(length=9000).test_lengths == (9000,)
    cells = Needle(lengths=(64, 128), depths=(0, 100)).grid()
    assert [(cell.length, cell.depth) for cell in cells] == [(64, 0), (64, 100), (128, 0), (128, 100)]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"length": 24},
            "a needle of 11 tokens and a question with answer of 14 do not fit into a text of 24: give 25",
        ),
        ({"kind": 3, "characters": 300}, "needle of 306 tokens .* 309 do not fit into a text of 256: give 615"),
        ({"lengths": (256, 8)}, "do not fit into a text of 8"),
        ({"depths": (0, 101)}, "depth is 101: give percents from 0 to 100"),
        ({"depths": (-1,)}, "depths is -1"),
        ({"digits": 0}, "digits is 0: give 1 or more"),
    ],
)
def test_what_cannot_be_made_is_refused_with_the_numbers(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Needle(**asked)


def test_a_length_or_depth_asked_of_the_function_is_checked_too() -> None:
    with pytest.raises(UsageError, match="do not fit into a text of 20"):
        needles(Needle(), seed=0, count=1, length=20)
    with pytest.raises(UsageError, match="depth is 200"):
        needles(Needle(), seed=0, count=1, depth=200)
