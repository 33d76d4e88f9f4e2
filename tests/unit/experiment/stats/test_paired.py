"""Differences, p values and spread ratios: against scipy, by hand, and by their invariances."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from qkflow.experiment.stats.paired import (
    Difference,
    PairedErrors,
    _document_factor,
    crossed,
    describe,
    sign_flip,
    spread_ratio,
    unpaired,
)
from qkflow.experiment.stats.t_dist import half_width

LN2 = math.log(2)


def study(
    seeds: int, documents: int, *, seed: int = 0, shift: float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nats of an arm and of a baseline over documents of unequal sizes."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(50, 500, documents)
    loss = 1.5 + 0.2 * rng.standard_normal(documents)
    runs = loss + 0.02 * rng.standard_normal((2, seeds, 1)) + 0.02 * rng.standard_normal((2, seeds, documents))
    arm, baseline = (runs + np.array([shift, 0.0])[:, None, None]) * sizes
    return arm, baseline, sizes


def paired(arm: np.ndarray, baseline: np.ndarray, sizes: np.ndarray) -> PairedErrors:
    return crossed((arm - baseline) / LN2, sizes)


def difference(
    arm: np.ndarray, baseline: np.ndarray, sizes: np.ndarray, *, level: float = 0.95, alpha: float = 0.05
) -> Difference:
    errors = paired(arm, baseline, sizes)
    return describe(errors, documents=len(sizes), level=level, alpha=alpha, prior_used=False)


cases = st.tuples(st.integers(2, 8), st.integers(1, 9), st.integers(0, 10**6))


def numbers(reading: object) -> list[float]:
    names = ("mean", "spread", "error", "freedom", "low", "high", "p", "smallest")
    return [getattr(reading, name) for name in names]


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
def test_one_document_gives_the_paired_t_test(seeds: int) -> None:
    arm, baseline, sizes = study(seeds, 1, seed=seeds)
    measured = difference(arm, baseline, sizes, level=0.9)
    bits = [(nats / LN2 / sizes).ravel() for nats in (arm, baseline)]
    want = stats.ttest_rel(*bits)
    interval = want.confidence_interval(0.9)
    assert (measured.p, measured.low, measured.high) == pytest.approx((want.pvalue, interval.low, interval.high))
    assert measured.error == pytest.approx(stats.sem(bits[0] - bits[1]))
    assert (measured.freedom, measured.documents) == (seeds - 1, 1)


def test_documents_of_equal_size_add_the_component_of_a_two_way_analysis_of_variance() -> None:
    n, d = 4, 6
    rng = np.random.default_rng(3)
    cells = rng.standard_normal((n, d)) + rng.standard_normal((n, 1)) + 3 * rng.standard_normal(d)
    rows, columns, grand = cells.mean(1), cells.mean(0), cells.mean()
    by_document = n * np.square(columns - grand).sum() / (d - 1)
    interaction = np.square(cells - rows[:, None] - columns + grand).sum() / ((n - 1) * (d - 1))
    component = (by_document - interaction) / (n * d)
    assert component > 0
    by_seeds = rows.var(ddof=1) / n
    measured = difference(cells * LN2, np.zeros((n, d)), np.ones(d))
    assert measured.error == pytest.approx(math.sqrt(by_seeds + component))
    freedom = (by_seeds + component) ** 2 / (by_seeds**2 / (n - 1) + component**2 / (d - 1))
    assert measured.freedom == pytest.approx(freedom)
    widths = [half_width(0.95, one) for one in ((measured.error, freedom), (math.sqrt(by_seeds), n - 1))]
    assert measured.high - measured.mean == pytest.approx(max(widths))


@given(sizes=st.lists(st.integers(1, 1000), min_size=2, max_size=9))
@settings(deadline=None, max_examples=25)
def test_the_document_factor_equals_its_matrix_form(sizes: list[int]) -> None:
    w = np.array(sizes) / sum(sizes)
    pull = np.diag(w) @ (np.eye(len(w)) - np.outer(np.ones(len(w)), w))
    gram = pull @ pull.T
    k, freedom = _document_factor(w)
    assert k == pytest.approx((w @ w) / np.trace(gram))
    assert freedom == pytest.approx(np.trace(gram) ** 2 / np.trace(gram @ gram), rel=1e-3)
    assert 1 <= freedom <= len(w) - 1


def simulated(seeds: int, *, by_seed: float, by_document: float, rest: float, seed: int = 0) -> tuple[np.ndarray, ...]:
    """4000 studies of nothing: nats [studies, seeds, documents], and the sizes of 41 unequal documents."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(0.5 * rng.standard_normal(41))
    normal = rng.standard_normal
    bits = by_seed * normal((4000, seeds, 1)) + by_document * normal((4000, 1, 41)) + rest * normal((4000, seeds, 41))
    return bits * sizes * LN2, sizes


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
@pytest.mark.parametrize(
    ("by_seed", "by_document", "rest"),
    [(1, 0, 0), (1, 0, 5), (1, 5, 0), (1, 5, 5), (1, 15, 0), (0.01, 5, 5)],
)
def test_the_interval_keeps_its_level_for_every_source_of_variance(
    seeds: int, by_seed: float, by_document: float, rest: float
) -> None:
    bits, sizes = simulated(seeds, by_seed=by_seed, by_document=by_document, rest=rest)
    assert (paired(bits, np.zeros_like(bits), sizes).p() < 0.05).mean() < 0.062


def test_each_of_the_two_intervals_alone_errs_too_often() -> None:
    bits, sizes = simulated(5, by_seed=1, by_document=15, rest=0)
    measured = paired(bits, np.zeros_like(bits), sizes)
    assert (np.abs(measured.mean) > half_width(0.95, measured.std_errs[0])).mean() > 0.4
    bits, sizes = simulated(2, by_seed=1, by_document=0, rest=5)
    measured = paired(bits, np.zeros_like(bits), sizes)
    assert (np.abs(measured.mean) > half_width(0.95, measured.std_errs[1])).mean() > 0.065


@given(case=cases)
@settings(deadline=None, max_examples=25)
def test_the_interval_is_never_narrower_than_the_paired_t_over_seeds(case: tuple[int, int, int]) -> None:
    arm, baseline, sizes = study(case[0], case[1], seed=case[2])
    measured = difference(arm, baseline, sizes)
    plain = stats.ttest_1samp(measured.by_seed, 0.0)
    interval = plain.confidence_interval(0.95)
    assert measured.low <= interval.low + 1e-12
    assert measured.high >= interval.high - 1e-12
    assert measured.p >= plain.pvalue - 1e-12


@given(case=cases, level=st.sampled_from([0.9, 0.95, 0.96, 0.992]))
@settings(deadline=None, max_examples=25)
def test_the_p_value_is_below_alpha_if_and_only_if_the_interval_excludes_zero(
    case: tuple[int, int, int], level: float
) -> None:
    arrays = study(case[0], case[1], seed=case[2], shift=0.03)
    measured, errors = difference(*arrays, level=level), paired(*arrays)
    assume(abs(measured.p - (1 - level)) > 1e-9)
    assert (measured.p < 1 - level) == (measured.low > 0 or measured.high < 0)
    assert errors.one_sided_p(abs(measured.mean)) == pytest.approx(measured.p / 2)
    assert errors.one_sided_p(measured.high - measured.mean) == pytest.approx((1 - level) / 2)


@given(case=cases)
@settings(deadline=None, max_examples=25)
def test_swapping_the_arms_only_changes_the_sign(case: tuple[int, int, int]) -> None:
    arm, baseline, sizes = study(case[0], case[1], seed=case[2])
    one = difference(arm, baseline, sizes)
    two = difference(baseline, arm, sizes)
    assert (two.mean, two.low, two.high) == pytest.approx((-one.mean, -one.high, -one.low))
    assert (two.p, two.error, two.smallest) == pytest.approx((one.p, one.error, one.smallest))


@given(case=cases, factor=st.floats(0.01, 100))
@settings(deadline=None, max_examples=25)
def test_scaling_the_losses_scales_the_difference(case: tuple[int, int, int], factor: float) -> None:
    arm, baseline, sizes = study(case[0], case[1], seed=case[2])
    one, two = difference(arm, baseline, sizes), difference(factor * arm, factor * baseline, sizes)
    for name in ("mean", "spread", "error", "low", "high", "smallest"):
        assert getattr(two, name) == pytest.approx(factor * getattr(one, name), rel=1e-5)
    assert (two.p, two.freedom) == pytest.approx((one.p, one.freedom), rel=1e-6)
    per_kilobyte = difference(arm, baseline, 1000.0 * sizes)
    assert per_kilobyte.mean == pytest.approx(one.mean / 1000)
    assert per_kilobyte.p == pytest.approx(one.p, rel=1e-6)


@given(case=cases, data=st.data())
@settings(deadline=None, max_examples=25)
def test_the_order_of_seeds_and_documents_does_not_matter(case: tuple[int, int, int], data: st.DataObject) -> None:
    arm, baseline, sizes = study(case[0], case[1], seed=case[2])
    rows = np.array(data.draw(st.permutations(range(case[0]))))
    columns = np.array(data.draw(st.permutations(range(case[1]))))
    moved = difference(arm[rows][:, columns], baseline[rows][:, columns], sizes[columns])
    assert numbers(moved) == pytest.approx(numbers(difference(arm, baseline, sizes)), rel=1e-6)


@given(case=cases)
@settings(deadline=None, max_examples=25)
def test_a_loss_common_to_both_arms_changes_nothing(case: tuple[int, int, int]) -> None:
    arm, baseline, sizes = study(case[0], case[1], seed=case[2])
    shared = np.random.default_rng(case[2]).uniform(0, 100, (case[0], case[1]))
    one = difference(arm, baseline, sizes)
    assert numbers(difference(arm + shared, baseline + shared, sizes)) == pytest.approx(numbers(one), rel=1e-6)


def test_a_document_without_bytes_or_nats_changes_nothing() -> None:
    arm, baseline, sizes = study(4, 5)
    wider = [np.hstack([nats, np.zeros((4, 1))]) for nats in (arm, baseline)]
    assert numbers(difference(*wider, np.append(sizes, 0))) == pytest.approx(numbers(difference(arm, baseline, sizes)))


def test_identical_runs_have_no_difference() -> None:
    arm, _, sizes = study(6, 4)
    measured = difference(arm, arm.copy(), sizes)
    assert (measured.mean, measured.spread, measured.error, measured.low, measured.high) == (0, 0, 0, 0, 0)
    assert (measured.p, measured.p_signs, measured.smallest) == (1, 1, 0)


def test_a_difference_without_spread_has_only_document_error() -> None:
    nats, sizes = np.full((3, 2), 8.0), np.array([4, 4])
    sure = difference(nats - 2, nats, sizes)
    assert (sure.p, sure.high - sure.low) == pytest.approx((0, 0), abs=1e-12)
    mixed = difference(nats - np.array([1.0, 3.0]), nats, sizes)
    assert mixed.spread == pytest.approx(0, abs=1e-12)
    assert mixed.freedom == pytest.approx(1)
    assert mixed.error == pytest.approx(1 / 4 / LN2)  # the standard error of 1/4 and 3/4 nats a byte


def test_a_smaller_error_rate_increases_the_smallest_effect_and_not_the_interval() -> None:
    one, seven = difference(*study(5, 4)), difference(*study(5, 4), alpha=0.05 / 7)
    assert (one.low, one.high, one.p) == (seven.low, seven.high, seven.p)
    assert seven.smallest > 1.2 * one.smallest


def test_document_variance_increases_the_smallest_effect() -> None:
    bits, pulls = np.array([[0.1], [0.2], [0.0]]) + np.zeros(4), np.array([1.0, -1.0, 2.0, -2.0])
    alike, apart = (difference(x, np.zeros_like(x), np.ones(4)) for x in (bits, bits + pulls))
    assert apart.smallest > 1.5 * alike.smallest


def test_a_moderated_variance_replaces_the_spread_of_the_seeds() -> None:
    errors = paired(*study(3, 5))
    other = errors.moderated(4 * errors.spread**2, 7.0)
    (error, freedom), (both, _) = other.std_errs
    assert error == pytest.approx(2 * errors.std_errs[0][0])
    assert freedom == 7
    assert both**2 == pytest.approx(error**2 + errors.documents_variance)
    assert (other.mean, other.documents_variance) == (errors.mean, errors.documents_variance)


@pytest.mark.parametrize(("seeds", "others"), [(2, 2), (3, 7), (10, 4)])
def test_arms_without_common_seeds_are_compared_by_welchs_test(seeds: int, others: int) -> None:
    rng = np.random.default_rng(seeds)
    arm, baseline = rng.normal(1.0, 2.0, seeds), rng.normal(0.0, 1.0, others)
    errors = unpaired(arm[:, None], baseline[:, None], np.ones(1))
    want = stats.ttest_ind(arm, baseline, equal_var=False)
    assert (errors.p(), errors.freedom) == pytest.approx((want.pvalue, want.df))
    measured = describe(errors, documents=1, level=0.9, alpha=0.1, prior_used=False)
    assert (measured.low, measured.high) == pytest.approx(tuple(want.confidence_interval(0.9)))
    assert (measured.seeds, measured.by_seed, measured.p_signs) == (seeds, (), None)


@pytest.mark.parametrize(("by_seed", "by_document", "rest"), [(1, 0, 0), (1, 5, 5), (1, 15, 0), (0.01, 5, 5)])
def test_unpaired_intervals_keep_their_level(by_seed: float, by_document: float, rest: float) -> None:
    rng = np.random.default_rng(0)
    sizes, false = np.exp(0.5 * rng.standard_normal(41)), 0
    for _ in range(1000):
        document = rng.standard_normal((2, 1, 41)) * by_document  # the arm's effect on a document
        arm, baseline = (
            (by_seed * rng.standard_normal((n, 1)) + effect + rest * rng.standard_normal((n, 41))) * sizes
            for n, effect in zip((3, 5), document, strict=True)
        )
        false += bool(unpaired(arm, baseline, sizes).p() < 0.05)
    assert false / 1000 < 0.065


@pytest.mark.parametrize("n", [2, 3, 6, 9])
def test_sign_flips_agree_with_scipy(n: int) -> None:
    values = np.random.default_rng(n).normal(0.5, 1, n)
    want = stats.permutation_test(
        (values, np.zeros(n)), lambda x, y, axis: (x - y).mean(axis), permutation_type="samples", n_resamples=np.inf
    )
    assert sign_flip(values) == pytest.approx(want.pvalue)


def test_sign_flips_by_hand() -> None:
    assert sign_flip([1.0]) == 1
    assert sign_flip([1.0, 1.0]) == 0.5
    assert sign_flip([3.0, -1.0, 1.0]) == 0.75  # as far as 3: 5, 3, 3 and their negatives, but not 1 and -1
    assert sign_flip([0.0, 0.0, 0.0]) == 1


def test_sign_flips_drawn_at_random_agree_with_all_of_them() -> None:
    values = np.random.default_rng(1).normal(0.4, 1, 17)
    assert sign_flip(values) == pytest.approx(sign_flip(values, exact=17), abs=0.01)
    assert sign_flip(values) == sign_flip(values)
    assert sign_flip(np.arange(1.0, 31.0)) > 0  # the data's own flip counts: never exactly zero


@pytest.mark.parametrize(
    ("seeds", "level", "given"), [(5, 0.95, False), (6, 0.95, True), (6, 0.98, False), (7, 0.98, True)]
)
def test_sign_flips_are_omitted_if_they_cannot_reach_the_level(seeds: int, level: float, given: bool) -> None:
    assert (difference(*study(seeds, 3), level=level).p_signs is not None) == given


pairs = st.tuples(st.integers(3, 12), st.integers(0, 10**6))


def two_arms(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shared = rng.standard_normal(n)
    return 2 * rng.standard_normal(n) + shared, rng.standard_normal(n) + shared


def pitman_morgan(arm: np.ndarray, baseline: np.ndarray) -> float:
    return float(stats.pearsonr(arm + baseline, arm - baseline).pvalue)


@given(case=pairs)
@settings(deadline=None, max_examples=25)
def test_the_spread_test_combines_pitman_morgan_and_a_heavy_tailed_test(
    case: tuple[int, int],
) -> None:
    arm, baseline = two_arms(*case)
    n = len(arm)
    x, y = (arm - arm.mean()) ** 2, (baseline - baseline.mean()) ** 2
    pulls = x / x.mean() - y / y.mean()
    t = math.log(x.sum() / y.sum()) / (pulls.std(ddof=1) / math.sqrt(n) * n / (n - 1))
    measured = spread_ratio(list(arm), list(baseline))
    assert measured.p == pytest.approx(max(pitman_morgan(arm, baseline), 2 * stats.t.sf(abs(t), n - 1)), rel=1e-6)
    assert measured.ratio == pytest.approx(arm.std() / baseline.std())


@given(case=pairs, level=st.sampled_from([0.9, 0.95]))
@settings(deadline=None, max_examples=25)
def test_the_interval_of_a_spread_ratio_inverts_its_test(case: tuple[int, int], level: float) -> None:
    arm, baseline = two_arms(*case)
    measured = spread_ratio(list(arm), list(baseline), level=level)
    for end in (measured.low, measured.high):
        assert spread_ratio(list(arm), list(end * baseline)).p == pytest.approx(1 - level, rel=1e-4)
        assert pitman_morgan(arm, end * baseline) <= 1 - level + 1e-6
    inverse = spread_ratio(list(baseline), list(arm), level=level)
    assert (inverse.ratio, inverse.low, inverse.high) == pytest.approx(
        (1 / measured.ratio, 1 / measured.high, 1 / measured.low)
    )


@pytest.mark.parametrize("seeds", [3, 5, 10])
@pytest.mark.parametrize("law", ["normal", "gamma"])
def test_equal_spreads_are_rarely_called_different(seeds: int, law: str) -> None:
    rng = np.random.default_rng(0)
    draw = rng.standard_normal if law == "normal" else lambda size: rng.gamma(8.0, size=size)
    ps = [spread_ratio(list(draw(seeds)), list(draw(seeds))).p for _ in range(1000)]
    assert np.mean(np.array(ps) < 0.05) < 0.07


def test_too_few_seeds_or_no_variance_give_no_interval() -> None:
    assert spread_ratio([1.0], [2.0]) is None
    assert spread_ratio([1.0, 2.0], [3.0, 3.0]) is None
    two = spread_ratio([1.0, 3.0], [1.0, 2.0])
    assert (two.ratio, two.low, two.high, two.p) == (2, None, None, None)
    flat = spread_ratio([0.1, 0.1, 0.1], [1.0, 2.0, 4.0])
    assert (flat.low, flat.p) == (None, None)
    assert flat.ratio == pytest.approx(0, abs=1e-12)
    same = spread_ratio([1.0, 2.0, 4.0], [1.0, 2.0, 4.0])
    assert (same.ratio, same.low, same.high, same.p) == pytest.approx((1, 1, 1, 1), rel=1e-5)
    with pytest.raises(ValueError, match="the same seeds, got 2 and 1 losses"):
        spread_ratio([1.0, 2.0], [1.0])
