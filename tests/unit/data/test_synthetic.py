"""The synthetic task."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data.tasks import Task, TaskConfig
from qkflow.data.tasks.synthetic import mixture, synthetic, texts
from qkflow.errors import UsageError


def made(seed: int = 0, train: int = 64, test: int = 16) -> Task:
    return synthetic(TaskConfig(name="synthetic", seed=seed, train=train, test=test))


@given(seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=10)
def test_every_text_is_as_published(seed: int) -> None:
    task = made(seed, train=8, test=8)
    for one in (*task.train, *task.validation, *task.test):
        c = one.label - 1
        context, query = one.tokens[:62], one.tokens[62:]
        assert query == (5 + c,)
        assert set(context) <= {*range(10), *range(10 * (c + 1), 10 * (c + 2))}
        assert one.rationale == tuple(i for i, token in enumerate(one.tokens) if token // 10 == c + 1)
        assert one.rationale
        assert one.protected == (62,)


def test_the_vocabulary_is_what_may_be_answered() -> None:
    task = made()
    assert task.kind == "classification"
    assert task.classes == task.words
    assert len(set(task.words)) == 50
    assert [task.words[i] for i in (0, 9, 10, 29, 49)] == ["0", "9", "a0", "b9", "d9"]


@pytest.mark.parametrize("c", range(4))
def test_tokens_are_as_frequent_as_their_weights(c: int) -> None:
    n = 2000
    context = texts(np.full(n, c), np.random.default_rng(3))[:, :-1]
    counts, expected = np.bincount(context.ravel(), minlength=50), mixture(c) * context.size
    assert np.flatnonzero(expected).tolist() == [*range(10), *range(10 * (c + 1), 10 * (c + 2))]
    assert expected[0] / expected[10 * (c + 1)] == pytest.approx(10)
    assert np.diff(expected[10 * (c + 1) : 10 * (c + 2)]) == pytest.approx(0.1 / 15.5 * context.size)
    assert (np.abs(counts - expected) <= 5 * np.sqrt(expected)).all()


def test_places_are_independent_of_each_other() -> None:
    found = texts(np.zeros(20_000, dtype=np.int64), np.random.default_rng(3)) >= 10
    own = found[:, :-1].sum(1)
    p = 5.5 / 15.5
    assert own.mean() == pytest.approx(62 * p, abs=0.15)
    assert own.var() == pytest.approx(62 * p * (1 - p), rel=0.05)


def test_classes_are_equally_many_and_in_no_order() -> None:
    labels = [one.label for one in made().train]
    assert Counter(labels) == {1: 16, 2: 16, 3: 16, 4: 16}
    assert labels != sorted(labels)
    assert labels != [1, 2, 3, 4] * 16


def test_a_seed_decides_everything_and_the_size_of_one_part_no_other() -> None:
    assert made().digest == made().digest
    assert made().digest != made(seed=1).digest
    assert made(train=32).test == made().test
    task = made()
    texts = {one.tokens for one in (*task.train, *task.validation, *task.test)}
    assert len(texts) == len(task.train) + len(task.validation) + len(task.test)


def test_by_default_there_are_4096_texts() -> None:
    task = synthetic(TaskConfig(name="synthetic", test=4))
    assert (len(task.train), len(task.validation), len(task.test)) == (4096, 4, 4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TaskConfig(name="synthetic", data="here"), "makes its own texts, got --data here"),
        (TaskConfig(name="synthetic", seed=-1), "seed must be at least 0, got -1"),
        (TaskConfig(name="synthetic", longest=62), "have 63 tokens, got longest=62"),
        (TaskConfig(name="synthetic", vocabulary=49), "has 50 tokens, got vocabulary=49"),
        (TaskConfig(name="synthetic", train=3), "train must be at least 4, .*got 3"),
    ],
)
def test_what_would_be_another_task_is_refused(config: TaskConfig, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        synthetic(config)
