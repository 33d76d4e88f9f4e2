"""Published claims: their studies, and the rules that confirm or contradict them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from qkflow.cli import claims as cli_claims
from qkflow.cli import main
from qkflow.cli.claims import outcome_table, run_claim
from qkflow.cli.console import Console
from qkflow.config import to_dict
from qkflow.errors import UsageError
from qkflow.experiment.executors.local import LocalExecutor
from qkflow.experiment.result import ExperimentResult
from qkflow.experiment.stats.rounds import Rule
from qkflow.experiment.stats.verdict import judge_round
from qkflow.mechanisms import mechanism
from qkflow.recipes import CLAIMS, RECIPES, Claim, ClaimVerdict, claim
from qkflow.recipes.criteria import (
    MAIN,
    Criterion,
    all_of,
    equality,
    inferiority,
    interaction,
    non_inferiority,
    superiority,
    variance_ratio,
)
from qkflow.recipes.studies import LanguageStudy

Measure = Callable[..., ExperimentResult]
LOSS = 2.0
MARGIN = 0.005 * LOSS


@pytest.fixture
def measured(synthetic: ModuleType) -> Measure:
    """A result whose arms differ from the baseline by given amounts, each with a given spread over seeds."""

    def make(
        shifts: Mapping[str, float],
        *,
        spread: float = 0.001,
        seeds: int = 10,
        spreads: Mapping[str, float] | None = None,
    ) -> ExperimentResult:
        names = ("a", *shifts)
        rng = np.random.default_rng(0)
        rule = Rule(seeds_by_round=(seeds,), spending=(1.0,))
        bits = {
            name: LOSS
            + {"a": 0.0, **shifts}[name]
            + (spreads or {}).get(name, spread) * _standardised(rng.standard_normal(seeds))
            for name in names
        }
        losses = {
            name: {seed: np.array([50.0, 50.0]) * value * math.log(2) for seed, value in enumerate(values)}
            for name, values in bits.items()
        }
        verdicts = judge_round(losses, np.array([50, 50]), baseline="a", rule=rule, round=1)
        result = synthetic.study(names)
        arms = tuple(
            replace(arm, seeds=tuple(range(seeds)), losses=tuple(bits[arm.name]), mean=float(bits[arm.name].mean()))
            for arm in result.arms
        )
        design: dict[str, Any] = {**result.design, "rule": to_dict(rule), "spec": {"margin": 0.005}}
        return replace(result, arms=arms, verdicts=verdicts, design=design, margin=MARGIN, baseline="a")

    return make


def _standardised(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / values.std(ddof=1)


@pytest.mark.parametrize(
    ("criterion", "shifts", "outcome"),
    [
        (superiority("b"), {"b": -0.1}, "confirmed"),
        (superiority("b"), {"b": 0.1}, "contradicted"),
        (superiority("b"), {"b": 0.0}, "contradicted"),  # equivalent within the margin
        (superiority("b", "c"), {"b": -0.1, "c": -0.1}, "confirmed"),
        (superiority("b", "c"), {"b": -0.1, "c": 0.1}, "contradicted"),
        (inferiority("b"), {"b": 0.1}, "confirmed"),
        (inferiority("b"), {"b": -0.1}, "contradicted"),
        (equality("b"), {"b": 0.0}, "confirmed"),
        (equality("b"), {"b": 0.0031}, "confirmed"),  # different from zero, but within the margin
        (equality("b"), {"b": -0.1}, "contradicted"),
        (equality("b"), {"b": 0.1}, "contradicted"),
        (equality("b"), {"b": MARGIN}, "undecided"),
        (non_inferiority("b"), {"b": -0.1}, "confirmed"),
        (non_inferiority("b"), {"b": 0.0}, "confirmed"),
        (non_inferiority("b"), {"b": MARGIN}, "undecided"),
        (non_inferiority("b"), {"b": 0.1}, "contradicted"),
        (non_inferiority("b", margin=0.2), {"b": 0.1}, "confirmed"),
        (all_of(inferiority("b"), superiority("c")), {"b": 0.1, "c": -0.1}, "confirmed"),
        (all_of(inferiority("b"), superiority("c")), {"b": 0.1, "c": 0.1}, "contradicted"),
        (superiority("d"), {"b": -0.1}, "undecided"),  # no runs of this arm
    ],
)
def test_the_outcome_follows_from_the_difference(
    measured: Measure, criterion: Criterion, shifts: dict[str, float], outcome: str
) -> None:
    assert criterion({MAIN: measured(shifts)}).outcome == outcome


@pytest.mark.parametrize("criterion", [superiority("b"), equality("b"), non_inferiority("b"), inferiority("b")])
def test_noise_leaves_a_claim_undecided(measured: Measure, criterion: Criterion) -> None:
    assert criterion({MAIN: measured({"b": 0.01}, spread=0.1)}).outcome == "undecided"
    assert criterion({}).outcome == "undecided"


@pytest.mark.parametrize(("spread", "outcome"), [(0.01, "confirmed"), (0.00142, "undecided"), (0.001, "contradicted")])
def test_a_ratio_of_variances_needs_its_interval_on_one_side(measured: Measure, spread: float, outcome: str) -> None:
    result = measured({"b": 0.0}, seeds=40, spreads={"b": spread})
    verdict = variance_ratio("b", "a", above=2.0)({MAIN: result})
    assert verdict.outcome == outcome
    assert verdict.readings[0].value == pytest.approx((spread / 0.001) ** 2, rel=1e-6)


@pytest.mark.parametrize(
    ("first", "second", "outcome"),
    [
        (-0.1, 0.1, "confirmed"),
        (-0.1, -0.2, "contradicted"),
        (-0.1, -0.1, "contradicted"),
        (0.0, 0.0012, "contradicted"),
    ],
)
def test_an_interaction_is_a_difference_of_relative_differences(
    measured: Measure, first: float, second: float, outcome: str
) -> None:
    results = {"x": measured({"b": first}), "y": measured({"b": second})}
    verdict = interaction("b", helps="x", hurts="y")(results)
    assert verdict.outcome == outcome
    assert verdict.readings[0].value == pytest.approx((first - second) / LOSS, abs=1e-9)
    noisy = {**results, "y": measured({"b": second}, spread=1.0)}
    assert interaction("b", helps="x", hurts="y")(noisy).outcome == "undecided"


def test_claims_have_names_of_their_own_and_arms_that_exist() -> None:
    names = [candidate.name for candidate in CLAIMS]
    numbers = [candidate.number for candidate in CLAIMS]
    assert len({*names}) == len(names)
    assert sorted({*numbers}) == numbers
    assert not {*names} & {*RECIPES}
    for candidate in CLAIMS:
        assert {*candidate.deciding} <= {*candidate.studies}
        for study in candidate.studies.values():
            for arm in study.arms:
                if isinstance(study, LanguageStudy):
                    mechanism(arm)


def test_all_eighteen_claims_are_tested() -> None:
    assert [candidate.number for candidate in CLAIMS] == list(range(1, 19))


@pytest.mark.parametrize("candidate", CLAIMS, ids=lambda candidate: candidate.name)
def test_language_studies_try_the_same_rates_for_every_arm(candidate: Claim) -> None:
    for name, study in candidate.studies.items():
        if isinstance(study, LanguageStudy):
            spec = study.spec(None)
            assert spec.learning_rates is not None
            assert len(spec.learning_rates) == (1 if candidate.name == "qdelta-stable" else 3), name
            assert study.spec(None, budget=60.0).budget == 60.0


def test_a_task_needs_its_files_and_takes_no_text(tmp_path: Path) -> None:
    study = claim("coupled-glue").studies[MAIN]
    with pytest.raises(UsageError, match="--data-dir"):
        study.spec(None)
    with pytest.raises(UsageError, match="leave it out"):
        study.spec(str(tmp_path), corpus="enwik8")


def test_generated_tasks_need_no_files() -> None:
    spec = claim("factorised-collapsed").studies["collapsed"].spec(None)
    assert spec.arms == ("standard:r=1", "standard:r=1,growth=10")
    assert spec.rationale is not None


def test_a_claim_is_named_by_its_number_too_and_unknown_ones_are_refused() -> None:
    assert claim("18") is claim("frustrated-better")
    with pytest.raises(UsageError, match="coupled-better"):
        claim("coupled-beter")


def test_an_outcome_is_printed_in_80_columns_and_recorded(
    measured: Measure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    chosen = claim("coupled-better")
    requested: list[Any] = []

    def run_and_present(spec: Any, folder: Path, **options: Any) -> ExperimentResult:
        requested.append((spec, folder))
        return measured({"coupled": -0.1})

    monkeypatch.setattr(cli_claims, "run_and_present", run_and_present)
    console = Console(width=80, record=True)
    verdict = run_claim(chosen, tmp_path, executor=LocalExecutor(), console=console, budget=900.0)
    assert verdict.outcome == "confirmed"
    (spec, folder), text = requested[0], console.export_text()
    assert (spec.budget, spec.tokens, spec.learning_rates, folder) == (900.0, None, None, tmp_path / chosen.name / MAIN)
    assert "confirmed" in text
    assert "24.22" in text
    assert max(len(line) for line in text.splitlines() if "http" not in line) <= 80
    assert (tmp_path / "claims.json").exists()


def test_a_claim_without_runs_prints_dashes() -> None:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(outcome_table(claim("1"), ClaimVerdict(outcome="undecided", readings=())))
    assert "undecided" in captured.get()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--all", "--controls"], "leave out --controls"),
        (["--all", "--scale", "paper"], "laptop scale"),
        (["coupled-better", "--scale", "paper"], "laptop scale"),
        (["coupled-60m", "--controls"], "is a table"),
        (["coupled-beter"], "coupled-better"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["reproduce", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
