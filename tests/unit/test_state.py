from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.mechanisms import mechanism
from qkflow.models.stack import DecoderState
from qkflow.state import KVCache, RecurrentState

MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]
WIDTHS = (3, 2)
"""Widths of the two tensors per token, as for keys and values."""


def tokens(b: int, t: int, first: int = 0) -> list[Tensor]:
    """Tokens whose coordinates are all row * 1000 + position."""
    name = 1000.0 * torch.arange(b)[:, None] + torch.arange(first, first + t)
    return [name[..., None].expand(b, t, width).clone() for width in WIDTHS]


def started(b: int = 2, window: int | None = None) -> KVCache:
    return KVCache.start(tokens(b, 0), window)


def held(cache: KVCache) -> list[list[int]]:
    """Positions of the cached tokens per row, in order, from the values of the tokens."""
    positions = cache.positions.expand(len(cache.buffers[0]), -1)
    rows = []
    for row, row_positions in enumerate(positions.tolist()):
        slots = [slot for slot, position in enumerate(row_positions) if position >= 0]
        for x in cache.tensors:
            assert x[row, slots].tolist() == [[1000.0 * row + row_positions[slot]] * x.shape[-1] for slot in slots]
        rows.append([row_positions[slot] for slot in slots])
    return rows


def ragged(cache: KVCache, counts: list[int]) -> KVCache:
    """The cache extended by `counts[i]` tokens of row i, padded on the right with NaN."""
    t = max(counts)
    new = [torch.full((len(counts), t, width), torch.nan) for width in WIDTHS]
    for row, (count, first) in enumerate(zip(counts, cache.length.tolist(), strict=True)):
        for x, values in zip(new, tokens(len(counts), count, first), strict=True):
            x[row, :count] = values[row]
    return cache.extend(new, torch.tensor(counts))


def pointers(cache: KVCache) -> list[int]:
    return [x.data_ptr() for x in cache.buffers]


@pytest.mark.parametrize("mode", MODES)
def test_a_cache_holds_all_tokens_in_order(mode: Callable[[], Any]) -> None:
    with mode():
        cache = started()
        assert (cache.nbytes, cache.length.tolist(), cache.offset, held(cache)) == (0, [0, 0], 0, [[], []])
        for t in (3, 1, 20, 1):
            cache = cache.extend(tokens(2, t, cache.tokens_seen))
        assert held(cache) == [list(range(25))] * 2
        assert (cache.length.tolist(), cache.offset) == ([25, 25], 25)


@pytest.mark.parametrize("mode", MODES)
@given(steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(any), min_size=1, max_size=12))
@settings(deadline=None, max_examples=20)
def test_rows_of_different_lengths_keep_their_positions(mode: Callable[[], Any], steps: list[tuple[int, int]]) -> None:
    with mode():
        cache = started()
        for counts in steps:
            cache = ragged(cache, [*counts])
        totals = [sum(column) for column in zip(*steps, strict=True)]
        assert cache.length.tolist() == totals
        assert held(cache) == [list(range(total)) for total in totals]


@pytest.mark.parametrize("mode", MODES)
def test_rows_may_become_uneven(mode: Callable[[], Any]) -> None:
    with mode():
        alike = started().extend(tokens(2, 5))
        uneven = ragged(alike, [1, 3])
        after = ragged(uneven.extend([x + uneven.length[:, None, None] for x in tokens(2, 1)]), [2, 0])
        assert after.length.tolist() == [9, 9]
        assert held(after) == [list(range(9))] * 2
        assert held(alike) == [list(range(5))] * 2


def test_in_inference_the_buffer_doubles_when_full() -> None:
    a_slot = 2 * sum(WIDTHS) * 4
    with torch.no_grad():
        cache, capacities = started(), []
        for position in range(300):
            before = pointers(cache)
            cache = cache.extend(tokens(2, 1, position))
            assert cache.nbytes == (position + 1) * a_slot
            assert cache.reserved <= max(16, 2 * (position + 1)) * a_slot
            if pointers(cache) != before:
                capacities.append(cache.reserved // a_slot)
    assert capacities[-5:] == [32, 64, 128, 256, 512]
    assert all(after >= 2 * before for before, after in pairwise(capacities))


def test_in_inference_appending_does_not_touch_past_tokens() -> None:
    """Between growths only the new slot changes, even if the held values are overwritten."""
    with torch.no_grad():
        cache = started().extend(tokens(2, 20))
        cache = cache.extend(tokens(2, 1, 20))
        for buffer in cache.buffers:
            buffer[:, :21] = torch.nan
        after = cache.extend(tokens(2, 1, 21))
    assert pointers(after) == pointers(cache)
    for x in after.tensors:
        assert x[:, :21].isnan().all()
        assert not x[:, 21].isnan().any()


@pytest.mark.parametrize("window", [1, 3, 16])
@pytest.mark.parametrize("step", [1, 5])
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_window_bounds_the_cache_and_keeps_all_visible_tokens(
    mode: Callable[[], Any], uneven: bool, step: int, window: int
) -> None:
    with mode():
        cache, largest = started(window=window), 0
        for _ in range(80 // step):
            counts = [step, step - 1] if uneven and step > 1 else [step, step]
            cache = ragged(cache, counts) if uneven else cache.extend(tokens(2, step, cache.tokens_seen))
            for count, length, row in zip(counts, cache.length.tolist(), held(cache), strict=True):
                reach = range(max(0, length - (window + count - 1)), length)
                assert set(reach) <= set(row), "a visible token was dropped"
            cache = cache.trim()
            for length, row in zip(cache.length.tolist(), held(cache), strict=True):
                assert row[-min(window, length) :] == list(range(max(0, length - window), length))
            largest = max(largest, cache.buffers[0].shape[1])
        assert cache.slots_used <= (window if mode is torch.enable_grad else 2 * window)
        assert largest <= max(2 * window + step, 16 + step)


def test_a_row_without_new_tokens_keeps_its_tokens() -> None:
    with torch.no_grad():
        cache = started(window=4)
        for _ in range(6):
            cache = ragged(cache, [1, 1]).trim()
        for _ in range(50):
            cache = ragged(cache, [1, 0]).trim()
        assert cache.length.tolist() == [56, 6]
        assert held(cache)[0][-4:] == [52, 53, 54, 55]
        assert held(cache)[1][-3:] == [3, 4, 5]


def test_with_gradients_on_a_cache_is_functional_and_differentiable() -> None:
    first, second = (x.requires_grad_() for x in tokens(2, 3)), [x.requires_grad_() for x in tokens(2, 2, 3)]
    leaves = [*first]
    before = started().extend(leaves)
    values = [x.detach().clone() for x in before.tensors]
    after = before.extend(second)
    assert not {x.untyped_storage().data_ptr() for x in before.buffers} & {
        x.untyped_storage().data_ptr() for x in after.buffers
    }
    sum((x**2).sum() for x in after.tensors).backward()  # type: ignore[union-attr]
    for x in (*leaves, *second):
        assert_close(x.grad, 2 * x)
    for x, value in zip(before.tensors, values, strict=True):
        assert_close(x, value)


def test_training_after_inference_does_not_write_to_a_shared_buffer() -> None:
    with torch.no_grad():
        shared = started().extend(tokens(2, 3))
    trained = shared.extend(tokens(2, 1, 3))
    with torch.no_grad():
        inferred = shared.extend([-x for x in tokens(2, 1, 3)])
    assert held(trained) == [[0, 1, 2, 3]] * 2
    assert [x[:, 3].tolist() for x in inferred.tensors] == [(-x[:, 0]).tolist() for x in tokens(2, 1, 3)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("uneven", [False, True])
def test_a_state_can_be_continued_twice(mode: Callable[[], Any], uneven: bool) -> None:
    with mode():
        root = started().extend(tokens(2, 3))
        root = ragged(root, [1, 2]) if uneven else root
        grown = [root.extend([sign * x for x in tokens(2, 2, 50)]) for sign in (1, -1, 2)]
        assert held(root) == ([[0, 1, 2, 3], [0, 1, 2, 3, 4]] if uneven else [[0, 1, 2]] * 2)
        for sign, cache in zip((1, -1, 2), grown, strict=True):
            assert cache.length.tolist() == [length + 2 for length in root.length.tolist()]
            for x, expected in zip(cache.tensors, tokens(2, 2, 50), strict=True):
                assert_close(x[:, -2:], sign * expected)
                assert_close(x[:, :3], root.tensors[WIDTHS.index(x.shape[-1])][:, :3])


def test_threads_that_continue_a_state_do_not_share_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        state = started().extend(tokens(2, 1)).extend(tokens(2, 1, 1))
    has_room, others = KVCache._has_room, []

    def interrupted(cache: KVCache, t: int) -> bool:
        """Let another thread continue the state at the worst moment: it has to wait."""
        is_free = has_room(cache, t)
        if not others:
            others.append(threading.Thread(target=lambda: continued.append(state.reserve())))
            others[0].start()
            others[0].join(0.05)
        return is_free

    monkeypatch.setattr(KVCache, "_has_room", interrupted)
    continued: list[KVCache] = []
    continued.append(state.reserve())
    others[0].join()
    assert continued[0].buffers[0] is not continued[1].buffers[0]


def test_adding_a_position_table_does_not_change_the_previous_state() -> None:
    with torch.no_grad():
        alike = started().extend(tokens(2, 3))
        differ = ragged(alike, [1, 2])
        straight = alike.extend(tokens(2, 2, 3))
        assert held(differ) == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]
        assert held(straight) == [[0, 1, 2, 3, 4]] * 2
        assert held(alike) == [[0, 1, 2]] * 2


@pytest.mark.parametrize("after", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("uneven", [False, True])
def test_a_state_created_in_inference_mode_can_be_used_outside(after: Callable[[], Any], uneven: bool) -> None:
    with torch.inference_mode():
        cache = started().extend(tokens(2, 3))
        cache = ragged(cache, [1, 2]) if uneven else cache
    with after():
        cache = cache.extend([x + cache.length[:, None, None] for x in tokens(2, 1)])
        again = cache.extend([x + cache.length[:, None, None] for x in tokens(2, 1)])
        assert held(again) == ([[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6]] if uneven else [[0, 1, 2, 3, 4]] * 2)
        if after is torch.no_grad:
            assert pointers(again) == pointers(cache)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("uneven", [False, True])
def test_selected_rows_are_copies_in_the_given_order(mode: Callable[[], Any], uneven: bool) -> None:
    with mode():
        cache = started().extend(tokens(2, 4))
        cache = ragged(cache, [1, 2]) if uneven else cache
        chosen = cache.select(torch.tensor([1, 0, 1]))
        assert chosen.length.tolist() == [cache.length.tolist()[i] for i in (1, 0, 1)]
        for actual, whole in zip(chosen.tensors, cache.tensors, strict=True):
            assert_close(actual, whole[[1, 0, 1]], equal_nan=True)
            assert actual.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
        more = chosen.extend(tokens(3, 1))
        assert more.length.tolist() == [length + 1 for length in chosen.length.tolist()]


def test_a_detached_cache_has_no_graph() -> None:
    cache = started().extend([x.requires_grad_() for x in tokens(2, 3)])
    assert all(x.requires_grad for x in cache.tensors)
    cut = cache.detach()
    assert not any(x.requires_grad for x in cut.tensors)
    assert held(cut) == held(cache)


@pytest.mark.parametrize("uneven", [False, True])
def test_a_cache_moves_to_another_device(uneven: bool) -> None:
    cache = started().extend(tokens(2, 3))
    cache = ragged(cache, [1, 2]) if uneven else cache
    moved = cache.to("meta")
    assert {x.device.type for x in (*moved.buffers, moved.length, moved.positions)} == {"meta"}
    assert (moved.slots_used, moved.tokens_seen, moved.nbytes) == (cache.slots_used, cache.tokens_seen, cache.nbytes)


def test_nbytes_counts_visible_tokens_and_reserved_counts_buffers() -> None:
    with torch.no_grad():
        cache = started().extend(tokens(2, 17)).extend(tokens(2, 1, 17))
    assert cache.nbytes == 2 * 18 * sum(WIDTHS) * 4
    assert cache.reserved == 2 * 34 * sum(WIDTHS) * 4
    assert cache.select(torch.tensor([0])).reserved == 18 * sum(WIDTHS) * 4


@pytest.mark.parametrize("mode", MODES)
def test_a_wrong_number_of_rows_raises(mode: Callable[[], Any]) -> None:
    with mode():
        cache = started().extend(tokens(2, 3))
        with pytest.raises(UsageError, match=r"holds 2 rows, the input 3: select\(\) the rows first"):
            cache.extend(tokens(3, 1, 3))


# A memory of fixed size.


def remembered(b: int = 2) -> RecurrentState:
    matrix = torch.arange(b * 6.0).view(b, 1, 3, 2)
    return RecurrentState.after(None, matrix, (torch.ones(b, 3, 4), torch.ones(b, 3, 2)), 5)


def test_a_recurrent_state_counts_tokens_per_row() -> None:
    memory = remembered()
    assert (memory.length.tolist(), memory.lengths) == ([5, 5], None)
    more = RecurrentState.after(memory, memory.matrix, memory.conv_state, 2)
    assert (more.length.tolist(), more.lengths) == ([7, 7], None)
    ragged = RecurrentState.after(more, memory.matrix, memory.conv_state, 4, torch.tensor([0, 3]))
    assert ragged.length.tolist() == [7, 10]
    assert RecurrentState.after(ragged, memory.matrix, memory.conv_state, 2).length.tolist() == [9, 12]
    first = RecurrentState.after(None, memory.matrix, memory.conv_state, 4, torch.tensor([1, 4]))
    assert first.length.tolist() == [1, 4]
    assert memory.length.tolist() == [5, 5]


@pytest.mark.parametrize("lengths", [None, torch.tensor([2, 5])])
def test_rows_of_a_recurrent_state_are_selected_and_copied(lengths: Tensor | None) -> None:
    memory = RecurrentState.after(None, remembered().matrix, remembered().conv_state, 5, lengths)
    chosen = memory.select(torch.tensor([1, 0, 1]))
    assert chosen.length.tolist() == [memory.length.tolist()[i] for i in (1, 0, 1)]
    for actual, whole in zip((chosen.matrix, *chosen.conv_state), (memory.matrix, *memory.conv_state), strict=True):
        assert torch.equal(actual, whole[[1, 0, 1]])
        assert actual.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()


def test_a_recurrent_state_has_a_size_moves_and_detaches() -> None:
    memory = remembered()
    assert memory.nbytes == 4 * (2 * 6 + 2 * 3 * 4 + 2 * 3 * 2)
    moved = memory.to("meta")
    assert {x.device.type for x in (moved.matrix, *moved.conv_state, moved.length)} == {"meta"}
    grown = RecurrentState.after(memory, memory.matrix.clone().requires_grad_(), memory.conv_state, 1)
    assert grown.matrix.requires_grad
    assert not grown.detach().matrix.requires_grad
    assert grown.detach().length.tolist() == [6, 6]


@pytest.mark.parametrize("spec", ["standard", "qdelta", "kuramoto"])
def test_a_state_prints_as_a_summary(spec: str) -> None:
    layer = mechanism(spec)(16, 2, 0, 1)
    _, state = layer(torch.randn(2, 5, 16), layout=Layout.padded([3, 5], 5))
    name = type(state).__name__
    assert repr(state) == f"{name}(2 rows of 3 to 5 tokens, {state.nbytes:,} bytes)"
    assert repr(DecoderState((state, state))).startswith("DecoderState(2 rows of 3 to 5 tokens, ")
