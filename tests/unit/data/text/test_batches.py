"""Training windows are permuted every epoch; held-out windows score each token once."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data import Split, epoch_windows, get_batch, scored, windows
from qkflow.data.text.batches import _epoch_random, _permute
from qkflow.errors import UsageError

QUICK = settings(deadline=None, max_examples=25)


def stream(tokens: int) -> Split:
    """A stream in which each token equals its position."""
    return Split(
        tokens=np.arange(tokens, dtype=np.uint32), documents=np.array([[1, tokens]]), sizes=np.array([tokens - 1])
    )


def batch_tokens(split: Split, *, seed: int, step: int, batch_size: int, context: int) -> np.ndarray:
    return get_batch(split, seed=seed, step=step, batch_size=batch_size, context=context).tokens


def held_out(lengths: list[int]) -> Split:
    ends = np.cumsum(np.array(lengths) + 1)
    spans = np.stack([ends - lengths, ends], axis=1)
    return Split(tokens=np.arange(ends[-1] + 1), documents=spans, sizes=np.array(lengths))


@QUICK
@given(count=st.integers(1, 3000), seed=st.integers(-5, 2**70), epoch=st.integers(0, 10**12))
def test_epoch_order_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    _, keys = _epoch_random(seed, epoch)
    assert np.sort(_permute(np.arange(count), count, keys)).tolist() == list(range(count))


def test_a_few_windows_of_a_huge_corpus_are_permuted_directly() -> None:
    count = 10**12 + 39
    _, keys = _epoch_random(0, 0)
    images = _permute(np.arange(count - 1000, count), count, keys)
    assert len(set(images.tolist())) == 1000
    assert images.min() >= 0
    assert images.max() < count


def test_epoch_orders_look_random() -> None:
    count = 4096
    orders = [_permute(np.arange(count), count, _epoch_random(seed, 0)[1]) for seed in range(20)]
    for order in orders:
        assert abs(np.corrcoef(np.arange(count), order)[0, 1]) < 0.08
        assert (np.abs(np.diff(order)) < count // 10).mean() == pytest.approx(0.19, abs=0.04)
    assert len({tuple(order) for order in orders}) == 20
    small = {tuple(_permute(np.arange(4), 4, _epoch_random(seed, 0)[1])) for seed in range(500)}
    assert len(small) == 24


@QUICK
@given(tokens=st.integers(2, 400), context=st.integers(1, 30), rows=st.integers(1, 12), seed=st.integers(0, 9))
def test_epoch_visits_every_window_once_without_overlap(tokens: int, context: int, rows: int, seed: int) -> None:
    split = stream(tokens)
    if tokens < context + 1 or rows > epoch_windows(split, context=context):
        with pytest.raises(UsageError):
            batch_tokens(split, seed=seed, step=0, batch_size=rows, context=context)
        return
    count = epoch_windows(split, context=context)
    steps = [
        batch_tokens(split, seed=seed, step=step, batch_size=rows, context=context)
        for step in range(3 * count // rows + 1)
    ]
    drawn = np.concatenate(steps)
    assert drawn.dtype == np.int64
    assert drawn.shape[1] == context + 1
    assert (np.diff(drawn) == 1).all()
    for epoch in range(3):
        begins = np.sort(drawn[epoch * count : (epoch + 1) * count, 0])
        if len(begins) == count:
            assert (np.diff(begins) == context).all()
            assert begins[0] < context
            assert tokens - begins[-1] - context <= 2 * context


def test_batch_depends_only_on_its_arguments() -> None:
    split = stream(1000)
    later = batch_tokens(split, seed=3, step=17, batch_size=4, context=8)
    assert (batch_tokens(split, seed=3, step=17, batch_size=4, context=8) == later).all()
    assert (batch_tokens(split, seed=4, step=17, batch_size=4, context=8) != later).any()
    assert (batch_tokens(split, seed=3, step=18, batch_size=4, context=8) != later).any()


def test_text_batch_scores_every_target() -> None:
    split = stream(1000)
    tokens, mask = get_batch(split, seed=3, step=17, batch_size=4, context=8)
    assert mask is None
    assert scored(split, 5, 7).tolist() == [True] * 7
    assert tokens[:, 0].tolist() == [205, 789, 13, 709]


@QUICK
@given(gaps=st.lists(st.integers(0, 4), min_size=2, max_size=20), begin=st.integers(0, 10), length=st.integers(0, 60))
def test_scored_targets_lie_in_an_answer(gaps: list[int], begin: int, length: int) -> None:
    borders = 1 + np.cumsum([gap + number % 2 for number, gap in enumerate(gaps)])  # no answer is empty
    answers = borders[: len(borders) // 2 * 2].reshape(-1, 2)
    split = Split(tokens=np.arange(200), documents=np.array([[1, 200]]), sizes=np.array([1]), answers=answers)
    inside = {position for first, last in answers.tolist() for position in range(first, last)}
    assert scored(split, begin, length).tolist() == [begin + 1 + n in inside for n in range(length)]


def test_windows_shift_and_reorder_every_epoch() -> None:
    split = stream(1000)
    count = epoch_windows(split, context=10)
    epochs = [batch_tokens(split, seed=0, step=step, batch_size=count, context=10)[:, 0] for step in range(8)]
    assert len({begins.min() for begins in epochs}) > 3
    assert len({tuple(np.argsort(begins)) for begins in epochs}) == 8


def test_corpus_of_one_window_is_enough() -> None:
    assert batch_tokens(stream(9), seed=0, step=5, batch_size=1, context=8).tolist() == [list(range(9))]


def test_batch_is_a_copy_of_the_mapped_tokens() -> None:
    split = stream(100)
    split.tokens.setflags(write=False)
    rows = batch_tokens(split, seed=0, step=0, batch_size=2, context=8)
    rows += 1
    assert (split.tokens == np.arange(100)).all()


@pytest.mark.parametrize(
    ("tokens", "rows", "context", "message"),
    [
        (8, 1, 8, r"8 tokens.*context \+ 1 = 9.*lower --context"),
        (100, 13, 8, "batch size 13 is too large.*11 windows of 8 tokens.*lower --batch"),
        (100, 0, 8, "batch size must be at least 1, got 0"),
        (100, -1, 8, "batch size must be at least 1, got -1"),
        (100, 1, 0, "context must be at least 1, got 0"),
    ],
)
def test_impossible_batch_raises(tokens: int, rows: int, context: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        batch_tokens(stream(tokens), seed=0, step=0, batch_size=rows, context=context)


@QUICK
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    context=st.integers(1, 25),
    data=st.data(),
)
def test_windows_score_every_token_of_every_document_once(
    lengths: list[int], context: int, data: st.DataObject
) -> None:
    stride = data.draw(st.none() | st.integers(1, context))
    split = held_out(lengths)
    result = windows(split, context=context, stride=stride)
    scored: dict[int, list[int]] = {number: [] for number in range(len(lengths))}
    for window in result:
        begin, end = split.documents[window.document]
        assert 1 <= window.length <= context
        assert 0 <= window.skip < window.length
        assert begin - 1 <= window.begin
        assert window.begin + window.length < end
        targets = range(window.begin + 1, window.begin + 1 + window.length)
        scored[window.document] += list(targets)[window.skip :]
    assert scored == {number: list(range(*span)) for number, span in enumerate(split.documents.tolist())}
    assert [window.document for window in result] == sorted(window.document for window in result)


def test_smaller_stride_gives_more_context() -> None:
    result = windows(held_out([20]), context=8, stride=2)
    assert [window.skip for window in result] == [0, 6, 6, 6, 6, 6, 6]
    assert all(after.begin - this.begin == 2 for this, after in pairwise(result))


@QUICK
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=60), limit=st.integers(1, 2000))
def test_limit_selects_distinct_windows_of_the_whole_within_the_limit(lengths: list[int], limit: int) -> None:
    split = held_out(lengths)
    every, result = windows(split, context=16), windows(split, context=16, limit=limit)
    tokens = sum(window.length for window in result)
    assert set(result) <= set(every)
    assert len(set(result)) == len(result)
    assert [window.begin for window in result] == sorted(window.begin for window in result)
    assert tokens <= limit or len(result) == 1
    if sum(lengths) <= limit:
        assert result == every
    assert result == windows(split, context=16, limit=limit)


@QUICK
@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=60), limit=st.integers(960, 9000))
def test_every_document_is_scored_if_the_limit_allows(lengths: list[int], limit: int) -> None:
    assert {window.document for window in windows(held_out(lengths), context=16, limit=limit)} == set(
        range(len(lengths))
    )


def test_limit_selects_evenly_spaced_documents() -> None:
    result = windows(held_out([10] * 100), context=16, limit=205)
    chosen = [window.document for window in result]
    assert len(chosen) == 20
    assert {after - this for this, after in pairwise(chosen)} == {5}


def test_limit_selects_beginnings_middles_and_ends_of_documents() -> None:
    result = windows(held_out([1600] * 100), context=16, limit=1600)
    position = [(window.begin - 1600 * window.document) / 1600 for window in result]
    assert len(result) == 100
    assert np.histogram(position, bins=4, range=(0, 1))[0].min() >= 20


def test_longer_documents_get_more_windows() -> None:
    result = windows(held_out([160, 1600]), context=16, limit=352)
    assert Counter(window.document for window in result) == {0: 2, 1: 20}


def test_limit_is_nearly_used_up_with_very_different_lengths() -> None:
    lengths = np.random.default_rng(0).lognormal(8, 2, size=400).astype(int) + 1
    for limit in (30_000, 300_000, 3_000_000):
        tokens = sum(window.length for window in windows(held_out(lengths.tolist()), context=256, limit=limit))
        assert 0.8 * limit < tokens <= limit


@pytest.mark.parametrize(("stride", "limit"), [(0, None), (9, None), (-1, None), (None, 0)])
def test_impossible_windows_raise(stride: int | None, limit: int | None) -> None:
    with pytest.raises(UsageError, match=r"stride must be|limit must be"):
        windows(held_out([5]), context=8, stride=stride, limit=limit)
