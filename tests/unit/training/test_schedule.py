"""The learning rate as a function of the step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.training.optim import lr_multiplier, warmup_cosine, warmup_stable_decay


@given(steps=st.integers(1, 200), warmup=st.integers(0, 50), decay=st.floats(0, 1), floor=st.floats(0, 1))
@settings(deadline=None, max_examples=25)
def test_the_multiplier_rises_during_warmup_then_decays_to_the_floor(
    steps: int, warmup: int, decay: float, floor: float
) -> None:
    warmup = min(warmup, steps)
    cosine = [warmup_cosine(s, steps=steps, warmup=warmup, floor=floor) for s in range(steps + 1)]
    stable = [warmup_stable_decay(s, steps=steps, warmup=warmup, decay=decay, floor=floor) for s in range(steps + 1)]
    for values in (cosine, stable):
        assert all(0 <= value <= 1 for value in values)
        assert values[:warmup] == sorted(values[:warmup])
        assert values[warmup:] == sorted(values[warmup:], reverse=True)
    if warmup < steps:
        assert cosine[-1] == pytest.approx(floor)
    if decay > 0:
        assert stable[-1] == pytest.approx(floor)


def test_a_stable_schedule_is_constant_until_its_decay() -> None:
    values = [warmup_stable_decay(s, steps=100, warmup=10, decay=0.2, floor=0.0) for s in range(100)]
    assert values[9:81] == [1.0] * 72
    assert values[81] < 1


def test_the_default_warmup_is_a_tenth_of_the_steps(configure: Any) -> None:
    assert lr_multiplier(configure(steps=50), 0) == pytest.approx(1 / 5)
    assert lr_multiplier(configure(steps=5000), 0) == pytest.approx(1 / 100)
    assert lr_multiplier(configure(steps=50, warmup=0), 0) == 1
