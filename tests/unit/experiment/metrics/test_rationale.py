"""Paired differences, mass at equal loss, and the answer, from given numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.experiment.metrics.rationale import (
    MetricChange,
    MetricName,
    RationaleArm,
    TrainingPoint,
    answer,
    equal_loss,
    mass_at,
    metric_changes,
)
from qkflow.experiment.stats.paired import crossed, mean_difference
from qkflow.experiment.stats.t_dist import half_width


def path(*looks: tuple[float, float]) -> list[TrainingPoint]:
    """(loss, mass) at steps 0, 1, 2, ..."""
    return [
        TrainingPoint(step=step, loss=loss, mass=float(mass), performance=0.0)
        for step, (loss, mass) in enumerate(looks)
    ]


def numbers(seeds: int, instances: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(seed)
    common = source.normal(size=instances)
    ours, theirs = (common + source.normal(size=(seeds, 1)) + source.normal(size=(seeds, instances)) for _ in "ab")
    return ours, theirs


@given(seeds=st.integers(2, 6), instances=st.integers(1, 30), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=25)
def test_mean_difference_equals_paired_with_documents_of_size_one(seeds: int, instances: int, seed: int) -> None:
    ours, theirs = numbers(seeds, instances, seed)
    want = crossed(ours - theirs, np.ones(instances))
    got = mean_difference(ours, theirs, level=0.9)
    width = max(float(half_width(0.9, one)) for one in want.std_errs)
    assert got.mean == pytest.approx(float(want.mean))
    assert (got.low, got.high) == pytest.approx((float(want.mean) - width, float(want.mean) + width))
    assert got.p == pytest.approx(float(want.p()))


def test_mean_difference_by_hand() -> None:
    # differences (1, 0), (0, 0), (1, 1): by seed 1/2, 0, 1; s^2 = 1/4
    # z: (1/4, -1/4), (0, 0), (0, 0); means 1/12, -1/12; V_inst = 2 (2 / 144) = 1/36
    # V_both = 2 (2 (1/6)^2 + 4 (1/12)^2) / 6 = 1/36: instances add nothing, and t has two degrees of freedom
    ours = np.array([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    got = mean_difference(ours, np.zeros((3, 2)), level=0.95)
    assert got.mean == pytest.approx(0.5)
    assert got.high == pytest.approx(0.5 + 4.30265 / math.sqrt(12), rel=1e-5)
    t = 0.5 * math.sqrt(12)
    assert got.p == pytest.approx(1 - t / math.sqrt(2 + t * t))  # Student's t with two degrees of freedom


def test_seeds_that_agree_by_chance_have_an_interval() -> None:
    ours, theirs = np.zeros((2, 60)), np.zeros((2, 60))
    ours[0, 3] = ours[1, 7] = 1.0  # each seed gains one answer, not the same one
    got = mean_difference(ours, theirs, level=0.95)
    assert got.low is not None
    assert got.low < 0 < got.mean == pytest.approx(1 / 60)
    assert got.p is not None
    assert got.p > 0.1


def test_constant_differences_have_an_interval_of_width_zero() -> None:
    one, zero = np.ones((3, 9)), np.zeros((3, 9))
    assert mean_difference(one, zero, level=0.95) == (1.0, 1.0, 1.0, 0.0)
    assert mean_difference(one, one, level=0.95) == (0.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize("sign", [-1.0, 0.0])
def test_two_seeds_of_a_baseline_that_is_not_positive_are_compared(sign: float) -> None:
    ours, _ = numbers(2, 8, 0)
    assert mean_difference(ours, np.full((2, 8), sign), level=0.95).p is not None


def test_one_seed_has_only_a_mean() -> None:
    assert mean_difference(np.array([[1.0, 0.5]]), np.array([[0.0, 0.0]]), level=0.95) == (0.75, None, None, None)


def test_changes_are_paired_by_seed_and_instance() -> None:
    nan = math.nan
    baseline = {0: {"mass": np.array([0.1, 0.2, nan])}, 1: {"mass": np.array([0.3, 0.1, nan])}, 2: {}}
    arm = {1: {"mass": np.array([0.5, nan, nan])}, 0: {"mass": np.array([0.4, 0.9, nan])}}
    (found,) = metric_changes(["mass"], baseline, {"r = 20": arm}, level=0.95)
    want = mean_difference(np.array([[0.4], [0.5]]), np.array([[0.1], [0.3]]), level=0.95)
    assert (found.mean, found.low, found.high, found.p) == want
    assert found.mean == pytest.approx(0.25)
    assert found.p_holm == found.p


def test_arms_without_a_pair_or_a_number_have_no_change() -> None:
    known, unknown = {"mass": np.array([0.1])}, {"mass": np.array([math.nan])}
    others = {"late": {5: known}, "blind": {0: unknown}, "none": {}, "good": {0: known}}
    assert [one.arm for one in metric_changes(["mass"], {0: known}, others, level=0.95)] == ["good"]


def test_p_values_are_corrected_over_arms_within_a_metric() -> None:
    runs = {name: numbers(4, 6, seed)[0] + 2 * seed for seed, name in enumerate(("base", "a", "b", "c"))}
    by_seed = {name: {s: {"mass": row, "effective": -row} for s, row in enumerate(x)} for name, x in runs.items()}
    found = metric_changes(["mass", "effective"], by_seed.pop("base"), by_seed, level=0.95)
    for metric in ("mass", "effective"):
        raw = {one.arm: one.p for one in found if one.metric == metric}
        holm = {one.arm: one.p_holm for one in found if one.metric == metric}
        ranked = sorted(raw, key=lambda arm: raw[arm] or 0)
        want, least = {}, 0.0
        for rank, arm in enumerate(ranked):
            least = max(least, min(1.0, (3 - rank) * (raw[arm] or 0)))
            want[arm] = least
        assert holm == pytest.approx(want)


@pytest.mark.parametrize(
    ("paths", "level"),
    [
        ([path((1.0, 0), (0.5, 0), (0.2, 0)), path((1.0, 0), (0.4, 0))], 0.4),
        ([path((1.0, 0), (0.3, 0), (0.9, 0)), path((1.0, 0), (0.4, 0))], 0.4),  # the lowest, not the last
        ([path((1.0, 0), (0.5, 0)), path((0.4, 0), (0.3, 0))], None),  # one begins below what the other comes to
        ([path((1.0, 0), (1.2, 0)), path((1.0, 0), (0.3, 0))], None),  # one never comes down
        ([path((1.0, 0), (0.0, 0))], 0.0),
        ([], None),
        ([path()], None),
    ],
)
def test_equal_loss_is_the_lowest_that_every_path_reaches(paths: list[Any], level: float | None) -> None:
    assert equal_loss(paths) == level


@pytest.mark.parametrize(
    ("looks", "loss", "mass"),
    [
        (path((1.0, 0.0), (0.01, 1.0)), 0.1, 0.5),  # half way in the logarithm
        (path((1.0, 0.2), (0.5, 0.4), (0.25, 0.6)), 0.5, 0.4),  # an exact hit
        (path((1.0, 0.0), (2.0, 0.3), (0.5, 0.5), (1.5, 0.9), (0.4, 1.0)), 1.0, 0.0),  # it begins there
        (path((4.0, 0.0), (8.0, 0.3), (2.0, 0.5), (16.0, 0.9), (1.0, 1.0)), 4.0, 0.0),
        (path((4.0, 0.0), (8.0, 0.3), (2.0, 0.5), (16.0, 0.9), (1.0, 1.0)), 2.0, 0.5),  # the first time down
        (path((1.0, 0.0), (0.0, 0.8)), 0.0, 0.8),  # a loss of nothing has no logarithm
        (path((1.0, 0.0), (0.0, 0.8)), 1e-6, 0.4),
    ],
)
def test_mass_at_a_loss_is_that_where_the_path_first_reaches_it(looks: Any, loss: float, mass: float) -> None:
    assert mass_at(looks, loss) == pytest.approx(mass)


def test_a_loss_that_is_never_reached_has_no_mass() -> None:
    assert math.isnan(mass_at(path((1.0, 0.1), (0.5, 0.2)), 0.4))


def arm(name: str) -> RationaleArm:
    return RationaleArm(
        name=name,
        description="",
        lr=0.1,
        tried={},
        seeds=(0,),
        readings={},
        curve=(),
        paths=(),
        at_equal_loss=None,
        by_kind={},
    )


def change(metric: Any, mean: float, p: float | None) -> MetricChange:
    low, high = (None, None) if p is None else (mean - 0.01, mean + 0.01)
    return MetricChange(arm="r = 20", metric=metric, mean=mean, low=low, high=high, p=p, p_holm=p)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (
            [change("mass", 0.2, 0.001), change("performance", 0.03, 0.01)],
            "r = 20 has higher attention mass on the rationale (+20.0 points, +19.0 to +21.0), "
            "better performance (+3.0 points, +2.0 to +4.0)",
        ),
        (
            [change("mass", -0.2, 0.001), change("performance", -0.03, 0.01)],
            "r = 20 has lower attention mass (-20.0 points, -21.0 to -19.0), "
            "worse performance (-3.0 points, -4.0 to -2.0)",
        ),
        (
            [change("mass", 0.002, 0.4), change("performance", 0.001, 0.06)],
            "r = 20 has no significant change in mass (+0.2 points, -0.8 to +1.2), "
            "no significant change in performance",
        ),
        ([change("performance", 0.5, 0.001)], "r = 20 has better performance (+50.0 points"),
        ([], "r = 20 has no finished pair of runs"),
    ],
)
def test_the_answer_states_the_changes(found: list[MetricChange], says: str) -> None:
    description = answer("signs", [arm("r = 1"), arm("r = 20")], found, 0.95)
    assert description.startswith("On signs, compared with r = 1: ")
    assert says in description


def test_one_seed_gives_no_claim() -> None:
    description = answer(
        "signs", [arm("r = 1"), arm("r = 20")], [change("mass", 0.4, None), change("performance", 0.1, None)], 0.95
    )
    assert "one seed" in description
    assert "higher" not in description
    assert "better" not in description


def test_intervals_of_differences_end_at_the_largest_possible_difference() -> None:
    right, wrong = np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]]), np.zeros((2, 3))
    names: tuple[MetricName, ...] = ("mass", "comprehensiveness", "effective")
    arm, baseline = ({seed: dict.fromkeys(names, values[seed]) for seed in range(2)} for values in (right, wrong))
    mass, comprehensiveness, effective = metric_changes(names, baseline, {"arm": arm}, level=0.95)
    assert (mass.low, mass.high) == (-1, 1)
    assert (comprehensiveness.low, comprehensiveness.high) == (-2, 2)
    assert effective.low is not None
    assert effective.low < -2.9
    assert mass.p == comprehensiveness.p == effective.p
