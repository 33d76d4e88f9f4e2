"""The rule of a study, and its tests for many studies at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qkflow.config import from_dict, to_dict
from qkflow.errors import UsageError
from qkflow.experiment.stats.prior import Prior
from qkflow.experiment.stats.rounds import PRIOR, Rule, plan_rounds
from qkflow.experiment.stats.simulation import KINDS, judge_studies
from qkflow.experiment.stats.verdict import Verdict, judge_round


def test_a_rule_survives_plain_data() -> None:
    rule = Rule(prior=Prior(spread=0.01, freedom=2.0))
    assert from_dict(Rule, to_dict(rule)) == rule
    assert from_dict(Rule, to_dict(Rule())) == Rule()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"error_rate": float("nan")}, "error_rate"),
        ({"error_rate": 1.0}, "error_rate"),
        ({"margin": 0.0}, "margin"),
        ({"margin": float("inf")}, "margin"),
        ({"seeds_by_round": ()}, "seeds_by_round"),
        ({"seeds_by_round": (0, 3)}, "seeds_by_round"),
        ({"seeds_by_round": (3, 3)}, "seeds_by_round"),
        ({"seeds_by_round": (3, 10**9)}, "seeds_by_round"),
        ({"spending": (0.5,)}, "spending"),
        ({"spending": (0.5, float("nan"))}, "spending"),
        ({"spending": (0.5, -0.1)}, "spending"),
        ({"spending": (0.9, 0.2)}, "sum to at most 1"),
    ],
)
def test_invalid_rules_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(Rule(seeds_by_round=(3, 5), spending=(0.5, 0.5)), **change)


def test_a_single_round_tests_at_what_it_spends_and_later_rounds_at_what_is_left() -> None:
    rule = Rule(seeds_by_round=(3,), spending=(0.3,))
    rates = [rule.alpha(round) for round in range(1, 60)]
    assert rates[:3] == pytest.approx([0.015, 0.8 * 0.035, 0.16 * 0.035])
    assert sum(rates) == pytest.approx(0.05)
    assert Rule(seeds_by_round=(3,), spending=(1.0,)).alpha(2) == 0
    with pytest.raises(ValueError, match="counted from 1, got 0"):
        Rule().alpha(0)


def test_rounds_of_one_study_test_at_more_than_they_spend() -> None:
    rule = Rule(seeds_by_round=(3, 6, 12), spending=(0.2, 0.3, 0.5))
    rates = [rule.alpha(round) for round in (1, 2, 3)]
    assert rates[0] == pytest.approx(0.01)
    assert all(rate > 0.05 * share for rate, share in zip(rates[1:], rule.spending[1:], strict=True))
    assert sum(rates) < 1.5 * 0.05


@pytest.mark.parametrize("seeds", [2, 3, 4, 5, 8, 13, 40, 200])
@pytest.mark.parametrize("prior", [None, PRIOR])
def test_a_plan_ends_with_the_seeds_that_it_has_time_for(seeds: int, prior: Prior | None) -> None:
    limited = plan_rounds(seeds, is_limited=True, prior=prior, error_rate=0.1, margin=0.02)
    assert limited.seeds_by_round[-1] == seeds
    assert (limited.prior, limited.error_rate, limited.margin) == (prior, 0.1, 0.02)
    assert sum(limited.spending) == pytest.approx(1) or (prior is not None and seeds < 6)
    longer = plan_rounds(seeds, is_limited=False, prior=prior)
    assert seeds in longer.seeds_by_round
    assert longer.seeds_by_round[-1] >= min(3 * seeds, 190)
    assert sum(longer.spending) <= 1
    planned = sum(share for n, share in zip(longer.seeds_by_round, longer.spending, strict=True) if n <= seeds)
    assert planned <= 0.8 + 1e-9


def test_a_plan_of_one_seed_is_kept_if_it_was_asked_for() -> None:
    assert plan_rounds(1, is_limited=True, prior=PRIOR).seeds_by_round == (1,)
    assert plan_rounds(1, is_limited=False, prior=PRIOR).seeds_by_round[:2] == (2, 3)


@pytest.mark.parametrize("prior", [None, Prior(spread=0.01)])
def test_many_studies_at_once_are_judged_like_one(prior: Prior | None) -> None:
    rule = Rule(prior=prior, margin=0.02, seeds_by_round=(3, 5, 8), spending=(0.4, 0.3, 0.3))
    rng = np.random.default_rng(1)
    shift = rng.choice([0.0, 0.0, 0.02, -0.04], (40, 3, 1, 1))
    differences = shift + 0.008 * rng.standard_normal((40, 3, 8, 1)) + 0.008 * rng.standard_normal((40, 1, 8, 1))
    differences = (differences + 0.01 * rng.standard_normal((40, 3, 8, 5))) * np.arange(1, 6)
    outcomes = judge_studies(differences, np.arange(1.0, 6.0), loss=1.0, rule=rule)
    assert len(np.unique(outcomes.codes)) == 4
    for study, codes, rounds in zip(differences, outcomes.codes, outcomes.rounds, strict=True):
        decided: dict[str, Verdict] = {}
        base = {seed: np.arange(1.0, 6.0) for seed in range(8)}
        for round, seeds in enumerate(rule.seeds_by_round, 1):
            losses = {
                "base": base,
                **{str(a): {i: base[i] + arm[i] for i in range(seeds)} for a, arm in enumerate(study)},
            }
            verdicts = judge_round(
                losses, np.arange(1.0, 6.0), baseline="base", rule=rule, round=round, decided=decided, scale=1.0
            )
            decided = {verdict.arm: verdict for verdict in verdicts}
        assert [decided[str(a)].kind for a in range(3)] == [KINDS[code] for code in codes]
        assert [decided[str(a)].round or 0 for a in range(3)] == rounds.tolist()
