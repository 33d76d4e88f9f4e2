from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch import Tensor
from torch.testing import assert_close

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.mechanisms import StandardAttention

lengths = st.lists(st.integers(0, 6), min_size=1, max_size=5)
sides = st.sampled_from(["left", "right"])
many = settings(deadline=None, max_examples=25)


def numbered(b: int, t: int) -> Tensor:
    """A batch of two features a token, all of them different."""
    return torch.arange(1.0, 2 * b * t + 1).view(b, t, 2)


def holds(layout: Layout, want: list[list[int]]) -> None:
    """The layout's sequences are those tokens of the flattened batch, in that order, and all that follows from it."""
    b, t = layout.valid.shape
    assert layout.lengths.tolist() == [len(tokens) for tokens in want]
    place = {token: (i, p) for i, tokens in enumerate(want) for p, token in enumerate(tokens)}
    flat = [place.get(token, (-1, 0)) for token in range(b * t)]
    assert layout.sequences.flatten().tolist() == [i for i, _ in flat]
    assert layout.positions.flatten().tolist() == [p for _, p in flat]
    assert layout.valid.flatten().tolist() == [i >= 0 for i, _ in flat]
    assert layout.even == all(len(tokens) == layout.span for tokens in want)

    x = numbered(b, t)
    rows = layout.rows(x)
    assert rows.shape == (len(want), layout.span, 2)
    for i, tokens in enumerate(want):
        assert_close(rows[i, : len(tokens)], x.flatten(0, 1)[tokens])
    back = layout.batch(rows)
    assert_close(back, x * layout.valid[..., None])
    assert_close(layout.clean(x), back)


@given(lengths, st.integers(0, 3), sides)
@many
def test_padding_holds_one_sequence_a_row(counts: list[int], more: int, side: Any) -> None:
    t = max(1, max(counts) + more)
    first = [0 if side == "right" else t - count for count in counts]
    want = [[i * t + first[i] + p for p in range(count)] for i, count in enumerate(counts)]
    holds(Layout.padded(counts, t, side=side), want)


@given(lengths.filter(any))
@many
def test_packing_holds_sequences_one_behind_the_other(counts: list[int]) -> None:
    bounds = [0, *accumulate(counts)]
    holds(Layout.packed(bounds), [list(range(a, b)) for a, b in pairwise(bounds)])


@given(st.integers(1, 4), st.integers(1, 6), st.data())
@many
def test_segments_begin_with_each_row_and_wherever_told(b: int, t: int, data: st.DataObject) -> None:
    starts = data.draw(st.lists(st.lists(st.booleans(), min_size=t, max_size=t), min_size=b, max_size=b))
    want: list[list[int]] = []
    for row in range(b):
        for column in range(t):
            if column == 0 or starts[row][column]:
                want.append([])
            want[-1].append(row * t + column)
    given_starts = torch.tensor(starts)
    before = given_starts.clone()
    holds(Layout.segmented(given_starts), want)
    assert torch.equal(given_starts, before)


@given(lengths.filter(any), sides)
@many
def test_gradients_come_back_to_valid_tokens_once_and_to_padding_never(counts: list[int], side: Any) -> None:
    layout = Layout.padded(counts, max(counts) + 1, side=side)
    x = numbered(len(counts), max(counts) + 1).requires_grad_()
    (gradient,) = torch.autograd.grad(layout.batch(layout.rows(x)).sum(), x)
    assert_close(gradient, layout.valid[..., None].expand_as(x).float())


def test_right_padding_moves_nothing() -> None:
    layout = Layout.padded([2, 3], 3)
    x = numbered(2, 3)
    assert layout.rows(x) is x


def test_whatever_stands_at_padding_comes_out_as_zero() -> None:
    layout = Layout.padded([1, 2], 2, side="left")
    x = torch.tensor([[torch.nan, 1.0], [2.0, 3.0]])
    assert layout.clean(x).tolist() == [[0.0, 1.0], [2.0, 3.0]]
    rows = torch.tensor([[1.0, torch.inf], [2.0, 3.0]])
    assert layout.batch(rows).tolist() == [[0.0, 1.0], [2.0, 3.0]]


def test_integers_and_deeper_tensors_are_moved_too() -> None:
    layout = Layout.packed([0, 1, 3])
    assert layout.rows(torch.tensor([[7, 8, 9]])).tolist()[1] == [8, 9]
    deep = torch.randn(1, 3, 2, 5)
    assert_close(layout.batch(layout.rows(deep)), deep)


def test_bounds_may_be_a_tensor_of_any_integers() -> None:
    assert Layout.packed(torch.tensor([0, 2, 3], dtype=torch.int32)).lengths.tolist() == [2, 1]


def test_an_empty_batch_has_a_layout_too() -> None:
    x = torch.zeros(1, 0, 2)
    for layout in (Layout.packed([0, 0]), Layout.padded([0], 0, side="left"), Layout.padded([0], 0)):
        assert layout.batch(layout.rows(x)).shape == x.shape


@pytest.mark.parametrize("bad", [[-1, 2], [1, 4]])
def test_lengths_outside_the_batch_are_refused(bad: list[int]) -> None:
    with pytest.raises(UsageError, match="from 0 to 3 for each row, got"):
        Layout.padded(bad, 3)


@pytest.mark.parametrize("bad", [[], [0], [1, 2], [0, 3, 2]])
def test_bounds_that_are_no_sums_are_refused(bad: list[int]) -> None:
    with pytest.raises(UsageError, match="start at 0 and never fall, got"):
        Layout.packed(bad)


def test_a_side_that_is_neither_is_refused() -> None:
    side: Any = "middle"
    with pytest.raises((UsageError, TypeCheckError), match="middle"):
        Layout.padded([1], 2, side=side)


def test_a_batch_of_another_shape_is_refused() -> None:
    layout = Layout.padded([1, 2], 3)
    layout.check(torch.zeros(2, 3, 5))
    with pytest.raises(UsageError, match=r"a batch of \[2, 3\], got \[2, 4\]"):
        layout.check(torch.zeros(2, 4, 5))


@pytest.mark.parametrize("layout", [Layout.padded([2, 3], 4, side="left"), Layout.packed([0, 2, 7])])
def test_a_sequence_that_is_not_finite_leaves_the_others_alone(layout: Layout) -> None:
    layer = StandardAttention(width=8, heads=2)
    x = torch.randn(*layout.valid.shape, 8)
    whole, _ = layer(x, layout=layout)
    broken, _ = layer(x.masked_fill((layout.sequences == 0)[..., None], torch.nan), layout=layout)
    other = layout.sequences == 1
    assert torch.equal(broken[other], whole[other])


def test_a_layout_moves_between_devices_and_says_so_where_it_must() -> None:
    layout = Layout.padded([1, 2], 2, side="left")
    assert layout.to("meta").valid.device.type == "meta"
    assert layout.to("meta").span == layout.span
    with pytest.raises(UsageError, match=r"use layout.to\(x.device\)"):
        StandardAttention(width=8, heads=2)(torch.randn(2, 2, 8), layout=layout.to("meta"))
