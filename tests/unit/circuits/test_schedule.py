"""Ratio schedules, alone and combined with a learning-rate schedule."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from qkflow.circuits import RatioSchedule, circuit_groups, circuit_lambdas
from qkflow.errors import UsageError

ratios = st.floats(0.01, 100.0)


@given(start=ratios, end=ratios, step=st.integers(0, 100))
@settings(deadline=None, max_examples=25)
def test_ratio_is_linear_from_start_to_end(start: float, end: float, step: int) -> None:
    assert RatioSchedule(start=start, end=end).at(step, 100) == pytest.approx(start + (end - start) * step / 100)
    assert RatioSchedule(start=start, end=end).at(0, 100) == start
    assert RatioSchedule(start=start, end=end).at(250, 100) == pytest.approx(end)
    assert RatioSchedule(start=start).at(step, 100) == start


def test_published_growth_starts_at_one() -> None:
    assert [RatioSchedule(end=40.0).at(step, 4) for step in range(5)] == [1 + 39 * step / 4 for step in range(5)]


@pytest.mark.parametrize("bad", [0.0, -2.0, math.inf, math.nan])
def test_invalid_ratios_raise(bad: float) -> None:
    with pytest.raises(UsageError, match="r must be a finite number above 0"):
        RatioSchedule(start=bad)
    with pytest.raises(UsageError, match="growth must be a finite number above 0"):
        RatioSchedule(end=bad)
    with pytest.raises(UsageError, match="steps must be at least 1, got 0"):
        RatioSchedule(end=2.0).at(0, 0)


def test_only_a_constant_one_is_the_identity() -> None:
    assert RatioSchedule().is_identity
    assert RatioSchedule(end=1.0).is_identity
    assert not RatioSchedule(end=2.0).is_identity
    assert not RatioSchedule(start=2.0, end=1.0).is_identity


@pytest.mark.parametrize("constant_r", [1.0, 8.0])
def test_scheduled_ratio_replaces_the_constant_ratio(constant_r: float) -> None:
    model = nn.TransformerEncoderLayer(8, 2, dim_feedforward=8)
    groups = circuit_groups(model, 0.1, r=constant_r)
    optimizer = torch.optim.SGD(groups)

    def base(step: int) -> float:
        return 1 / (step + 2)

    def r(step: int) -> float:
        return 3.0 * (step + 1)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, circuit_lambdas(optimizer.param_groups, r, base))
    for step in range(4):
        for group in optimizer.param_groups:
            ratio = r(step) if group["circuit"] == "qk" else 1.0
            assert group["lr"] == pytest.approx(0.1 * base(step) * ratio)
        optimizer.step()
        scheduler.step()


def test_other_groups_follow_the_base_schedule() -> None:
    first, second = circuit_lambdas([{"params": []}, {"circuit": "qk"}], lambda step: 5.0)
    assert (first(3), second(3)) == (1.0, 5.0)
