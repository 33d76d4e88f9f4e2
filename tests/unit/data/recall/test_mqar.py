"""Properties of multi-query associative recall."""

from __future__ import annotations

from collections import Counter
from itertools import chain, permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data.recall import MQAR
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
@given(kwargs=options())
def test_keys_values_and_fillers_are_disjoint(kwargs: dict[str, Any]) -> None:
    config = MQAR(**kwargs)
    instances = config.draw(seed=1, count=8)
    kinds = {"k": set(range(config.keys)), "v": set(range(config.keys, config.keys + config.values))}
    kinds["."] = set(range(config.keys + config.values, len(config.words)))
    assert sum(map(len, kinds.values())) == len(set(config.words)) == config.keys + config.values + config.fillers
    for letter, tokens in kinds.items():
        assert {config.words[token][0] for token in tokens} == {letter}
    for row, cell in zip(instances.tokens, instances.cells, strict=True):
        n_tokens = 2 * cell["pairs"]
        assert set(row[:n_tokens:2].tolist()) <= kinds["k"]
        assert set(row[1:n_tokens:2].tolist()) <= kinds["v"]
        assert (np.isin(row, list(kinds["v"])).sum(), np.isin(row, list(kinds["k"])).sum()) == (n_tokens, n_tokens)


@QUICK
@given(kwargs=options(), seed=st.integers(-5, 2**65))
def test_each_key_is_queried_once_and_has_one_answer(kwargs: dict[str, Any], seed: int) -> None:
    config = MQAR(**kwargs)
    instances = config.draw(seed=seed, count=8)
    assert instances.tokens.shape == (8, config.length)
    for number, (row, cell) in enumerate(zip(instances.tokens, instances.cells, strict=True)):
        pairs = int(cell["pairs"])
        assert pairs in config.pairs
        assert (cell["length"], cell["depth"]) == (config.length, -1)
        keys, values = row[: 2 * pairs : 2].tolist(), row[1 : 2 * pairs : 2].tolist()
        value_of = dict(zip(keys, values, strict=True))
        assert len(value_of) == pairs
        spans = instances.answers[instances.answers[:, 0] == number, 1:]
        assert (spans[:, 1] - spans[:, 0] == 1).all()
        assert (np.diff(spans[:, 0]) >= 2).all()
        assert (spans[:, 0] > 2 * pairs).all()
        queried = row[spans[:, 0] - 1].tolist()
        assert sorted(queried) == sorted(keys)
        assert row[spans[:, 0]].tolist() == [value_of[key] for key in queried]
        assert Counter(row.tolist())[queried[0]] == 2


def test_query_arrangements_are_equally_likely() -> None:
    config = MQAR(pairs=(2,), length=10, keys=2, values=1)
    rows = Counter(tuple(row) for row in config.draw(seed=0, count=6000).tokens[:, 4:].tolist())
    filler = config.words.index(".")
    expected = set()
    for first, second in permutations((0, 1)):
        questions = [[first, 2], [second, 2]]
        for slots in [(a, b) for a in range(4) for b in range(a + 1, 4)]:
            tokens = [questions[slots.index(n)] if n in slots else [filler] for n in range(4)]
            expected.add(tuple(chain.from_iterable(tokens)))
    assert rows.keys() == expected
    assert min(rows.values()) > 400
    assert max(rows.values()) < 600


def test_all_draws_are_uniform() -> None:
    config = MQAR(pairs=(1, 3), length=20, keys=5, values=4, fillers=2)
    instances = config.draw(seed=0, count=4000)
    counts = np.bincount(instances.tokens.ravel(), minlength=len(config.words))
    for kind in (counts[:5], counts[5:9], counts[9:]):
        assert kind.max() < 1.08 * kind.min()
    assert (instances.cells["pairs"] == 1).mean() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("seed", [0, "0/train"])
def test_instance_depends_only_on_seed_and_index(seed: int | str) -> None:
    config = MQAR(pairs=(2, 4), length=24, fillers=3)
    whole = config.draw(seed=seed, count=30)
    later = config.draw(seed=seed, count=12, first=9)
    mask = np.isin(np.arange(30), np.arange(9, 21))
    for actual, expected in zip(later, whole.select(mask), strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert not (config.draw(seed=1, count=30).tokens == whole.tokens).all(axis=1).any()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"pairs": (65,), "length": 260}, "65 pairs need 65 keys, got keys=64: use more keys or fewer"),
        ({"pairs": (2, 17)}, "17 pairs need 68 tokens .* got length=64: use length=68 or more"),
        ({"pairs": ()}, "pairs must be at least 1, got nothing"),
        ({"pairs": (4, 0)}, r"pairs must be at least 1, got 4\+0"),
        ({"pairs": (4, 4)}, r"contains a number twice \(4\+4\)"),
        ({"values": 0}, "values must be at least 1, got 0"),
        ({"train": 0}, "train must be at least 1, got 0"),
    ],
)
def test_invalid_options_raise(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MQAR(**kwargs)
