"""Error rates over all rounds and arms: families of real runs, and simulations from their residuals.

Every .npz file in this folder is a record of runs that differ only in their seeds (benchmarks/calibration.py); one has
the training regime of version 0.1. Families of real runs are judged with the prior of studies. The simulations cover
arms that spread more than others, heavy tails, 2 to 10 seeds and 1 to 8 arms. These are small versions; run as a
script, this file prints the rates of larger ones.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from qkflow.experiment.stats.prior import PRIOR, Prior
from qkflow.experiment.stats.rounds import Rule, plan_rounds
from qkflow.experiment.stats.simulation import (
    BETTER,
    EQUIVALENT,
    WORSE,
    Calibration,
    draw_differences,
    draw_families,
    judge_studies,
    read_calibration,
)

CALIBRATIONS = [read_calibration(path) for path in sorted(Path(__file__).parent.glob("*.npz"))]
FIRST = read_calibration(Path(__file__).parent / "python-stdlib-100k.npz")
STUDIES = 1000
SPREADS = {"equal": (1.0, 1.0, 1.0, 1.0), "an arm": (1.0, 4.0, 1.0, 1.0), "the baseline": (4.0, 1.0, 1.0, 1.0)}
"""How much the baseline and the arms spread, relative to the prior."""


def prior(calibration: Calibration = FIRST) -> Prior:
    return Prior(spread=calibration.spread)


def rates(
    rule: Rule,
    *,
    calibration: Calibration = FIRST,
    arms: int = 3,
    spreads: tuple[float, ...] | None = None,
    tails: float | None = None,
    studies: int = STUDIES,
    most_seeds: int = 15,
) -> tuple[float, float]:
    """The rates of studies with a false better or worse, and with a false equivalent if the truth is at the margin."""
    seeds = max(n for n in rule.seeds_by_round if n <= most_seeds)
    differences = draw_differences(
        calibration, np.random.default_rng(0), studies=studies, arms=arms, seeds=seeds, spreads=spreads, tails=tails
    )
    loss = float(calibration.losses.mean())
    codes = judge_studies(differences, calibration.bytes, loss=loss, rule=rule).codes
    at_margin = differences + rule.margin * loss * calibration.bytes
    margin_codes = judge_studies(at_margin, calibration.bytes, loss=loss, rule=rule).codes
    return float(np.isin(codes, (BETTER, WORSE)).any(1).mean()), float((margin_codes == EQUIVALENT).any(1).mean())


def limit(rate: float, studies: int = STUDIES) -> float:
    """A rate plus two standard errors of its estimate."""
    return rate + 2 * (rate * (1 - rate) / studies) ** 0.5


@pytest.mark.parametrize("spreads", SPREADS.values(), ids=SPREADS)
@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
def test_the_error_rate_holds_if_arms_spread_more_than_the_prior_says(seeds: int, spreads: tuple[float, ...]) -> None:
    rule = plan_rounds(seeds, is_limited=True, prior=prior())
    different, equivalent = rates(rule, spreads=spreads)
    assert different <= limit(0.06)
    assert equivalent <= limit(0.05)


@pytest.mark.parametrize("spreads", SPREADS.values(), ids=SPREADS)
def test_the_error_rate_holds_if_a_study_goes_on_beyond_its_plan(spreads: tuple[float, ...]) -> None:
    different, equivalent = rates(plan_rounds(4, is_limited=False, prior=prior()), spreads=spreads)
    assert different <= limit(0.06)
    assert equivalent <= limit(0.05)


@pytest.mark.parametrize("seeds", [3, 10])
@pytest.mark.parametrize("has_prior", [True, False])
def test_the_error_rate_holds_with_heavy_tails(seeds: int, has_prior: bool) -> None:
    rule = plan_rounds(seeds, is_limited=True, prior=prior() if has_prior else None)
    different, equivalent = rates(rule, tails=3.0)
    assert different <= limit(0.06)
    assert equivalent <= limit(0.05)


@pytest.mark.parametrize("arms", [1, 2, 8])
@pytest.mark.parametrize("has_prior", [True, False])
def test_the_error_rate_holds_for_any_number_of_arms(arms: int, has_prior: bool) -> None:
    rule = plan_rounds(6, is_limited=True, prior=prior() if has_prior else None)
    studies = 300 if arms == 8 else STUDIES
    different, equivalent = rates(rule, arms=arms, studies=studies)
    assert different <= limit(0.06, studies)
    assert equivalent <= limit(0.05, studies)


def test_a_single_arm_without_a_prior_uses_the_error_rate_that_it_may_spend() -> None:
    different, _ = rates(plan_rounds(10, is_limited=True), arms=1, studies=4000)
    assert 0.03 < different < limit(0.05, 4000)


def test_equivalence_with_many_seeds_errs_at_most_as_often_as_it_may() -> None:
    """With the truth at the margin and enough seeds, false equivalents come close to the error rate."""
    rule = plan_rounds(50, is_limited=True, prior=prior())
    _, equivalent = rates(rule, most_seeds=50, studies=400)
    assert 0.005 < equivalent <= limit(0.05, 400)


@pytest.mark.parametrize("calibration", CALIBRATIONS, ids=lambda calibration: calibration.name)
def test_families_of_equal_arms_from_real_runs_err_rarely(calibration: Calibration) -> None:
    estimate, low, _ = family_rate(calibration, studies=500, times=20)
    assert estimate <= 0.06
    assert low <= 0.05


def family_rate(calibration: Calibration, *, studies: int, times: int) -> tuple[float, float, float]:
    """The rate of real families with a false better or worse, over all rounds, and its interval over data seeds."""
    rng, n_data = np.random.default_rng(0), len(calibration.nats)
    seeds = min(8, n_data // 2)
    rule = plan_rounds(seeds, is_limited=True, prior=PRIOR)

    def rate(pool: np.ndarray | None, count: int) -> float:
        differences = draw_families(calibration, rng, studies=count, seeds=seeds, pool=pool)
        outcomes = judge_studies(differences, calibration.bytes, loss=float(calibration.losses.mean()), rule=rule)
        return float(np.isin(outcomes.codes, (BETTER, WORSE)).any(1).mean())

    pools = [rng.integers(0, n_data, n_data) for _ in range(times)]
    resampled = [rate(pool, studies // 4) for pool in pools if len(np.unique(pool)) >= seeds]
    low, high = np.quantile(resampled, (0.025, 0.975))
    return rate(None, studies), float(low), float(high)


def test_draws_from_residuals_have_the_spread_of_the_record() -> None:
    differences = draw_differences(FIRST, np.random.default_rng(0), studies=2000, arms=1, seeds=5)
    spread = (differences.sum(-1) / FIRST.bytes.sum()).std() / FIRST.losses.mean()
    assert spread == pytest.approx(FIRST.spread, rel=0.03)
    heavy = draw_differences(FIRST, np.random.default_rng(0), studies=4000, arms=1, seeds=5, tails=5.0)
    assert (heavy.sum(-1) / FIRST.bytes.sum()).std() / FIRST.losses.mean() == pytest.approx(FIRST.spread, rel=0.1)


def table(studies: int) -> None:
    """Print the rates of all cases: false better or worse, and false equivalent at the margin."""
    for calibration in CALIBRATIONS:
        estimate, low, high = family_rate(calibration, studies=studies, times=200)
        print(f"{calibration.name}: real families {estimate:.1%} ({low:.1%} to {high:.1%})")
    print("seeds  rounds go on  " + "".join(f"{name + ' spreads':>24}" for name in SPREADS) + f"{'heavy tails':>24}")
    for seeds, is_limited in ((2, True), (3, True), (5, True), (10, True), (3, False), (4, False), (8, False)):
        rule = plan_rounds(seeds, is_limited=is_limited, prior=prior())
        cases = [rates(rule, spreads=spreads, studies=studies) for spreads in SPREADS.values()]
        cases.append(rates(rule, tails=3.0, studies=studies))
        cells = "".join(f"{f'{different:.1%} ({equivalent:.1%})':>24}" for different, equivalent in cases)
        print(f"{seeds:5}  {'no' if is_limited else 'yes':>12}  {cells}", flush=True)


if __name__ == "__main__":
    table(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
