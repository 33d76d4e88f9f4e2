"""Verdicts of a round: kinds, sentences, families over rounds, and the record of a decision."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.config import from_dict, to_dict
from qkflow.experiment.stats.prior import Prior
from qkflow.experiment.stats.rounds import Rule
from qkflow.experiment.stats.t_dist import seeds_needed
from qkflow.experiment.stats.verdict import Verdict, judge_round

CLEAR = (0.030, 0.032, 0.028, 0.031, 0.034)
NONE = (0.001, -0.001, 0.0005, -0.0015, 0.002)
WIDE = (0.05, -0.04, 0.06, -0.01, 0.03)
ONCE = Rule(seeds_by_round=(2,), spending=(1.0,))


def runs(arms: Mapping[str, Sequence[float] | Mapping[int, float]], documents: int = 4, pull: float = 0.0) -> Any:
    """Losses of a baseline at 2 bits per byte, and of arms with these differences, over documents of one byte."""
    rng = np.random.default_rng(0)
    pulls = pull * np.where(np.arange(documents) % 2, 1.0, -1.0)  # every other document pulls up, the others down
    noise = rng.normal(0, 0.1, 10).tolist()
    base = {seed: np.full(documents, 2 + noise[seed]) for seed in range(10)}
    by_arm = {
        arm: dict(enumerate(values)) if not isinstance(values, Mapping) else values for arm, values in arms.items()
    }
    losses: dict[str, dict[int, np.ndarray]] = {"standard": base}
    for arm, values in by_arm.items():
        losses[arm] = {seed: base.get(seed, np.full(documents, 2.0)) + pulls + x for seed, x in values.items()}
    return {arm: {seed: nats * math.log(2) for seed, nats in by_seed.items()} for arm, by_seed in losses.items()}


def verdicts(
    rule: Rule = ONCE, *, round: int = 1, documents: int = 4, pull: float = 0.0, margin: float = 0.01, **arms: Any
) -> list[Verdict]:
    losses, sizes = runs(arms, documents, pull), np.ones(documents)
    return list(judge_round(losses, sizes, baseline="standard", rule=rule, round=round, margin=margin))


def test_a_clear_difference_is_better_or_worse_with_its_size() -> None:
    worse, better = verdicts(up=CLEAR, down=[-x for x in CLEAR])
    assert (worse.kind, better.kind) == ("worse", "better")
    assert worse.sentence == "worse by 0.0310 bits per byte (1.5%), 95% interval 0.0282 to 0.0338, 5 seeds"
    assert better.sentence == "better by 0.0310 bits per byte (1.5%), 95% interval 0.0282 to 0.0338, 5 seeds"
    assert (worse.round, worse.advice, worse.seeds_needed, worse.paired) == (1, None, None, "paired")
    assert worse.p_adjusted is not None
    assert worse.p_adjusted < 0.001
    assert worse.difference is not None
    assert worse.difference.mean == pytest.approx(0.031)
    assert not worse.difference.prior_used


def test_a_difference_within_the_margin_is_equivalent() -> None:
    (verdict,) = verdicts(same=NONE)
    assert verdict.kind == "equivalent"
    assert verdict.sentence == "equivalent: +0.0002 bits per byte, 95% interval -0.0016 to +0.0020, 5 seeds"
    assert verdict.round == 1


def test_better_or_worse_wins_over_equivalent() -> None:
    (verdict,) = verdicts(arm=[x / 10 for x in CLEAR])
    assert (verdict.p_adjusted or 1) < 0.05
    assert (verdict.p_equivalent or 1) < 0.05
    assert verdict.kind == "worse"


def test_an_uncertain_difference_is_undecided_with_the_seeds_that_would_decide() -> None:
    rule = Rule(seeds_by_round=(5, 10), spending=(0.5, 0.2))
    (verdict,) = verdicts(rule, arm=WIDE)
    assert (verdict.kind, verdict.round) == ("undecided", None)
    assert verdict.sentence == "undecided: +0.018 bits per byte, 95% interval -0.034 to +0.070, 5 seeds"
    want = seeds_needed(0.018, spread=float(np.std(WIDE, ddof=1)), alpha=rule.alpha(2))
    assert verdict.seeds_needed == want
    assert verdict.advice == f"About {want} seeds would decide, longer runs or a wider margin may be cheaper."


def test_the_advice_says_when_only_the_arms_own_interval_excludes_zero() -> None:
    rule = Rule(seeds_by_round=(5, 10), spending=(0.01, 0.2))
    (verdict,) = verdicts(rule, arm=(0.01, 0.02, 0.03, 0.04, 0.05))
    assert verdict.kind == "undecided"
    assert verdict.difference is not None
    assert (verdict.difference.low or 0) > 0
    assert verdict.advice is not None
    assert verdict.advice.startswith("The interval of this arm alone is not enough: about")


def test_a_difference_near_zero_needs_the_seeds_of_an_equivalence_test() -> None:
    (verdict,) = verdicts(arm=(0.02, -0.02, 0.012, -0.012, 0.0))
    assert verdict.kind == "undecided"
    spread = float(np.std((0.02, -0.02, 0.012, -0.012, 0.0), ddof=1))
    assert verdict.seeds_needed == seeds_needed(0.01, spread=spread, alpha=0.1, chance=0.9)
    values = spread * np.random.default_rng(0).standard_normal((4000, verdict.seeds_needed or 0))
    errors = values.std(1, ddof=1) / math.sqrt(values.shape[1])
    from scipy import stats

    farthest = np.abs(values.mean(1)) + stats.t.isf(0.05, values.shape[1] - 1) * errors
    assert (farthest < 0.01).mean() == pytest.approx(0.8, abs=0.05)


def test_more_arms_need_more_seeds() -> None:
    rule = Rule(seeds_by_round=(5, 10), spending=(0.5, 0.5))
    alone, among = verdicts(rule, arm=WIDE)[0], verdicts(rule, arm=WIDE, b=WIDE, c=WIDE)[0]
    assert (among.seeds_needed or 0) > (alone.seeds_needed or 0)


def test_advice_where_seeds_do_not_help() -> None:
    rule = Rule(seeds_by_round=(5, 10), spending=(0.5, 0.5))
    (documents,) = verdicts(rule, arm=(0.003, 0.004, 0.002), pull=0.1)
    assert documents.seeds_needed is None
    assert "4 held-out documents vary too much" in (documents.advice or "")
    (many,) = verdicts(rule, arm=(0.05, -0.05, 0.06, -0.06, 0.0), margin=1e-4)
    assert "More than 1000 seeds" in (many.advice or "")


def test_one_seed_has_no_interval_and_no_verdict_even_with_a_prior() -> None:
    for prior in (None, Prior(spread=1e-6)):
        (verdict,) = verdicts(replace(ONCE, prior=prior), arm=(0.03,))
        assert verdict.kind == "undecided"
        assert verdict.sentence == "undecided: +0.030 bits per byte, one seed has no interval"
        assert verdict.difference is not None
        assert (verdict.difference.seeds, verdict.difference.p, verdict.p_adjusted) == (1, None, None)


def test_an_arm_without_a_pair_is_undecided_and_counts_in_the_family() -> None:
    alone = verdicts(arm=(0.011, 0.029, 0.0145))[0]
    lost, arm = verdicts(lost=(), arm=(0.011, 0.029, 0.0145))
    assert (lost.kind, lost.difference) == ("undecided", None)
    assert "no seed has finished runs of both" in lost.sentence
    assert (arm.p_adjusted or 0) > (alone.p_adjusted or 1)
    assert alone.p_adjusted == alone.difference.p  # a single arm needs no adjustment


def test_only_common_seeds_are_compared() -> None:
    (verdict,) = verdicts(arm={0: 0.03, 1: 0.032, 3: 0.028, 50: 9.0})
    assert verdict.paired == "partly"
    assert verdict.difference is not None
    assert verdict.difference.by_seed == pytest.approx((0.03, 0.032, 0.028))


def test_unpaired_arms_are_compared_only_on_request() -> None:
    losses = runs({"arm": {50: 3.0, 51: 3.1, 52: 3.2}})
    (refused,) = judge_round(losses, np.ones(4), baseline="standard", rule=ONCE, round=1)
    assert refused.difference is None
    (verdict,) = judge_round(losses, np.ones(4), baseline="standard", rule=ONCE, round=1, may_be_unpaired=True)
    assert (verdict.kind, verdict.paired) == ("worse", "unpaired")
    assert verdict.difference is not None
    assert verdict.difference.seeds == 3


def test_identical_runs_are_equivalent() -> None:
    for prior in (None, Prior(spread=0.1)):
        (verdict,) = verdicts(replace(ONCE, prior=prior), arm=(0.0, 0.0, 0.0))
        assert verdict.kind == "equivalent"
        assert verdict.sentence == "equivalent: every pair of runs has the same loss, 3 seeds"


def test_the_prior_decides_with_two_seeds_and_is_dropped_where_it_is_wrong() -> None:
    rule = replace(ONCE, prior=Prior(spread=0.002))
    (without,), (moderated,) = verdicts(arm=(0.009, 0.0125)), verdicts(rule, arm=(0.009, 0.0125))
    assert (without.kind, moderated.kind) == ("undecided", "worse")
    assert moderated.difference is not None
    assert moderated.difference.prior_used
    assert moderated.difference.freedom == 4
    (dropped,) = verdicts(rule, arm=(0.03, 0.05))
    assert dropped.difference is not None
    assert not dropped.difference.prior_used
    assert dropped.difference.freedom == 1


def test_a_baseline_that_spreads_drops_the_prior_of_all_arms() -> None:
    rule = replace(ONCE, prior=Prior(spread=0.005))
    swing, jitter = np.array([0.012, -0.012, 0.012, -0.012]), np.array([0.001, 0.001, -0.001, -0.001])
    (alone,) = verdicts(rule, arm=tuple(0.8 * swing))
    assert alone.difference is not None
    assert alone.difference.prior_used  # plausible for one arm
    for verdict in verdicts(rule, a=tuple(swing + jitter), b=tuple(swing - jitter)):
        assert verdict.difference is not None
        assert not verdict.difference.prior_used  # the arms move together: it is the baseline


def test_verdicts_are_final() -> None:
    rule = Rule(seeds_by_round=(3, 5), spending=(0.5, 0.5))
    first = verdicts(rule, a=CLEAR[:3], b=WIDE[:3], c=NONE[:3])
    assert [verdict.kind for verdict in first] == ["worse", "undecided", "equivalent"]
    losses = runs({"a": WIDE, "b": WIDE, "c": WIDE})
    decided = {verdict.arm: verdict for verdict in first}
    second = judge_round(losses, np.ones(4), baseline="standard", rule=rule, round=2, decided=decided, margin=0.01)
    assert (second[0], second[2]) == (first[0], first[2])
    assert second[1].difference is not None
    assert second[1].difference.seeds == 5


def test_a_rejected_hypothesis_leaves_its_family_and_an_equivalent_arm_keeps_its_share() -> None:
    rule, arms = Rule(seeds_by_round=(3, 5), spending=(0.5, 0.5)), {"a": WIDE, "b": WIDE, "c": WIDE}
    losses = runs(arms)

    def second_round(**kinds: Any) -> Verdict:
        decided = {arm: Verdict(arm=arm, kind=kind, sentence="") for arm, kind in kinds.items()}
        judged = judge_round(losses, np.ones(4), baseline="standard", rule=rule, round=2, decided=decided, margin=0.1)
        return next(verdict for verdict in judged if verdict.arm == "a")

    p = second_round(b="worse", c="worse")
    assert p.difference is not None
    assert p.p_adjusted == p.difference.p  # alone in its family
    shared = second_round(b="equivalent", c="worse")
    assert shared.p_adjusted == pytest.approx(1 - (1 - p.p_adjusted) ** 2)
    one_sided = second_round(b="equivalent", c="equivalent").p_equivalent or 0
    assert second_round(b="equivalent", c="worse").p_equivalent == pytest.approx(2 * one_sided)
    assert second_round(b="worse", c="better").p_equivalent == pytest.approx(3 * one_sided)


def test_a_verdict_survives_json_to_the_bit_and_the_same_losses_give_the_same_bytes() -> None:
    rule = replace(ONCE, prior=Prior(spread=0.008))
    records = [
        json.dumps([to_dict(v) for v in verdicts(rule, a=CLEAR, b=WIDE, c=NONE, d=(0.1,), e=())]) for _ in range(2)
    ]
    assert records[0] == records[1]
    for record, verdict in zip(
        json.loads(records[0]), verdicts(rule, a=CLEAR, b=WIDE, c=NONE, d=(0.1,), e=()), strict=True
    ):
        assert from_dict(Verdict, record) == verdict
        assert json.loads(json.dumps(to_dict(from_dict(Verdict, record)))) == record
    assert "NaN" not in records[0]
    assert "Infinity" not in records[0]


def test_the_order_of_seeds_in_the_mapping_does_not_matter_for_kinds() -> None:
    losses = runs({"a": CLEAR, "b": WIDE})
    turned = {arm: dict(reversed(by_seed.items())) for arm, by_seed in losses.items()}
    one, two = (judge_round(x, np.ones(4), baseline="standard", rule=ONCE, round=1) for x in (losses, turned))
    assert [v.kind for v in one] == [v.kind for v in two]
    assert [v.p_adjusted for v in one] == pytest.approx([v.p_adjusted for v in two])


def test_a_higher_number_can_be_better() -> None:
    (verdict,) = judge_round(
        runs({"a": CLEAR}), np.ones(4), baseline="standard", rule=ONCE, round=1, unit=None, is_higher_better=True
    )
    assert verdict.kind == "better"
    assert verdict.sentence == "better by 0.0310 (1.5%), 95% interval 0.0282 to 0.0338, 5 seeds"


@given(
    values=st.lists(st.integers(-300, 300).map(lambda x: x / 10**4), min_size=2, max_size=6),
    pull=st.sampled_from([0.0, 0.01]),
)
@settings(deadline=None, max_examples=25)
def test_the_verdict_of_a_single_arm_agrees_with_its_interval(values: list[float], pull: float) -> None:
    (verdict,) = verdicts(arm=values, pull=pull)
    judged = verdict.difference
    assert judged is not None
    assert judged.low is not None
    assert judged.high is not None
    if judged.high < -1e-12:
        assert verdict.kind == "better"
    elif judged.low > 1e-12:
        assert verdict.kind == "worse"
    elif max(-judged.low, judged.high) < 0.01:
        assert verdict.kind == "equivalent"  # the converse needs a 90 % interval: one-sided tests
    assert (verdict.advice is None) == (verdict.kind != "undecided")


def test_sentences_fit_a_line() -> None:
    for verdict in verdicts(a=CLEAR, b=WIDE, c=NONE, d=(0.1,), e=(), f=(1.5, 1.4, 1.6)):
        assert len(verdict.sentence) <= 80
        assert "\n" not in verdict.sentence


def test_the_margin_is_a_fraction_of_the_baselines_loss() -> None:
    losses = runs({"arm": NONE})
    (within,) = judge_round(losses, np.ones(4), baseline="standard", rule=replace(ONCE, margin=0.005), round=1)
    (beyond,) = judge_round(losses, np.ones(4), baseline="standard", rule=replace(ONCE, margin=0.0005), round=1)
    assert (within.kind, beyond.kind) == ("equivalent", "undecided")
    with pytest.raises(ValueError, match="above 0, got 0"):
        verdicts(arm=NONE, margin=0.0)


def test_invalid_losses_are_refused() -> None:
    losses = runs({"arm": NONE})
    with pytest.raises(ValueError, match="baseline 'other' has no losses"):
        judge_round(losses, np.ones(4), baseline="other", rule=ONCE, round=1)
    with pytest.raises(ValueError, match="none negative"):
        judge_round(losses, -np.ones(4), baseline="standard", rule=ONCE, round=1)
    with pytest.raises(ValueError, match="expected one for each of 3 documents"):
        judge_round(losses, np.ones(3), baseline="standard", rule=ONCE, round=1)
    losses["arm"][2] = losses["arm"][2] * np.nan
    with pytest.raises(ValueError, match="arm, seed 2: a loss is not finite"):
        judge_round(losses, np.ones(4), baseline="standard", rule=ONCE, round=1)


def test_a_study_without_runs_has_no_verdicts_yet() -> None:
    judged = judge_round({"standard": {}, "arm": {}}, np.ones(1), baseline="standard", rule=ONCE, round=1)
    assert [verdict.kind for verdict in judged] == ["undecided"]
