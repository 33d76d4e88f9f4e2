r"""The verdict on each arm of a study, as a word and as a sentence.

    better, worse    Holm's p value over the arms is below alpha: at most this share of studies has a false one
    equivalent       two one-sided tests at the margin, each at alpha / 2, with Holm's correction over the arms; for a
                     single arm, the interval that is shown lies within the margin on both sides
    undecided        neither; the advice says how many seeds would decide it

A difference that is significant and within the margin is better or worse, and the sentence says how small it is. The
true difference of an arm cannot be both zero and beyond the margin, so each of the two families of tests has its own
alpha. Intervals are those of each arm alone, at 1 - alpha, without correction: where Holm's correction changes the
result, the sentence says so.

An extended study is judged again. Each look spends four fifths of the error rate that is left (0.04, 0.008, ... of
0.05), so the chain of studies keeps its error rate however often it is extended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from qkflow.experiment.stats.paired import Difference, holm, one_sided_p
from qkflow.experiment.stats.t_dist import RELATIVE_SPREAD, quantile, seeds_needed

VerdictKind = Literal["better", "worse", "equivalent", "undecided"]

MARGIN = 0.005
"""The default equivalence margin, as a fraction of the baseline's loss."""

_SPENT = 0.8
_MANY_SEEDS = 50


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer for one arm."""

    arm: str
    kind: VerdictKind
    """Better or worse than the baseline, equivalent to it within the margin, or undecided."""
    sentence: str
    """The answer with its numbers."""
    advice: str | None
    """For undecided: what to do next."""


def look_rate(error_rate: float, look: int) -> float:
    """The share of a chain's error rate that a look (counted from 1) may spend.

    >>> [round(look_rate(0.05, look), 6) for look in (1, 2, 3)]
    [0.04, 0.008, 0.0016]
    """
    if look < 1:
        raise ValueError(f"looks are counted from 1, got {look}")
    return error_rate * _SPENT * (1 - _SPENT) ** (look - 1)


def judge(
    differences: Mapping[str, Difference | None],
    *,
    baseline: str,
    loss: float,
    alpha: float,
    seeds: int,
    margin: float | None = None,
    unit: str = "byte",
) -> tuple[Verdict, ...]:
    """One verdict per arm, over all arms of a study together. None stands for an arm without a pair of runs.

    `loss` is the baseline's mean and `margin` the equivalence margin, both in bits per `unit`. `seeds` is the number in
    the design and `alpha` the error rate of this look. Every difference must have the level 1 - alpha.
    """
    margin = MARGIN * loss if margin is None else margin
    if not margin > 0:
        raise ValueError(f"the margin must be above 0 bits per {unit}, got {margin}: choose a fraction of the loss")
    for difference in differences.values():
        if difference is not None and not math.isclose(difference.level, 1 - alpha):
            raise ValueError(
                f"a difference at level {difference.level} cannot be judged at alpha {alpha}: use level 1 - alpha"
            )
    judged = _Judge(
        baseline=baseline, loss=loss, margin=margin, alpha=alpha, arms=len(differences), seeds=seeds, unit=unit
    )
    p_differ = holm([None if d is None else d.p for d in differences.values()])
    p_equivalent = holm([None if d is None else equivalence(d, margin) for d in differences.values()])
    return tuple(
        judged.verdict(arm, difference, p, p_within)
        for (arm, difference), p, p_within in zip(differences.items(), p_differ, p_equivalent, strict=True)
    )


def equivalence(difference: Difference, margin: float) -> float | None:
    """The p value of two one-sided tests at the margin, doubled: below alpha if the interval lies within the margin."""
    return None if difference.p is None else min(1.0, 2 * one_sided_p(difference, margin - abs(difference.mean)))


@dataclass(frozen=True, kw_only=True)
class _Judge:
    """The numbers that all verdicts of a study refer to."""

    baseline: str
    loss: float
    margin: float
    alpha: float
    arms: int
    seeds: int
    unit: str

    def verdict(self, arm: str, difference: Difference | None, p: float | None, p_within: float | None) -> Verdict:
        if difference is None:
            sentence = f"{arm} cannot be compared with {self.baseline}: no seed has finished runs of both arms."
            advice = "Run `qkflow compare --resume STUDY` to finish the study, or check why the runs failed."
            return Verdict(arm=arm, kind="undecided", sentence=sentence, advice=advice)
        if p is None or p_within is None or difference.low is None or difference.high is None:
            digits = _decimals(abs(difference.mean))
            sentence = (
                f"{arm} cannot be compared with {self.baseline} from one seed, which gives no interval: the loss of "
                f"its only run is {self._change(difference.mean, digits)}."
            )
            sentences = [sentence, *self._caveats(difference)]
            return Verdict(arm=arm, kind="undecided", sentence=" ".join(sentences), advice=self._advice(difference))
        kind: VerdictKind = "undecided"
        if p < self.alpha:
            kind = "better" if difference.mean < 0 else "worse"
        elif p_within < self.alpha:
            kind = "equivalent"
        sentences = [
            self._result(arm, kind, difference),
            *self._qualifications(kind, difference, p, p_within),
            *self._caveats(difference),
        ]
        advice = self._advice(difference) if kind == "undecided" else None
        return Verdict(arm=arm, kind=kind, sentence=" ".join(sentences), advice=advice)

    def _result(self, arm: str, kind: VerdictKind, difference: Difference) -> str:
        low, high = difference.low or 0.0, difference.high or 0.0
        digits = _decimals((high - low) / 2 or abs(difference.mean))
        level, seeds = f"{100 * difference.level:.6g}% interval", f"{difference.seeds} seeds"
        change = self._change(difference.mean, digits)
        if kind in ("better", "worse"):
            smaller, larger = sorted((abs(low), abs(high)))
            return (
                f"{arm} is {kind} than {self.baseline}: its loss is {change} ({level} {smaller:.{digits}f} to "
                f"{larger:.{digits}f}, {seeds}), {_percent(abs(difference.mean) / self.loss)} of "
                f"{self.baseline}'s loss."
            )
        interval = f"{level} {_signed(low, digits)} to {_signed(high, digits)}, {seeds}"
        if kind == "undecided":
            return (
                f"No significant difference between {arm} and {self.baseline}: the loss is {change} ({interval}), "
                f"with an equivalence margin of {self._margin()}."
            )
        if not any(difference.by_seed):
            return f"{arm} is equivalent to {self.baseline}: every pair of runs has the same loss ({seeds})."
        return (
            f"{arm} is equivalent to {self.baseline} within the margin of {self._margin()}: the loss is {change} "
            f"({interval})."
        )

    def _qualifications(self, kind: VerdictKind, difference: Difference, p: float, p_within: float) -> list[str]:
        """How the margin and Holm's correction affect the result."""
        sentences, own_p = [], difference.p or 0.0
        largest = max(abs(difference.low or 0.0), abs(difference.high or 0.0))
        if kind in ("better", "worse") and largest < self.margin:
            sentences.append(f"The difference is significant but small: less than the margin of {self._margin()}.")
        if kind == "undecided" and own_p < self.alpha:
            sentences.append(
                f"Its interval excludes zero, but the difference is not significant after Holm's correction over "
                f"{self.arms} arms (p = {own_p:.2g}, corrected {p:.2g})."
            )
        elif kind == "undecided" and p_within >= self.alpha > (equivalence(difference, self.margin) or 0.0):
            sentences.append(
                f"Its interval lies within the margin, but not after Holm's correction over {self.arms} arms."
            )
        return sentences

    def _caveats(self, difference: Difference) -> list[str]:
        """What the comparison lacks."""
        sentences = []
        if difference.seeds < self.seeds:
            sentences.append(
                f"Only {difference.seeds} of {self.seeds} seeds have finished runs of both arms: if runs failed "
                "because of one arm, the comparison is biased in its favour."
            )
        if difference.documents == 1:
            sentences.append("There is only one held-out document: the result may not hold for others.")
        return sentences

    def _advice(self, difference: Difference) -> str:
        """How many seeds would decide, at the error rate of the next look.

        An observed difference beyond the margin is to be detected with a power of 0.8. Otherwise a difference as large
        as the margin is, with 0.9: then an arm without a difference is found equivalent (both sides) with 0.8.
        """
        if difference.spread is None or difference.error is None:
            return (
                "Use at least 3 seeds, better 5: `qkflow compare --extend STUDY --seeds 5` (a new design that keeps "
                "the error rate)."
            )
        rate = self.alpha * (1 - _SPENT)
        beyond_margin = abs(difference.mean) > self.margin
        effect, chance = (abs(difference.mean), 0.8) if beyond_margin else (self.margin, 0.9)
        own_spread = difference.smallest_from == "seeds"
        spread = difference.spread if own_spread else RELATIVE_SPREAD * self.loss
        documents = math.sqrt(max(0.0, difference.error**2 - difference.spread**2 / difference.seeds))
        alpha = rate / self.arms
        needed = seeds_needed(effect, spread=spread, alpha=alpha, documents=documents, chance=chance)
        amount = f"{effect:.{_decimals(effect)}f} bits per {self.unit}"
        goal = f"detect a difference of {amount} (the observed one)"
        if not beyond_margin:
            goal = f"distinguish a difference of {amount} (the margin) from none"
        detectable = documents * float(quantile(1 - alpha / 2, math.inf) + quantile(chance, math.inf))  # infinite seeds
        if needed is None and detectable < effect:
            return f"More than 1000 seeds are needed to {goal}: use more training tokens per run or a wider margin."
        if needed is None:
            return (
                f"No number of seeds can {goal}: the {difference.documents} held-out documents vary too much. Start a "
                "new study with more held-out documents or a wider margin."
            )
        needed = max(needed, difference.seeds + 1)
        basis = "the spread over its seeds" if own_spread else "a calibrated spread, since two seeds are too few for it"
        many = ""
        if needed > _MANY_SEEDS:
            many = " More training tokens per run or a wider margin may be cheaper."
        return (
            f"About {needed} seeds are needed to {goal}, based on {basis}: `qkflow compare --extend STUDY --seeds "
            f"{needed}` (a new design, with an error rate of {rate:.2g}).{many}"
        )

    def _change(self, value: float, digits: int) -> str:
        amount = f"{abs(value):.{digits}f} bits per {self.unit}"
        return f"{amount} {'lower' if value < 0 else 'higher'}" if float(f"{value:.{digits}f}") else f"{amount} apart"

    def _margin(self) -> str:
        amount = f"{self.margin:.{_decimals(self.margin)}f} bits per {self.unit}"
        return f"{amount} ({_percent(self.margin / self.loss)} of {self.baseline}'s loss)"


def _decimals(width: float) -> int:
    """Decimals that show two significant digits of a width."""
    return 3 if width <= 0 else min(6, max(2, 1 - math.floor(math.log10(width))))


def _signed(value: float, digits: int) -> str:
    text = f"{value:+.{digits}f}"
    return text if float(text) else text[1:]


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2g}%" if fraction < 0.1 else f"{100 * fraction:.0f}%"
