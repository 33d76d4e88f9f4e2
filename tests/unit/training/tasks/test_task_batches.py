from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data.tasks import Task
from qkflow.training.tasks.batches import answered, chosen, rows


@given(count=st.integers(1, 30), batch=st.integers(1, 40), seed=st.integers(0, 9))
@settings(deadline=None, max_examples=25)
def test_every_pass_goes_through_every_instance_once(count: int, batch: int, seed: int) -> None:
    steps = -(-3 * count // batch)
    drawn = [place for step in range(steps) for place in chosen(count, seed=seed, step=step, batch=batch)]
    for pass_ in range(3):
        assert sorted(drawn[pass_ * count : (pass_ + 1) * count]) == list(range(count))
    counts = Counter(drawn)
    assert max(counts.values()) - min(counts.values()) <= 1 if len(counts) == count else True


def test_passes_and_seeds_have_orders_of_their_own() -> None:
    orders = [tuple(chosen(20, seed=seed, step=step, batch=20)) for seed in (0, 1) for step in (0, 1)]
    assert len(set(orders)) == 4


def test_a_step_is_a_function_of_seed_and_step_alone() -> None:
    before = torch.get_rng_state()
    late = chosen(9, seed=3, step=5, batch=4)
    for step in range(5):
        chosen(9, seed=3, step=step, batch=4)
    assert chosen(9, seed=3, step=5, batch=4) == late
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_are_padded_on_the_right_with_nothing_to_read() -> None:
    made = rows([[5, 6, 7], [8]])
    assert made.tokens.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert made.layout is not None
    assert made.layout.valid.tolist() == [[True, True, True], [True, False, False]]
    assert rows([[5], [6]]).layout is None


def test_the_answer_and_nothing_else_is_to_be_predicted(copies: Task) -> None:
    made, targets = answered(copies.train)
    for row, one in enumerate(copies.train):
        length = int(made.lengths[row])
        asked = targets[row] >= 0
        assert targets[row][asked].tolist() == list(one.answer)
        assert asked.nonzero().flatten().tolist() == list(range(len(one.tokens) - 1, length))
        # what is read before a target is the text, and the answer so far: never the target itself
        for place in range(len(one.tokens) - 1, length):
            read = tuple(made.tokens[row, : place + 1].tolist())
            assert read == one.tokens + one.answer[: place + 1 - len(one.tokens)]


@pytest.mark.parametrize("batch", [1, 5])
def test_one_instance_is_enough(batch: int) -> None:
    assert chosen(1, seed=0, step=4, batch=batch) == [0] * batch
