"""Claims about tasks: the rules of intervals, and the quantities they are applied to."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest

from qkflow.experiment.metrics.rationale import MetricChange, RationaleSummary, TrainingPoint
from qkflow.experiment.result import ExperimentResult
from qkflow.recipes.criteria import MAIN, Outcome
from qkflow.recipes.task_criteria import (
    accuracy,
    equal,
    higher,
    mass_between,
    mass_trend,
    metric,
    not_lower,
    stability,
)


@pytest.mark.parametrize(
    ("low", "high", "outcomes"),
    [  # of higher, not_lower and equal with a margin of 0.01
        (0.02, 0.05, ("confirmed", "confirmed", "contradicted")),
        (0.001, 0.005, ("confirmed", "confirmed", "confirmed")),
        (-0.005, 0.005, ("contradicted", "confirmed", "confirmed")),
        (-0.05, -0.02, ("contradicted", "contradicted", "contradicted")),
        (-0.05, 0.05, ("undecided", "undecided", "undecided")),
        (-0.005, 0.05, ("undecided", "confirmed", "undecided")),
        (-0.015, -0.005, ("contradicted", "undecided", "undecided")),
    ],
)
def test_the_outcome_follows_from_the_ends_of_the_interval(
    low: float, high: float, outcomes: tuple[Outcome, ...]
) -> None:
    assert tuple(rule(0.01)(low, high) for rule in (higher, not_lower, equal)) == outcomes


def study(synthetic: ModuleType, summary: RationaleSummary) -> ExperimentResult:
    return replace(synthetic.study(("a", "b")), rationale=summary)


def with_masses(summary: RationaleSummary, masses: dict[str, list[float]]) -> RationaleSummary:
    """Every run reaches the loss 0.5 with the given mass."""

    def path(mass: float) -> tuple[TrainingPoint, ...]:
        points = ((0, 1.0, 0.1), (10, 0.5, mass))
        return tuple(TrainingPoint(step=step, loss=loss, mass=m, performance=0.5) for step, loss, m in points)

    arms = tuple(
        replace(summary.arms[0], name=name, seeds=tuple(range(len(values))), paths=tuple(map(path, values)))
        for name, values in masses.items()
    )
    return replace(summary, arms=arms)


def test_a_metric_is_read_in_points(synthetic: ModuleType) -> None:
    summary = synthetic.rationale_study()
    arm = summary.arms[1].name
    change = MetricChange(arm=arm, metric="confident", mean=0.3, low=0.2, high=0.4, p=0.001, p_holm=0.001)
    verdict = metric("confident", arm, higher(0.01))({MAIN: study(synthetic, replace(summary, changes=(change,)))})
    (reading,) = verdict.readings
    assert (verdict.outcome, reading.unit, reading.seeds) == ("confirmed", "points", len(summary.arms[1].seeds))
    assert (reading.value, reading.low, reading.high) == pytest.approx((30.0, 20.0, 40.0))
    missing = metric("mass", arm, higher(0.01))({MAIN: study(synthetic, replace(summary, changes=()))})
    assert missing.outcome == "undecided"


@pytest.mark.parametrize(("slope", "outcome"), [(0.05, "confirmed"), (-0.05, "contradicted"), (0.0, "contradicted")])
def test_the_trend_is_the_slope_over_doublings_of_r(synthetic: ModuleType, slope: float, outcome: str) -> None:
    noise = 0.001 * np.random.default_rng(0).standard_normal((3, 6))
    masses = {
        f"r = {r:g}": [0.4 + slope * np.log2(r) + error for error in noise[index]]
        for index, r in enumerate((1.0, 4.0, 16.0))
    }
    summary = with_masses(synthetic.rationale_study(), masses)
    verdict = mass_trend(higher(0.01))({MAIN: study(synthetic, summary)})
    assert verdict.outcome == outcome
    assert verdict.readings[0].value == pytest.approx(100 * slope, abs=0.1)


@pytest.mark.parametrize(("shift", "outcome"), [(0.0, "confirmed"), (0.2, "contradicted")])
def test_masses_of_two_studies_are_compared_at_one_loss(synthetic: ModuleType, shift: float, outcome: str) -> None:
    summary = synthetic.rationale_study()
    first = with_masses(summary, {"r = 1": [0.40, 0.41, 0.42], "r = 9": [0.9, 0.9, 0.9]})
    second = with_masses(summary, {"r = 1 to 10": [0.41 - shift, 0.41 - shift, 0.41 - shift]})
    criterion = mass_between(("x", "r = 1"), ("y", "r = 1 to 10"), equal(0.05))
    verdict = criterion({"x": study(synthetic, first), "y": study(synthetic, second)})
    assert verdict.outcome == outcome
    assert verdict.readings[0].value == pytest.approx(100 * shift)
    assert criterion({}).outcome == "undecided"


def test_accuracy_on_a_recall_task_is_read_over_its_grid(synthetic: ModuleType) -> None:
    result = synthetic.task(("standard", "differential"), seeds=8)
    verdict = accuracy("differential", higher(0.01))({MAIN: result})
    assert verdict.outcome == "contradicted"  # later arms remember less
    assert verdict.readings[0].seeds == 8
    assert accuracy("differential", higher(0.01))({}).outcome == "undecided"


def test_one_run_that_fails_or_ends_high_contradicts_stability(synthetic: ModuleType) -> None:
    names = ("best", "3 x")
    result = synthetic.study(("a", "b"))
    arm = replace(result.arms[1], losses=(2.0, 2.1, 2.0), failures=())

    def outcome(**changes: object) -> str:
        later = replace(result, arms=(result.arms[0], replace(arm, **changes)))
        return stability("b", studies=names)(
            {"best": replace(result, arms=(result.arms[0], arm)), "3 x": later}
        ).outcome

    assert outcome() == "confirmed"
    assert outcome(losses=(2.0, 2.1, 2.3)) == "contradicted"
    assert outcome(losses=(2.0, 2.1), failures=("seed 2: the loss is not finite",)) == "contradicted"
    assert stability("b", studies=names)({}).outcome == "undecided"


def test_an_arm_whose_runs_all_fail_is_not_stable(synthetic: ModuleType) -> None:
    result = synthetic.study(("a", "b"))
    arm = replace(result.arms[1], losses=(), failures=("seed 0: the loss is not finite",))
    failed = replace(result, arms=(result.arms[0], arm))
    assert stability("b", studies=("best",))({"best": failed}).outcome == "contradicted"
