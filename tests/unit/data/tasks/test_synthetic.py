"""The synthetic task."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data.tasks import Task, TaskConfig
from qkflow.data.tasks.synthetic import sample_texts, synthetic, token_distribution
from qkflow.errors import UsageError


def build(seed: int = 0, train: int = 64, test: int = 16) -> Task:
    return synthetic(TaskConfig(name="synthetic", seed=seed, train=train, test=test))


@given(seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=10)
def test_texts_are_as_published(seed: int) -> None:
    task = build(seed, train=8, test=8)
    for instance in (*task.train, *task.validation, *task.test):
        c = instance.label - 1
        context, query = instance.tokens[:62], instance.tokens[62:]
        assert query == (5 + c,)
        assert set(context) <= {*range(10), *range(10 * (c + 1), 10 * (c + 2))}
        assert instance.rationale == tuple(i for i, token in enumerate(instance.tokens) if token // 10 == c + 1)
        assert instance.rationale
        assert instance.protected == (62,)


def test_classes_are_the_vocabulary() -> None:
    task = build()
    assert task.kind == "classification"
    assert task.classes == task.words
    assert len(set(task.words)) == 50
    assert [task.words[i] for i in (0, 9, 10, 29, 49)] == ["0", "9", "a0", "b9", "d9"]


@pytest.mark.parametrize("c", range(4))
def test_token_frequencies_match_the_weights(c: int) -> None:
    n = 2000
    context = sample_texts(np.full(n, c), np.random.default_rng(3))[:, :-1]
    counts, expected = np.bincount(context.ravel(), minlength=50), token_distribution(c) * context.size
    assert np.flatnonzero(expected).tolist() == [*range(10), *range(10 * (c + 1), 10 * (c + 2))]
    assert expected[0] / expected[10 * (c + 1)] == pytest.approx(10)
    assert np.diff(expected[10 * (c + 1) : 10 * (c + 2)]) == pytest.approx(0.1 / 15.5 * context.size)
    assert (np.abs(counts - expected) <= 5 * np.sqrt(expected)).all()


def test_positions_are_independent() -> None:
    is_informative = sample_texts(np.zeros(20_000, dtype=np.int64), np.random.default_rng(3)) >= 10
    counts = is_informative[:, :-1].sum(1)
    p = 5.5 / 15.5
    assert counts.mean() == pytest.approx(62 * p, abs=0.15)
    assert counts.var() == pytest.approx(62 * p * (1 - p), rel=0.05)


def test_classes_are_balanced_and_shuffled() -> None:
    labels = [instance.label for instance in build().train]
    assert Counter(labels) == {1: 16, 2: 16, 3: 16, 4: 16}
    assert labels != sorted(labels)
    assert labels != [1, 2, 3, 4] * 16


def test_splits_depend_on_the_seed_and_not_on_each_other() -> None:
    assert build().digest == build().digest
    assert build().digest != build(seed=1).digest
    assert build(train=32).test == build().test
    task = build()
    texts = {instance.tokens for instance in (*task.train, *task.validation, *task.test)}
    assert len(texts) == len(task.train) + len(task.validation) + len(task.test)


def test_default_size() -> None:
    task = synthetic(TaskConfig(name="synthetic", test=4))
    assert (len(task.train), len(task.validation), len(task.test)) == (4096, 4, 4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TaskConfig(name="synthetic", data="here"), "generates its texts, got --data here"),
        (TaskConfig(name="synthetic", seed=-1), "seed must be at least 0, got -1"),
        (TaskConfig(name="synthetic", longest=62), "longest must be at least 63.*got 62"),
        (TaskConfig(name="synthetic", vocabulary=49), "vocabulary must be at least 50, got 49"),
        (TaskConfig(name="synthetic", train=3), "train must be at least 4, .*got 3"),
    ],
)
def test_options_that_change_the_task_raise(config: TaskConfig, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        synthetic(config)
