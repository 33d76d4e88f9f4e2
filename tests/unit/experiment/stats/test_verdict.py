"""Verdicts and their sentences."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.experiment.stats.paired import Difference, difference, holm
from qkflow.experiment.stats.t_dist import RELATIVE_SPREAD, half_width, power, seeds_needed
from qkflow.experiment.stats.verdict import Verdict, equivalence, judge, look_rate


def made(*by_seed: float, alpha: float = 0.05, documents: int = 4, pull: float = 0.0) -> Difference:
    """Paired differences in bits per byte, over equal documents of which every other one pulls up, the others down."""
    pulls = pull * np.where(np.arange(documents) % 2, 1.0, -1.0)
    bits = np.array(by_seed)[:, None] + pulls
    return difference(bits * math.log(2), np.zeros_like(bits), np.ones(documents), level=1 - alpha, prior_spread=0.01)


def verdicts(alpha: float = 0.05, seeds: int = 1, margin: float = 0.01, **arms: Difference | None) -> list[Verdict]:
    return list(judge(arms, baseline="standard", loss=2.0, alpha=alpha, seeds=seeds, margin=margin))


CLEAR = (0.030, 0.032, 0.028, 0.031, 0.034)
NONE = (0.001, -0.001, 0.0005, -0.0015, 0.002)
WIDE = (0.05, -0.04, 0.06, -0.01, 0.03)


def test_a_clear_difference_is_better_or_worse_with_its_size() -> None:
    worse, better = verdicts(up=made(*CLEAR), down=made(*(-x for x in CLEAR)))
    assert (worse.kind, better.kind) == ("worse", "better")
    assert worse.sentence == (
        "up is worse than standard: its loss is 0.0310 bits per byte higher (95% interval 0.0282 to 0.0338, 5 seeds), "
        "1.6% of standard's loss."
    )
    assert better.sentence == (
        "down is better than standard: its loss is 0.0310 bits per byte lower (95% interval 0.0282 to 0.0338, "
        "5 seeds), 1.6% of standard's loss."
    )
    assert worse.advice is better.advice is None


def test_a_difference_within_the_margin_is_equivalent() -> None:
    (found,) = verdicts(same=made(*NONE))
    assert found.kind == "equivalent"
    assert found.sentence == (
        "same is equivalent to standard within the margin of 0.010 bits per byte (0.5% of standard's loss): "
        "the loss is 0.0002 bits per byte higher (95% interval -0.0016 to +0.0020, 5 seeds)."
    )
    assert found.advice is None


def test_a_significant_difference_within_the_margin_is_called_small() -> None:
    (found,) = verdicts(arm=made(*(x / 10 for x in CLEAR)))
    assert found.kind == "worse"
    assert (
        "significant but small: less than the margin of 0.010 bits per byte (0.5% of standard's loss)" in found.sentence
    )


def test_an_uncertain_difference_is_undecided_with_advice() -> None:
    (found,) = verdicts(arm=made(*WIDE))
    assert found.kind == "undecided"
    assert found.sentence == (
        "No significant difference between arm and standard: the loss is 0.018 bits per byte higher (95% interval "
        "-0.034 to +0.070, 5 seeds), with an equivalence margin of 0.010 bits per byte (0.5% of standard's loss)."
    )
    assert re.search(r"detect a difference of 0.018 bits per byte \(the observed one\)", found.advice)
    assert "based on the spread over its seeds" in found.advice
    needed = int(re.search(r"qkflow compare --extend STUDY --seeds (\d+)`", found.advice)[1])
    assert f"About {needed} seeds" in found.advice
    known = {"spread": np.std(WIDE, ddof=1), "alpha": 0.01}  # the next look has a fifth of this one's rate
    assert power(0.018, seeds=needed, **known) >= 0.8 > power(0.018, seeds=needed - 1, **known)
    assert "a new design, with an error rate of 0.01" in found.advice


def test_within_the_margin_the_advice_is_about_the_margin() -> None:
    (found,) = verdicts(arm=made(0.02, -0.02, 0.012, -0.01, 0.001))
    assert found.kind == "undecided"
    assert "distinguish a difference of 0.010 bits per byte (the margin) from none" in found.advice
    needed = int(re.search(r"About (\d+) seeds", found.advice)[1])
    rng = np.random.default_rng(0)
    spread = np.std([0.02, -0.02, 0.012, -0.01, 0.001], ddof=1)
    studies = spread * rng.standard_normal((4000, needed))
    errors = studies.std(1, ddof=1) / math.sqrt(needed)
    farthest = np.abs(studies.mean(1)) + half_width(0.99, (errors, needed - 1))
    assert (farthest < 0.01).mean() == pytest.approx(0.8, abs=0.05)


def test_advice_for_two_seeds_uses_the_calibrated_spread() -> None:
    (found,) = verdicts(arm=made(0.02, 0.05))
    assert found.kind == "undecided"
    assert "based on a calibrated spread" in found.advice
    assert f"About {seeds_needed(0.035, spread=RELATIVE_SPREAD * 2.0, alpha=0.01)} seeds" in found.advice


def test_more_arms_need_more_seeds() -> None:
    alone, among = verdicts(arm=made(*WIDE))[0], verdicts(arm=made(*WIDE), b=made(*WIDE), c=made(*WIDE))[0]
    needed = [int(re.search(r"About (\d+) seeds", one.advice)[1]) for one in (alone, among)]
    assert needed[1] > needed[0]


def test_an_interval_that_just_fits_the_margin_is_equivalent() -> None:
    found = made(*NONE)
    assert equivalence(found, max(-found.low, found.high)) == pytest.approx(0.05)


def test_document_variance_calls_for_more_documents() -> None:
    (found,) = verdicts(arm=made(0.003, 0.004, 0.002, pull=0.1))
    assert found.kind == "undecided"
    assert "No number of seeds" in found.advice
    assert "the 4 held-out documents vary too much" in found.advice


def test_beyond_a_thousand_seeds_no_number_is_given() -> None:
    (found,) = verdicts(arm=made(*WIDE[:3], -0.06, 0.0), margin=1e-4)
    assert "distinguish a difference" not in found.advice
    (found,) = verdicts(arm=made(0.05, -0.05, 0.06, -0.06, 0.0), margin=1e-4)
    assert found.advice.startswith(
        "More than 1000 seeds are needed to distinguish a difference of 0.00010 bits per byte"
    )


def test_advice_of_many_seeds_suggests_alternatives() -> None:
    (found,) = verdicts(arm=made(0.02, -0.01, 0.03, 0.0, 0.02))
    assert "may be cheaper" not in found.advice
    (found,) = verdicts(arm=made(0.05, -0.045, 0.06, -0.07, 0.001))
    assert "may be cheaper" in found.advice


def test_one_seed_has_no_interval_and_no_verdict() -> None:
    (found,) = verdicts(arm=made(0.03))
    assert found.kind == "undecided"
    assert found.sentence == (
        "arm cannot be compared with standard from one seed, which gives no interval: "
        "the loss of its only run is 0.030 bits per byte higher."
    )
    assert "at least 3 seeds" in found.advice


def test_an_arm_without_a_pair_is_undecided_and_counts_for_holm() -> None:
    lost, arm = verdicts(lost=None, arm=made(0.011, 0.029, 0.0145))
    assert lost.kind == "undecided"
    assert "no seed has finished runs of both" in lost.sentence
    assert "`qkflow compare --resume STUDY`" in lost.advice
    alone = verdicts(arm=made(0.011, 0.029, 0.0145))[0]
    assert alone.kind == arm.kind == "undecided"


def test_missing_seeds_are_named() -> None:
    for pairs in (CLEAR, CLEAR[:1]):
        (found,) = verdicts(arm=made(*pairs), seeds=7)
        assert f"Only {len(pairs)} of 7 seeds have finished runs of both arms" in found.sentence


def test_large_differences_are_whole_percentages() -> None:
    assert "152% of standard's loss" in verdicts(arm=made(*(100 * x - 0.06 for x in CLEAR)))[0].sentence


def test_a_single_document_is_remarked_on() -> None:
    (found,) = verdicts(arm=made(*CLEAR, documents=1))
    assert "only one held-out document" in found.sentence


def test_identical_runs_are_equivalent() -> None:
    (found,) = verdicts(arm=made(0.0, 0.0, 0.0))
    assert found.kind == "equivalent"
    assert found.sentence == "arm is equivalent to standard: every pair of runs has the same loss (3 seeds)."


def test_a_verdict_changed_by_holms_correction_says_so() -> None:
    edge = made(0.010, 0.030, 0.022, 0.005, 0.019)
    assert 0.0125 < edge.p < 0.05
    assert verdicts(arm=edge)[0].kind == "worse"
    among = verdicts(arm=edge, b=made(*WIDE), c=made(*WIDE), d=made(*WIDE))[0]
    assert among.kind == "undecided"
    assert f"Holm's correction over 4 arms (p = {edge.p:.2g}, corrected {4 * edge.p:.2g})" in among.sentence
    helped = verdicts(b=made(*CLEAR), c=made(*CLEAR), d=made(*CLEAR), arm=edge)
    assert [one.kind for one in helped] == ["worse"] * 4


def test_equivalence_is_corrected_over_arms_too() -> None:
    edge = made(0.006, -0.0062, 0.0055, -0.005, 0.004)
    assert 0.0125 < equivalence(edge, 0.01) < 0.05
    assert verdicts(arm=edge)[0].kind == "equivalent"
    among = verdicts(arm=edge, b=made(*WIDE), c=made(*WIDE), d=made(*WIDE))[0]
    assert among.kind == "undecided"
    assert "within the margin, but not after Holm's correction over 4 arms" in among.sentence


@given(
    values=st.lists(st.integers(-300, 300).map(lambda x: x / 10**4), min_size=2, max_size=6),
    pull=st.sampled_from([0.0, 0.01]),
    alpha=st.sampled_from([0.05, 0.04, 0.008]),
)
@settings(deadline=None, max_examples=25)
def test_the_verdict_of_a_single_arm_agrees_with_its_interval(values: list[float], pull: float, alpha: float) -> None:
    found = made(*values, alpha=alpha, pull=pull)
    (verdict,) = verdicts(alpha=alpha, arm=found)
    if found.high < -1e-12:
        want = "better"
    elif found.low > 1e-12:
        want = "worse"
    else:
        want = "equivalent" if max(-found.low, found.high) < 0.01 else "undecided"
    assert verdict.kind == want
    assert (verdict.advice is None) == (want != "undecided")


@given(shift=st.lists(st.floats(-0.04, 0.04), min_size=1, max_size=5), seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=25)
def test_an_arm_differs_if_and_only_if_holms_p_is_below_alpha(shift: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    arms = {f"arm{i}": made(*(mean + 0.01 * rng.standard_normal(4))) for i, mean in enumerate(shift)}
    kinds = [verdict.kind for verdict in verdicts(**arms)]
    adjusted = holm([one.p for one in arms.values()])
    assert [kind in ("better", "worse") for kind in kinds] == [p < 0.05 for p in adjusted]


def test_the_default_margin_is_half_a_percent_of_the_baselines_loss() -> None:
    (found,) = judge({"arm": made(*NONE)}, baseline="standard", loss=3.0, alpha=0.05, seeds=5)
    assert "within the margin of 0.015 bits per byte (0.5% of standard's loss)" in found.sentence


def test_two_seeds_on_a_task_use_their_own_spread() -> None:
    bits = np.array([[1.0] * 4, [-0.4] * 4]) * math.log(2)
    found = difference(bits, np.zeros_like(bits), np.ones(4), calibrated=False)
    assert found.smallest_from == "seeds"
    assert (found.smallest or 0) > 5
    (verdict,) = judge({"arm": found}, baseline="standard", loss=2.0, alpha=0.05, seeds=2, unit="answer token")
    assert "based on the spread over its seeds" in (verdict.advice or "")


def test_verdicts_on_a_task_are_in_bits_per_answer_token() -> None:
    arms = {"clear": made(*CLEAR), "same": made(*NONE), "wide": made(*WIDE), "alone": made(0.03)}
    found = judge(arms, baseline="standard", loss=2.0, alpha=0.05, seeds=5, margin=0.01, unit="answer token")
    for verdict in found:
        assert "bits per answer token" in verdict.sentence
        assert "byte" not in verdict.sentence + (verdict.advice or "")


def test_the_sentence_states_the_level() -> None:
    assert "(96% interval" in verdicts(alpha=0.04, arm=made(*CLEAR, alpha=0.04))[0].sentence
    assert "(99.2% interval" in verdicts(alpha=0.008, arm=made(*CLEAR, alpha=0.008))[0].sentence


def test_a_difference_at_another_level_is_refused() -> None:
    with pytest.raises(ValueError, match=r"level 0.95 cannot be judged at alpha 0.04"):
        verdicts(alpha=0.04, arm=made(*CLEAR))


def test_a_zero_margin_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0 bits per byte, got 0"):
        verdicts(arm=made(*NONE), margin=0.0)


def test_looks_never_spend_the_whole_error_rate() -> None:
    chosen_rates = [look_rate(0.05, look) for look in range(1, 30)]
    assert chosen_rates[:3] == pytest.approx([0.04, 0.008, 0.0016])
    assert sum(chosen_rates) == pytest.approx(0.05)
    assert sum(chosen_rates) <= 0.05
    with pytest.raises(ValueError, match="counted from 1, got 0"):
        look_rate(0.05, 0)
