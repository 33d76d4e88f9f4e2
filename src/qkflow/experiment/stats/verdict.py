"""The verdict on each arm of a study, as a word and as one line."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from qkflow.experiment.stats.paired import Difference, PairedErrors, crossed, describe, single_pair, unpaired
from qkflow.experiment.stats.rounds import RoundTests, Rule, run_tests
from qkflow.experiment.stats.t_dist import seeds_needed

VerdictKind = Literal["better", "worse", "equivalent", "undecided"]
Pairing = Literal["paired", "partly", "unpaired"]

_MANY_SEEDS = 50


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer for one arm."""

    arm: str
    kind: VerdictKind
    """Better or worse than the baseline, equivalent to it within the margin, or undecided."""
    sentence: str
    """The answer with its numbers, in one line without the arm's name."""
    advice: str | None = None
    """For undecided: what would decide."""
    round: int | None = None
    """The round that decided it; None if undecided."""
    difference: Difference | None = None
    """None if there is nothing to compare."""
    p_adjusted: float | None = None
    """P value of the difference, adjusted over the arms; None with fewer than two seeds."""
    p_equivalent: float | None = None
    """P value of the two one-sided tests at the margin, adjusted over the arms."""
    paired: Pairing = "paired"
    """Whether all seeds of the arm are seeds of the baseline, some, or none."""
    seeds_needed: int | None = None
    """For undecided: total seeds for a power of 0.8 in the next round (after the last round: in a new study), if the
    true difference is the observed one; None if more than 1000 are needed or it cannot be estimated."""


def judge_round(
    losses: Mapping[str, Mapping[Any, np.ndarray]],
    sizes: np.ndarray,
    *,
    baseline: str,
    rule: Rule,
    round: int,
    decided: Mapping[str, Verdict] | None = None,
    unit: str | None = "byte",
    scale: float = math.log(2),
    margin: float | None = None,
    is_higher_better: bool = False,
    may_be_unpaired: bool = False,
    resolution: float = 0.0,
) -> tuple[Verdict, ...]:
    """Judge every arm but the baseline after a round, in the order of `losses`.

    The same input gives the same verdicts, bit for bit. Nothing is drawn at random.

    Args:
        losses: For each arm and seed, the nats of every held-out document. Arms are paired by seed.
        sizes: The documents' bytes.
        baseline: The arm to compare with.
        rule: How to decide.
        round: The round that has finished, counted from 1.
        decided: Verdicts of earlier rounds. They are final: these arms keep them, undecided ones are judged again.
        unit: What losses are per, in sentences: bits per `unit`. None for losses without a unit.
        scale: Losses are divided by it: nats per bit.
        margin: The equivalence margin in the unit, instead of the rule's fraction of the baseline's loss.
        is_higher_better: Whether a higher loss is better (it is an accuracy, or a likelihood).
        may_be_unpaired: Whether to compare arms that share fewer than two seeds, by Welch's test.
        resolution: The unit of the last digit of a run's loss. The variance over seeds is at least that of rounding:
            runs that agree only because they are rounded have no spread otherwise.

    >>> rng = np.random.default_rng(0)
    >>> losses = {arm: {seed: 70 + shift + rng.random(2) for seed in range(5)} for arm, shift in (("a", 0), ("b", 9))}
    >>> rule = Rule(seeds_by_round=(5,), spending=(1.0,))
    >>> (verdict,) = judge_round(losses, np.array([50, 50]), baseline="a", rule=rule, round=1)
    >>> verdict.kind, verdict.sentence
    ('worse', 'worse by 0.257 bits per byte (13%), 95% interval 0.215 to 0.300, 5 seeds')
    """
    _check(losses, sizes, baseline)
    bits = {
        arm: {seed: np.asarray(run, np.float64) / scale for seed, run in runs.items()} for arm, runs in losses.items()
    }
    base, sizes = bits[baseline], np.asarray(sizes, np.float64)
    loss = float(np.mean([run.sum() for run in base.values()]) / sizes.sum()) if base else 1.0
    margin = rule.margin * abs(loss) if margin is None else margin
    if not margin > 0:
        raise ValueError(f"the equivalence margin must be above 0, got {margin}: give a margin in the loss's own unit")
    final = {arm: verdict for arm, verdict in (decided or {}).items() if verdict.kind != "undecided"}
    compared = {
        arm: _compare(runs, base, sizes, welch=may_be_unpaired, rounding=resolution**2 / 12)
        for arm, runs in bits.items()
        if arm != baseline and arm not in final
    }
    tests = _test_arms(compared, list(base), final, rule=rule, round=round, loss=loss, margin=margin)
    writer = _Writer(
        rule=rule,
        round=round,
        loss=abs(loss),
        margin=margin,
        arms=len(compared),
        documents=len(sizes),
        unit=f" bits per {unit}" if unit else "",
        is_higher_better=is_higher_better,
    )
    return tuple(
        final[arm] if arm in final else writer.verdict(arm, compared[arm], tests.get(arm))
        for arm in bits
        if arm != baseline
    )


class _Compared(NamedTuple):
    """One arm against the baseline."""

    errors: PairedErrors | None
    """None with fewer than two seeds."""
    seeds: Sequence[Any]
    """The seeds of the pairs."""
    only_pair: float | None
    """The difference of a single pair."""
    paired: Pairing


def _compare(
    arm: Mapping[Any, np.ndarray], base: Mapping[Any, np.ndarray], sizes: np.ndarray, *, welch: bool, rounding: float
) -> _Compared:
    """Compare one arm; `rounding` is the variance of the rounding error of a run."""
    shared = [seed for seed in base if seed in arm]
    paired: Pairing = "paired" if len(shared) == len(arm) else "partly"
    if len(shared) > 1:
        errors = crossed(np.stack([arm[seed] - base[seed] for seed in shared]), sizes)
        if rounding > 0:
            errors = errors.moderated(np.maximum(errors.spread**2, 2 * rounding), errors.freedom)
        return _Compared(errors, shared, None, paired)
    if welch and min(len(arm), len(base)) > 1:
        arm_runs, base_runs = (np.stack(list(runs.values())) for runs in (arm, base))
        errors = unpaired(arm_runs, base_runs, sizes)
        least = rounding * (1 / len(arm) + 1 / len(base))
        return _Compared(errors._replace(seeds_variance=np.maximum(errors.seeds_variance, least)), (), None, "unpaired")
    only_pair = float((arm[shared[0]] - base[shared[0]]).sum() / sizes.sum()) if shared else None
    return _Compared(None, shared, only_pair, paired if shared or not welch else "unpaired")


class _ArmTests(NamedTuple):
    """The tests of one arm."""

    errors: PairedErrors
    """With a moderated variance if there is a prior."""
    prior_used: bool
    p_adjusted: float
    p_equivalent: float
    is_different: bool
    is_equivalent: bool


def _test_arms(
    compared: Mapping[str, _Compared],
    seeds: Sequence[Any],
    final: Mapping[str, Verdict],
    *,
    rule: Rule,
    round: int,
    loss: float,
    margin: float,
) -> dict[str, _ArmTests]:
    """The tests of the arms that have at least two seeds, corrected for all arms, decided ones included."""
    testable = {arm: pair for arm, pair in compared.items() if pair.errors is not None}
    if not testable:
        return {}
    n_equivalent = sum(verdict.kind == "equivalent" for verdict in final.values())
    tests = run_tests(
        *_stack(list(testable.values()), seeds),
        rule=rule,
        round=round,
        loss=loss,
        margin=margin,
        n_equivalent=n_equivalent,
        n_different=len(final) - n_equivalent,
        n_untested=len(compared) - len(testable),
    )
    return {arm: _tests_of_arm(tests, index, pair) for index, (arm, pair) in enumerate(testable.items())}


def _tests_of_arm(tests: RoundTests, index: int, compared: _Compared) -> _ArmTests:
    values = {name: getattr(tests.errors, name)[index] for name in PairedErrors._fields}
    by_seed = None if compared.errors is None else compared.errors.by_seed
    return _ArmTests(
        errors=PairedErrors(**{**values, "by_seed": by_seed}),
        prior_used=bool(tests.prior_used[index]),
        p_adjusted=float(tests.p_adjusted[index]),
        p_equivalent=float(tests.p_equivalent[index]),
        is_different=bool(tests.is_different[index]),
        is_equivalent=bool(tests.is_equivalent[index]),
    )


def _stack(arms: Sequence[_Compared], seeds: Sequence[Any]) -> tuple[PairedErrors, np.ndarray]:
    """The differences of all arms as arrays [arms], and by seed [arms, seeds] with NaN for missing seeds."""
    by_seed = np.full((len(arms), len(seeds)), np.nan)
    columns = {seed: column for column, seed in enumerate(seeds)}
    all_errors = [arm.errors for arm in arms if arm.errors is not None]
    for row, (arm, errors) in enumerate(zip(arms, all_errors, strict=True)):
        by_seed[row, [columns[seed] for seed in arm.seeds]] = errors.by_seed
    fields = [name for name in PairedErrors._fields if name != "by_seed"]
    stacked = {name: np.array([getattr(errors, name) for errors in all_errors]) for name in fields}
    return PairedErrors(by_seed=by_seed, **stacked), by_seed


@dataclass(frozen=True, kw_only=True)
class _Writer:
    """The numbers that all verdicts of a round refer to."""

    rule: Rule
    round: int
    loss: float
    margin: float
    arms: int
    documents: int
    unit: str
    is_higher_better: bool

    def verdict(self, arm: str, compared: _Compared, tests: _ArmTests | None) -> Verdict:
        """The verdict on an arm; `tests` is None if it has fewer than two seeds."""
        if tests is None:
            return self._untested(arm, compared)
        difference = describe(
            tests.errors,
            documents=self.documents,
            level=1 - self.rule.error_rate,
            alpha=self.rule.alpha(self.round) / self.arms,
            prior_used=tests.prior_used,
        )
        kind: VerdictKind = "undecided"
        if tests.is_different:
            kind = "better" if (difference.mean > 0) == self.is_higher_better else "worse"
        elif tests.is_equivalent:
            kind = "equivalent"
        needed = self._seeds_needed(tests.errors, difference) if kind == "undecided" else None
        return Verdict(
            arm=arm,
            kind=kind,
            sentence=self._sentence(kind, difference),
            advice=self._advice(needed, tests.errors, difference) if kind == "undecided" else None,
            round=None if kind == "undecided" else self.round,
            difference=difference,
            p_adjusted=tests.p_adjusted,
            p_equivalent=tests.p_equivalent,
            paired=compared.paired,
            seeds_needed=needed,
        )

    def _untested(self, arm: str, compared: _Compared) -> Verdict:
        if compared.only_pair is None:
            sentence, difference = "not compared: no seed has finished runs of both arms", None
        else:
            level = 1 - self.rule.error_rate
            difference = single_pair(compared.only_pair, documents=self.documents, level=level)
            digits = _decimals(abs(difference.mean))
            sentence = f"undecided: {_signed(difference.mean, digits)}{self.unit}, one seed has no interval"
        return Verdict(
            arm=arm,
            kind="undecided",
            sentence=sentence,
            advice="At least 2 seeds of both arms are needed.",
            difference=difference,
            paired=compared.paired,
        )

    def _sentence(self, kind: VerdictKind, difference: Difference) -> str:
        low, high = difference.low or 0.0, difference.high or 0.0
        digits = _decimals((high - low) / 2 or abs(difference.mean))
        level, seeds = f"{100 * difference.level:.6g}% interval", f"{difference.seeds} seeds"
        if kind in ("better", "worse"):
            smaller, larger = sorted((abs(low), abs(high)))
            size = f"{abs(difference.mean):.{digits}f}{self.unit} ({_percent(abs(difference.mean) / self.loss)})"
            return f"{kind} by {size}, {level} {smaller:.{digits}f} to {larger:.{digits}f}, {seeds}"
        if kind == "equivalent" and difference.by_seed and not any(difference.by_seed):
            return f"equivalent: every pair of runs has the same loss, {seeds}"
        interval = f"{level} {_signed(low, digits)} to {_signed(high, digits)}, {seeds}"
        return f"{kind}: {_signed(difference.mean, digits)}{self.unit}, {interval}"

    def _seeds_needed(self, errors: PairedErrors, difference: Difference) -> int | None:
        """The fewest seeds that show the observed difference, or equivalence if this is the true difference.

        Equivalence needs both sides to be rejected: each with a power of 0.9.
        """
        alpha = (self.rule.alpha(self.round + 1) or self.rule.alpha(self.round)) / self.arms
        if not errors.spread > 0:
            return None
        needed = functools.partial(
            seeds_needed,
            spread=float(errors.spread),
            documents=math.sqrt(float(errors.documents_variance)),
            prior_freedom=self.rule.prior.freedom if self.rule.prior and difference.prior_used else 0.0,
        )
        size = abs(difference.mean)
        counts = [
            needed(size, alpha=alpha, chance=0.8) if size > 0 else None,
            needed(self.margin - size, alpha=2 * alpha, chance=0.9) if self.margin > size else None,
        ]
        possible = [count for count in counts if count is not None]
        return max(min(possible), difference.seeds + 1) if possible else None

    def _advice(self, needed: int | None, errors: PairedErrors, difference: Difference) -> str:
        if needed is not None:
            many = ", longer runs or a wider margin may be cheaper" if needed > _MANY_SEEDS else ""
            ends = (difference.low or 0.0, difference.high or 0.0)
            alone = "The interval of this arm alone is not enough: about" if min(ends) > 0 or max(ends) < 0 else "About"
            return f"{alone} {needed} seeds would decide{many}."
        if errors.documents_variance > errors.seeds_variance:
            return f"The {self.documents} held-out documents vary too much: use more documents or a wider margin."
        return "More than 1000 seeds would be needed: use longer runs or a wider margin."


def _check(losses: Mapping[str, Mapping[Any, np.ndarray]], sizes: np.ndarray, baseline: str) -> None:
    if baseline not in losses:
        raise ValueError(f"the baseline {baseline!r} has no losses: expected one of {', '.join(losses)}")
    if np.ndim(sizes) != 1 or not np.isfinite(sizes).all() or (np.asarray(sizes) < 0).any() or np.sum(sizes) <= 0:
        raise ValueError("sizes must be the documents' bytes: one number each, none negative and not all zero")
    for arm, runs in losses.items():
        for seed, run in runs.items():
            if np.shape(run) != np.shape(sizes):
                raise ValueError(
                    f"{arm}, seed {seed}: got losses of shape {np.shape(run)}, expected one for each of {len(sizes)} "
                    "documents"
                )
            if not np.isfinite(run).all():
                raise ValueError(f"{arm}, seed {seed}: a loss is not finite: leave out failed runs")


def _decimals(width: float) -> int:
    """Decimals that show two significant digits of a width."""
    return 3 if width <= 0 else min(6, max(2, 1 - math.floor(math.log10(width))))


def _signed(value: float, digits: int) -> str:
    text = f"{value:+.{digits}f}"
    return text if float(text) else text[1:]


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2g}%" if fraction < 0.1 else f"{100 * fraction:.0f}%"
