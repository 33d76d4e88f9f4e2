"""Cost ratios from learning curves."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from qkflow.experiment.stats.curves import Curve, cost_ratio

TOKENS = tuple(1000 * step for step in range(21))


def curve(
    seed: int = 0, *, ahead: float = 1.0, pace: float = 1e-3, noise: float = 0.0, tokens: tuple[int, ...] = TOKENS
) -> Curve:
    """A run from 8 bits down along 4 - 0.2 log2(tokens x `ahead`), and steeply over the last fifth."""
    rng = np.random.default_rng(seed)
    losses = [8.0 if t == 0 else 4 - 0.2 * math.log2(t * ahead) + noise * rng.standard_normal() for t in tokens]
    losses = [loss - 5 * max(0.0, t / tokens[-1] - 0.8) for t, loss in zip(tokens, losses, strict=True)]
    return Curve(seed=seed, tokens=tokens, seconds=tuple(t * pace for t in tokens), losses=tuple(losses))


def test_an_arm_that_needs_half_the_tokens_has_ratio_one_half() -> None:
    read = cost_ratio([curve(ahead=2)], [curve()])
    assert read.tokens == pytest.approx(0.5)
    assert read.seconds == pytest.approx(0.5)
    assert (read.reached, read.seeds) == (1, 1)
    assert (read.tokens_low, read.tokens_high, read.seconds_low, read.seconds_high) == (None,) * 4


def test_an_arm_that_is_behind_is_compared_at_its_own_loss() -> None:
    read = cost_ratio([curve(ahead=0.4)], [curve()])
    assert read.tokens == pytest.approx(2.5)
    assert (read.reached, read.seeds) == (0, 1)


def test_seconds_are_those_of_each_run() -> None:
    """The same tokens at 2.4 times the cost, and level in seconds if 2.4 times ahead in tokens."""
    read = cost_ratio([curve(ahead=2.4, pace=2.4e-3)], [curve()])
    assert read.tokens == pytest.approx(1 / 2.4)
    assert read.seconds == pytest.approx(1.0)


def test_the_decay_is_not_used() -> None:
    one, two = curve(), curve()
    late = tuple(loss - 1 if t > 16000 else loss for t, loss in zip(two.tokens, two.losses, strict=True))
    lucky = Curve(seed=0, tokens=two.tokens, seconds=two.seconds, losses=late)
    assert cost_ratio([lucky], [one]).tokens == pytest.approx(1)
    assert cost_ratio([lucky], [one], 1.0).tokens < 1


def test_an_evaluation_at_the_end_of_the_plateau_is_used() -> None:
    """An arm that is below the baseline's end from its first evaluation on reads that evaluation over the end."""
    without = tuple(t for t in TOKENS if t != 16000)
    for tokens, end in ((TOKENS, 16000), (without, 15000)):
        read = cost_ratio([curve(ahead=1e9, tokens=tokens)], [curve(tokens=tokens)])
        assert read.tokens == pytest.approx(1000 / end)


def test_one_lucky_evaluation_does_not_count_as_reaching() -> None:
    smooth = curve()
    dip = list(smooth.losses)
    dip[3] = dip[16]  # as low at 3000 tokens as at the plateau's end, and high again at 4000
    dipped = Curve(seed=0, tokens=smooth.tokens, seconds=smooth.seconds, losses=tuple(dip))
    assert cost_ratio([dipped], [smooth]).tokens > 0.95


def test_smoothing_keeps_a_curved_loss() -> None:
    def bent(ahead: float) -> Curve:
        losses = tuple(2 + 100 / math.sqrt(ahead * max(t, 100)) for t in TOKENS)
        return replace(curve(), losses=losses)

    for ahead in (0.25, 0.5, 2.0, 4.0):
        assert cost_ratio([bent(ahead)], [bent(1.0)]).tokens == pytest.approx(1 / ahead, rel=0.02)


@given(seed=st.integers(0, 1000), ahead=st.floats(0.3, 3), noise=st.sampled_from([0.0, 0.01, 0.1]))
@settings(deadline=None, max_examples=25)
def test_swapping_the_arms_inverts_the_ratio(seed: int, ahead: float, noise: float) -> None:
    arms = [curve(s, ahead=ahead, noise=noise) for s in range(seed, seed + 3)]
    others = [curve(s, pace=2e-3) for s in range(seed, seed + 3)]
    there, back = cost_ratio(arms, others), cost_ratio(others, arms)
    assert back.tokens == pytest.approx(1 / there.tokens)
    assert (back.tokens_low, back.tokens_high) == pytest.approx((1 / there.tokens_high, 1 / there.tokens_low))
    assert back.seconds == pytest.approx(1 / there.seconds)


@given(seed=st.integers(0, 1000), noise=st.sampled_from([0.0, 0.02, 0.5]))
@settings(deadline=None, max_examples=25)
def test_a_curve_against_itself_has_ratio_one(seed: int, noise: float) -> None:
    read = cost_ratio([curve(seed, noise=noise)], [curve(seed, noise=noise)])
    assert (read.tokens, read.seconds, read.reached) == (1, 1, 1)


def test_the_interval_is_students_over_seeds_on_logarithms() -> None:
    factors = [1.5, 2.0, 2.5, 1.8]
    read = cost_ratio([curve(s, ahead=f) for s, f in enumerate(factors)], [curve(s) for s in range(4)], level=0.9)
    want = stats.ttest_1samp(-np.log(factors), 0).confidence_interval(0.9)
    assert read.tokens == pytest.approx(stats.gmean(1 / np.array(factors)))
    assert (read.tokens_low, read.tokens_high) == pytest.approx((math.exp(want.low), math.exp(want.high)))


def test_the_ratio_is_robust_to_noise_in_the_evaluations() -> None:
    arms = [curve(s, ahead=2, noise=0.02) for s in range(20)]
    others = [replace(curve(s + 500, noise=0.02), seed=s) for s in range(20)]
    read = cost_ratio(arms, others)
    assert read.tokens_low < 0.5 < read.tokens_high
    assert read.tokens == pytest.approx(0.5, rel=0.06)


def test_only_seeds_with_two_usable_curves_count() -> None:
    short = Curve(seed=1, tokens=(0, 1000), seconds=(0.0, 1.0), losses=(8.0, 3.0))
    empty = Curve(seed=2, tokens=(), seconds=(), losses=())
    read = cost_ratio([curve(0, ahead=2), short, empty, curve(3)], [curve(0), curve(1), curve(2)])
    assert (read.seeds, read.reached) == (1, 1)
    assert cost_ratio([short], [curve(1)]) is None
    assert cost_ratio([], []) is None


def test_arms_of_different_lengths_use_their_own_plateaus() -> None:
    longer = tuple(2 * t for t in TOKENS)
    assert cost_ratio([curve(tokens=longer)], [curve()]).tokens == pytest.approx(1)
    assert cost_ratio([curve(tokens=longer, ahead=0.5)], [curve()]).tokens == pytest.approx(2)
