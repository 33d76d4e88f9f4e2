"""What multi-query associative recall promises of every instance, whatever is asked for."""

from __future__ import annotations

from collections import Counter
from itertools import chain, permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data.recall import MQAR, mqar
from qkflow.errors import UsageError

QUICK = settings(deadline=None, max_examples=25)


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    pairs = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True))
    return {
        "pairs": tuple(pairs),
        "length": 4 * max(pairs) + draw(st.integers(0, 20)),
        "keys": max(pairs) + draw(st.integers(0, 9)),
        "values": draw(st.integers(1, 9)),
        "fillers": draw(st.integers(1, 3)),
    }


@QUICK
@given(asked=options())
def test_no_value_can_be_mistaken_for_a_key(asked: dict[str, Any]) -> None:
    config = MQAR(**asked)
    made = mqar(config, seed=1, count=8)
    kinds = {"k": set(range(config.keys)), "v": set(range(config.keys, config.keys + config.values))}
    kinds["."] = set(range(config.keys + config.values, len(config.words)))
    assert sum(map(len, kinds.values())) == len(set(config.words)) == config.keys + config.values + config.fillers
    for letter, tokens in kinds.items():
        assert {config.words[token][0] for token in tokens} == {letter}
    for row, cell in zip(made.tokens, made.cells, strict=True):
        stated = 2 * cell["pairs"]
        assert set(row[:stated:2].tolist()) <= kinds["k"]
        assert set(row[1:stated:2].tolist()) <= kinds["v"]
        assert (np.isin(row, list(kinds["v"])).sum(), np.isin(row, list(kinds["k"])).sum()) == (stated, stated)


@QUICK
@given(asked=options(), seed=st.integers(-5, 2**65))
def test_each_key_is_stated_once_asked_once_and_has_one_right_answer(asked: dict[str, Any], seed: int) -> None:
    config = MQAR(**asked)
    made = mqar(config, seed=seed, count=8)
    assert made.tokens.shape == (8, config.length)
    for number, (row, cell) in enumerate(zip(made.tokens, made.cells, strict=True)):
        pairs = int(cell["pairs"])
        assert pairs in config.pairs
        assert (cell["length"], cell["depth"]) == (config.length, -1)
        keys, values = row[: 2 * pairs : 2].tolist(), row[1 : 2 * pairs : 2].tolist()
        right = dict(zip(keys, values, strict=True))
        assert len(right) == pairs
        spans = made.answers[made.answers[:, 0] == number, 1:]
        assert (spans[:, 1] - spans[:, 0] == 1).all()
        assert (np.diff(spans[:, 0]) >= 2).all()
        assert (spans[:, 0] > 2 * pairs).all()
        asked = row[spans[:, 0] - 1].tolist()
        assert sorted(asked) == sorted(keys)
        assert row[spans[:, 0]].tolist() == [right[key] for key in asked]
        assert Counter(row.tolist())[asked[0]] == 2


def test_every_arrangement_of_the_questions_is_equally_likely() -> None:
    config = MQAR(pairs=(2,), length=10, keys=2, values=1)
    rows = Counter(tuple(row) for row in mqar(config, seed=0, count=6000).tokens[:, 4:].tolist())
    blank = config.words.index(".")
    want = set()
    for first, second in permutations((0, 1)):
        questions = [[first, 2], [second, 2]]
        for places in [(a, b) for a in range(4) for b in range(a + 1, 4)]:
            pieces = [questions[places.index(n)] if n in places else [blank] for n in range(4)]
            want.add(tuple(chain.from_iterable(pieces)))
    assert rows.keys() == want
    assert min(rows.values()) > 400
    assert max(rows.values()) < 600


def test_keys_values_fillers_and_numbers_of_pairs_are_all_drawn_evenly() -> None:
    config = MQAR(pairs=(1, 3), length=20, keys=5, values=4, fillers=2)
    made = mqar(config, seed=0, count=4000)
    counts = np.bincount(made.tokens.ravel(), minlength=len(config.words))
    for kind in (counts[:5], counts[5:9], counts[9:]):
        assert kind.max() < 1.08 * kind.min()
    assert (made.cells["pairs"] == 1).mean() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("seed", [0, "0/train"])
def test_an_instance_depends_on_the_seed_and_its_own_number_alone(seed: int | str) -> None:
    config = MQAR(pairs=(2, 4), length=24, fillers=3)
    whole = mqar(config, seed=seed, count=30)
    later = mqar(config, seed=seed, count=12, first=9)
    kept = np.isin(np.arange(30), np.arange(9, 21))
    for got, want in zip(later, whole.where(kept), strict=True):
        np.testing.assert_array_equal(got, want)
    assert not (mqar(config, seed=1, count=30).tokens == whole.tokens).all(axis=1).any()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"pairs": (65,), "length": 260}, "65 pairs need 65 different keys, got keys=64: give more keys or fewer"),
        ({"pairs": (2, 17)}, "17 pairs need 68 tokens .* got length=64: give length=68 or more"),
        ({"pairs": ()}, "pairs is nothing: give 1 or more"),
        ({"pairs": (4, 0)}, r"pairs is 4\+0: give 1 or more"),
        ({"pairs": (4, 4)}, r"names a number twice \(4\+4\): give each once"),
        ({"values": 0}, "values is 0"),
        ({"train": 0}, "train is 0"),
    ],
)
def test_what_cannot_be_made_is_refused_with_the_numbers(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MQAR(**asked)
