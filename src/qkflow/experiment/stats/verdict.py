r"""What a study says of each arm, in a word and in a sentence.

    better, worse    Holm's p over the arms is below alpha: at most that part of studies has a false one among its arms
    equivalent       two one-sided tests at the margin, each at alpha / 2, with Holm's correction over the arms: for a
                     single arm, the interval that is shown lies within the margin on both sides
    undecided        neither; how many seeds would decide it

A difference that is both real and within the margin is better or worse, and the sentence says how small it is. The true
difference of an arm cannot be both none and beyond the margin, so the two families of tests have alpha each. Intervals
are each arm's own, at 1 - alpha, without correction: where Holm's correction alone decides, the sentence says so.

Looks: a study that is extended is judged again. The error rate of the whole chain is shared out, each look taking four
fifths of what is left (0.04, 0.008, ... of 0.05), so that the chain as a whole keeps it however often it is extended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from qkflow.experiment.stats.differences import Difference, beyond, holm
from qkflow.experiment.stats.power import RELATIVE_SPREAD, seeds_needed
from qkflow.experiment.stats.t_dist import quantile

MARGIN = 0.005
"""The equivalence margin unless said, as a part of the baseline's loss."""

_TAKEN = 0.8
_MANY = 50


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer for one arm."""

    arm: str
    """The arm."""
    kind: Literal["better", "worse", "equivalent", "undecided"]
    """Better or worse than the baseline, equivalent to it within the margin, or undecided."""
    sentence: str
    """The answer as a person would say it."""
    advice: str | None
    """For undecided: what it would take to know."""


def look_rate(error_rate: float, look: int) -> float:
    """The part of a chain's error rate that its look (from 1) may spend.

    >>> [round(look_rate(0.05, look), 6) for look in (1, 2, 3)]
    [0.04, 0.008, 0.0016]
    """
    if look < 1:
        raise ValueError(f"looks are counted from 1, got {look}")
    return error_rate * _TAKEN * (1 - _TAKEN) ** (look - 1)


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
    """One verdict for each arm, over all arms of a study at once; None stands for an arm without a pair of runs.

    `loss` is the baseline's mean in bits per `unit`, `seeds` how many the design asked for, `alpha` the error rate of
    this look and `margin` in the same bits. Every difference must have been made at the level 1 - alpha.
    """
    margin = MARGIN * loss if margin is None else margin
    if not margin > 0:
        raise ValueError(
            f"the margin must be above 0 bits per {unit}, got {margin}: no two arms are the same to the last bit"
        )
    for found in differences.values():
        if found is not None and not math.isclose(found.level, 1 - alpha):
            raise ValueError(
                f"a difference at the level {found.level} cannot be judged at alpha {alpha}: use 1 - alpha"
            )
    scale = Scale(
        baseline=baseline, loss=loss, margin=margin, alpha=alpha, arms=len(differences), seeds=seeds, unit=unit
    )
    apart = holm([None if found is None else found.p for found in differences.values()])
    close = holm([None if found is None else equivalence(found, margin) for found in differences.values()])
    return tuple(
        _verdict(arm, found, p_apart, p_close, scale)
        for (arm, found), p_apart, p_close in zip(differences.items(), apart, close, strict=True)
    )


def equivalence(found: Difference, margin: float) -> float | None:
    """P value of the two one-sided tests at the margin, doubled: below alpha if the interval lies within the margin."""
    return None if found.p is None else min(1.0, 2 * beyond(found, margin - abs(found.mean)))


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What the sentences of one study measure by."""

    baseline: str
    loss: float
    margin: float
    alpha: float
    arms: int
    seeds: int
    unit: str

    @property
    def bits(self) -> str:
        """What a loss is counted in."""
        return f"bits per {self.unit}"


def _verdict(arm: str, found: Difference | None, p_apart: float | None, p_close: float | None, scale: Scale) -> Verdict:
    if found is None:
        sentence = f"{arm} cannot be compared with {scale.baseline}: no seed has a finished run of both."
        advice = "Finish the study with `qkflow compare --resume STUDY`, or see why its runs failed."
        return Verdict(arm=arm, kind="undecided", sentence=sentence, advice=advice)
    if p_apart is None or p_close is None or found.low is None or found.high is None:
        sentence = (
            f"{arm} against {scale.baseline} cannot be judged from one seed, which has no interval: "
            f"its only pair of runs shows {_signed(found.mean, _decimals(abs(found.mean)), scale.bits)}."
        )
        words = [sentence, *_gaps(found, scale)]
        return Verdict(arm=arm, kind="undecided", sentence=" ".join(words), advice=_advice(found, scale))
    kind: Literal["better", "worse", "equivalent", "undecided"] = "undecided"
    if p_apart < scale.alpha:
        kind = "better" if found.mean < 0 else "worse"
    elif p_close < scale.alpha:
        kind = "equivalent"
    words = [_opening(arm, kind, found, scale), *_remarks(kind, found, p_apart, p_close, scale), *_gaps(found, scale)]
    advice = _advice(found, scale) if kind == "undecided" else None
    return Verdict(arm=arm, kind=kind, sentence=" ".join(words), advice=advice)


def _opening(arm: str, kind: str, found: Difference, scale: Scale) -> str:
    low, high = found.low or 0.0, found.high or 0.0
    digits = _decimals((high - low) / 2 or abs(found.mean))
    level = f"{100 * found.level:.6g} % interval"
    runs = f"{found.seeds} seeds"
    if kind in ("better", "worse"):
        ends = sorted((abs(low), abs(high)))
        return (
            f"{arm} is {kind} than {scale.baseline}: {_signed(found.mean, digits, scale.bits)} ({level} "
            f"{ends[0]:.{digits}f} to {ends[1]:.{digits}f}; {runs}), "
            f"{_percent(abs(found.mean) / scale.loss)} of {scale.baseline}'s loss."
        )
    range_ = f"{level} {_signed(low, digits)} to {_signed(high, digits)}; {runs}"
    if kind == "undecided":
        return (
            f"{arm} cannot be told from {scale.baseline}: {_signed(found.mean, digits, scale.bits)} ({range_}), "
            f"with a margin of {_margin(scale)}."
        )
    if not any(found.by_seed):
        return f"{arm} is equivalent to {scale.baseline}: every pair of runs has the same loss ({runs})."
    return (
        f"{arm} is equivalent to {scale.baseline} within the margin of {_margin(scale)}: "
        f"{_signed(found.mean, digits, scale.bits)} ({range_})."
    )


def _remarks(kind: str, found: Difference, p_apart: float, p_close: float, scale: Scale) -> list[str]:
    """What the margin and the other arms have to do with it."""
    said, p = [], found.p or 0.0
    if kind in ("better", "worse") and max(abs(found.low or 0.0), abs(found.high or 0.0)) < scale.margin:
        said.append(f"That is real but small: less than the margin of {_margin(scale)}.")
    if kind == "undecided" and p < scale.alpha:
        said.append(
            f"Alone its interval leaves out zero, but among {scale.arms} arms that is not enough "
            f"(p = {p:.2g}, with Holm's correction {p_apart:.2g})."
        )
    elif kind == "undecided" and p_close >= scale.alpha > (equivalence(found, scale.margin) or 0.0):
        said.append(f"Alone its interval lies within the margin, but among {scale.arms} arms that is not enough.")
    return said


def _gaps(found: Difference, scale: Scale) -> list[str]:
    """What the comparison lacks."""
    said = []
    if found.seeds < scale.seeds:
        said.append(
            f"Only {found.seeds} of {scale.seeds} seeds have both runs: if others failed because of an arm, "
            "this flatters that arm."
        )
    if found.documents == 1:
        said.append("There is one held-out document: nothing is said of others.")
    return said


def _advice(found: Difference, scale: Scale) -> str:
    """How many seeds would decide, at the error rate of the next look.

    A difference beyond the margin as observed is to be found four times in five. Within it, the margin is: nine times
    in ten, for then an arm without a difference is found equivalent (both sides) four times in five.
    """
    if found.spread is None or found.error is None:
        return (
            "Give it at least 3 seeds, and 5 if they are to show much: `qkflow compare --extend STUDY --seeds 5` "
            "(a new design that keeps the error rate)."
        )
    rate = scale.alpha * (1 - _TAKEN)
    far = abs(found.mean) > scale.margin
    effect, chance = (abs(found.mean), 0.8) if far else (scale.margin, 0.9)
    own = found.smallest_rests_on == "its own spread"
    spread = found.spread if own else RELATIVE_SPREAD * scale.loss
    documents = math.sqrt(max(0.0, found.error**2 - found.spread**2 / found.seeds))
    alpha = rate / scale.arms
    needed = seeds_needed(effect, spread=spread, alpha=alpha, documents=documents, chance=chance)
    amount = f"{effect:.{_decimals(effect)}f} {scale.bits}"
    goal = f"find a difference of {amount} (the one observed)" if far else f"tell a difference of {amount} from none"
    in_sight = documents * float(quantile(1 - alpha / 2, math.inf) + quantile(chance, math.inf))  # with endless seeds
    if needed is None and in_sight < effect:
        return f"It would take more than 1000 seeds to {goal}: more tokens a run, or a wider margin, may serve better."
    if needed is None:
        return (
            f"No number of seeds would {goal}: the {found.documents} held-out documents disagree too much. "
            "It takes more of them, or a wider margin, in a new study."
        )
    needed = max(needed, found.seeds + 1)
    basis = "the spread over its seeds" if own else "a spread from calibration, since two seeds have none"
    many = " That is many: more tokens a run, or a wider margin, may serve better." if needed > _MANY else ""
    return (
        f"About {needed} seeds would {goal}, judged by {basis}: `qkflow compare --extend STUDY --seeds {needed}` "
        f"(a new design, with an error rate of {rate:.2g}).{many}"
    )


def _decimals(width: float) -> int:
    """Decimals that show two digits of a width."""
    return 3 if width <= 0 else min(6, max(2, 1 - math.floor(math.log10(width))))


def _signed(value: float, digits: int, unit: str = "") -> str:
    """A difference in words: less is better."""
    text = f"{abs(value):.{digits}f}{unit and ' '}{unit}"
    return text if not float(f"{value:.{digits}f}") else f"{text} {'less' if value < 0 else 'more'}"


def _percent(part: float) -> str:
    return f"{100 * part:.2g} %" if part < 0.1 else f"{100 * part:.0f} %"


def _margin(scale: Scale) -> str:
    size = f"{scale.margin:.{_decimals(scale.margin)}f} {scale.bits}"
    return f"{size} ({_percent(scale.margin / scale.loss)} of {scale.baseline}'s loss)"
