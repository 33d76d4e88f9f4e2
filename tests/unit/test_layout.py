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
few_examples = settings(deadline=None, max_examples=25)


def distinct(b: int, t: int) -> Tensor:
    """Return a batch with two features per token, all different."""
    return torch.arange(1.0, 2 * b * t + 1).view(b, t, 2)


def check_layout(layout: Layout, expected: list[list[int]]) -> None:
    """Check all fields and conversions of a layout; `expected` lists the flat token indices of each sequence."""
    b, t = layout.valid.shape
    assert layout.lengths.tolist() == [len(tokens) for tokens in expected]
    located = {token: (i, p) for i, tokens in enumerate(expected) for p, token in enumerate(tokens)}
    flat = [located.get(token, (-1, 0)) for token in range(b * t)]
    assert layout.sequences.flatten().tolist() == [i for i, _ in flat]
    assert layout.positions.flatten().tolist() == [p for _, p in flat]
    assert layout.valid.flatten().tolist() == [i >= 0 for i, _ in flat]
    assert layout.is_full == all(len(tokens) == layout.span for tokens in expected)

    x = distinct(b, t)
    rows = layout.to_rows(x)
    assert rows.shape == (len(expected), layout.span, 2)
    for i, tokens in enumerate(expected):
        assert_close(rows[i, : len(tokens)], x.flatten(0, 1)[tokens])
    batch = layout.to_batch(rows)
    assert_close(batch, x * layout.valid[..., None])
    assert_close(layout.zero_padding(x), batch)


@given(lengths, st.integers(0, 3), sides)
@few_examples
def test_padded_has_one_sequence_per_row(counts: list[int], more: int, side: Any) -> None:
    t = max(1, max(counts) + more)
    first = [0 if side == "right" else t - count for count in counts]
    expected = [[i * t + first[i] + p for p in range(count)] for i, count in enumerate(counts)]
    check_layout(Layout.padded(counts, t, side=side), expected)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=4))
@few_examples
def test_a_mask_has_one_sequence_per_row(rows: list[tuple[int, int]]) -> None:
    t = max(1, *(before + count for before, count in rows))
    mask = torch.tensor([[before <= column < before + count for column in range(t)] for before, count in rows])
    expected = [[i * t + before + p for p in range(count)] for i, (before, count) in enumerate(rows)]
    layout = Layout.from_mask(mask)
    check_layout(layout, expected)
    assert (layout.index is None) == all(before == 0 or count == 0 for before, count in rows)


def test_a_mask_with_holes_raises() -> None:
    with pytest.raises(UsageError, match=r"holes in the rows \[1, 2\]: the tokens of a row must be adjacent"):
        Layout.from_mask(torch.tensor([[1, 1, 0], [1, 0, 1], [1, 0, 1]]).bool())


@pytest.mark.parametrize("bad", [torch.ones(2, 3), torch.ones(3, dtype=torch.bool)])
def test_a_mask_of_another_type_raises(bad: Any) -> None:
    with pytest.raises((UsageError, TypeCheckError), match="mask"):
        Layout.from_mask(bad)


def test_a_layout_prints_as_a_summary() -> None:
    assert repr(Layout.padded([2, 5], 6)) == "Layout(2 sequences of 2 to 5 tokens in a batch of 2 x 6)"
    assert repr(Layout.packed([0, 1])) == "Layout(1 sequence of 1 token in a batch of 1 x 1)"
    assert repr(Layout.padded([2, 5], 6).to("meta")) == "Layout(2 sequences in a batch of 2 x 6)"


@given(lengths.filter(any))
@few_examples
def test_packed_sequences_follow_each_other(counts: list[int]) -> None:
    bounds = [0, *accumulate(counts)]
    check_layout(Layout.packed(bounds), [list(range(a, b)) for a, b in pairwise(bounds)])


@given(st.integers(1, 4), st.integers(1, 6), st.data())
@few_examples
def test_segments_start_with_each_row_and_at_starts(b: int, t: int, data: st.DataObject) -> None:
    starts = data.draw(st.lists(st.lists(st.booleans(), min_size=t, max_size=t), min_size=b, max_size=b))
    expected: list[list[int]] = []
    for row in range(b):
        for column in range(t):
            if column == 0 or starts[row][column]:
                expected.append([])
            expected[-1].append(row * t + column)
    starts_tensor = torch.tensor(starts)
    before = starts_tensor.clone()
    check_layout(Layout.segmented(starts_tensor), expected)
    assert torch.equal(starts_tensor, before)


@given(lengths.filter(any), sides)
@few_examples
def test_gradients_reach_valid_tokens_once_and_padding_never(counts: list[int], side: Any) -> None:
    layout = Layout.padded(counts, max(counts) + 1, side=side)
    x = distinct(len(counts), max(counts) + 1).requires_grad_()
    (gradient,) = torch.autograd.grad(layout.to_batch(layout.to_rows(x)).sum(), x)
    assert_close(gradient, layout.valid[..., None].expand_as(x).float())


def test_right_padding_is_already_in_row_form() -> None:
    layout = Layout.padded([2, 3], 3)
    x = distinct(2, 3)
    assert layout.to_rows(x) is x


def test_padding_becomes_zero() -> None:
    layout = Layout.padded([1, 2], 2, side="left")
    x = torch.tensor([[torch.nan, 1.0], [2.0, 3.0]])
    assert layout.zero_padding(x).tolist() == [[0.0, 1.0], [2.0, 3.0]]
    rows = torch.tensor([[1.0, torch.inf], [2.0, 3.0]])
    assert layout.to_batch(rows).tolist() == [[0.0, 1.0], [2.0, 3.0]]


def test_integers_and_higher_dimensions() -> None:
    layout = Layout.packed([0, 1, 3])
    assert layout.to_rows(torch.tensor([[7, 8, 9]])).tolist()[1] == [8, 9]
    deep = torch.randn(1, 3, 2, 5)
    assert_close(layout.to_batch(layout.to_rows(deep)), deep)


def test_cu_seqlens_of_any_integer_type() -> None:
    assert Layout.packed(torch.tensor([0, 2, 3], dtype=torch.int32)).lengths.tolist() == [2, 1]


def test_empty_batch() -> None:
    x = torch.zeros(1, 0, 2)
    for layout in (Layout.packed([0, 0]), Layout.padded([0], 0, side="left"), Layout.padded([0], 0)):
        assert layout.to_batch(layout.to_rows(x)).shape == x.shape


@pytest.mark.parametrize("bad", [[-1, 2], [1, 4]])
def test_lengths_outside_the_batch_raise(bad: list[int]) -> None:
    with pytest.raises(UsageError, match="from 0 to 3 for each row, got"):
        Layout.padded(bad, 3)


@pytest.mark.parametrize("bad", [[], [0], [1, 2], [0, 3, 2]])
def test_invalid_cu_seqlens_raise(bad: list[int]) -> None:
    with pytest.raises(UsageError, match="start at 0 and must not decrease, got"):
        Layout.packed(bad)


def test_invalid_side_raises() -> None:
    side: Any = "middle"
    with pytest.raises((UsageError, TypeCheckError), match="middle"):
        Layout.padded([1], 2, side=side)


def test_batch_of_another_shape_raises() -> None:
    layout = Layout.padded([1, 2], 3)
    layout.check(torch.zeros(2, 3, 5))
    with pytest.raises(UsageError, match=r"a batch of \[2, 3\], got \[2, 4\]"):
        layout.check(torch.zeros(2, 4, 5))


@pytest.mark.parametrize("layout", [Layout.padded([2, 3], 4, side="left"), Layout.packed([0, 2, 7])])
def test_non_finite_sequence_does_not_affect_others(layout: Layout) -> None:
    layer = StandardAttention(width=8, heads=2)
    x = torch.randn(*layout.valid.shape, 8)
    whole, _ = layer(x, layout=layout)
    broken, _ = layer(x.masked_fill((layout.sequences == 0)[..., None], torch.nan), layout=layout)
    other = layout.sequences == 1
    assert torch.equal(broken[other], whole[other])


def test_layout_moves_between_devices() -> None:
    layout = Layout.padded([1, 2], 2, side="left")
    assert layout.to("meta").valid.device.type == "meta"
    assert layout.to("meta").span == layout.span
    with pytest.raises(UsageError, match=r"use layout.to\(x.device\)"):
        StandardAttention(width=8, heads=2)(torch.randn(2, 2, 8), layout=layout.to("meta"))
