"""The tables of a study, once: the page and the terminal show the same rows."""

from __future__ import annotations

from dataclasses import dataclass

from qkflow.experiment.stats.curves import CostRatio
from qkflow.experiment.stats.verdict import Verdict
from qkflow.experiment.summary import Comparison, ExperimentResult
from qkflow.report.series import by_evaluation
from qkflow.report.wording import (
    MISSING,
    brief,
    count,
    fixed,
    interval,
    percent,
    probability,
    ratio,
    short,
    signed,
    size,
)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text under named columns; the first column names the row."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: tuple[int, ...] = (0,)
    """The columns that hold words; the others hold figures."""

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"{self.caption!r} has rows that are not {len(self.columns)} cells long")


def answer(summary: ExperimentResult) -> str:
    """The whole study in a line."""
    if not summary.verdicts:
        return "There is no verdict yet."
    if len(summary.verdicts) == 1:
        return summary.verdicts[0].sentence
    told = {
        "better": f"better than {summary.baseline}",
        "worse": "worse",
        "equivalent": "equivalent within the margin",
        "undecided": "undecided",
    }
    parts = []
    for kind, words in told.items():
        if arms := [verdict.arm for verdict in summary.verdicts if verdict.kind == kind]:
            parts.append(f"{words}: {', '.join(short(arm, 48) for arm in arms)}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def verdict_of(summary: ExperimentResult, arm: str) -> Verdict:
    """The verdict on an arm; undecided where none was given."""
    found = [verdict for verdict in summary.verdicts if verdict.arm == arm]
    return found[0] if found else Verdict(arm=arm, kind="undecided", sentence="No verdict was given.", advice=None)


def verdicts(summary: ExperimentResult) -> Table:
    """Each arm's answer, with the figures it rests on."""
    rows = []
    for comparison in summary.comparisons:
        verdict, found = verdict_of(summary, comparison.arm), comparison.difference
        rows.append(
            (
                comparison.arm,
                verdict.kind,
                MISSING if found is None else signed(found.mean),
                "no pair of runs" if found is None else interval(found.low, found.high),
                probability(comparison.p_holm),
                MISSING if found is None else fixed(found.smallest),
            )
        )
    columns = ("arm", "verdict", "difference", "interval", "p (Holm)", "smallest visible effect")
    return Table(caption="Verdicts", columns=columns, rows=tuple(rows), words=(0, 1))


def losses(summary: ExperimentResult) -> Table:
    """The held-out loss of every run."""
    seeds = sorted({seed for arm in summary.arms for seed in arm.seeds})
    rows = []
    for arm in summary.arms:
        found = dict(zip(arm.seeds, arm.bits_per_byte, strict=True))
        runs = [fixed(found.get(seed)) for seed in seeds]
        rows.append((arm.name, fixed(arm.mean), fixed(arm.spread), *runs))
    columns = ("arm", "mean", "standard deviation", *(f"seed {seed}" for seed in seeds))
    return Table(caption=f"Held-out {summary.bits} of every run", columns=columns, rows=tuple(rows))


def learning(summary: ExperimentResult) -> Table:
    """The mean learning curve of each arm, by the tokens it has seen."""
    bands = [by_evaluation(arm.curves, "tokens") for arm in summary.arms]
    places = sorted({x for band in bands for x in band.x})
    at = [dict(zip(band.x, zip(band.mean, band.low, band.high, strict=True), strict=True)) for band in bands]
    rows = [(brief(x), *(_spread_over(found.get(x)) for found in at)) for x in places]
    caption = f"Held-out {summary.bits}: the mean over seeds, and the least and greatest"
    return Table(caption=caption, columns=("tokens", *(arm.name for arm in summary.arms)), rows=tuple(rows), words=())


def differences(summary: ExperimentResult) -> Table:
    """The paired difference of every seed."""
    rows = []
    for comparison in summary.comparisons:
        if (found := comparison.difference) is None:
            rows.append((comparison.arm, MISSING, "no pair of runs", MISSING, "0", MISSING, MISSING, MISSING))
            continue
        pairs = ", ".join(signed(value) for value in found.by_seed)
        rows.append(
            (
                comparison.arm,
                signed(found.mean),
                interval(found.low, found.high),
                f"{100 * found.level:.4g} %",
                count(found.seeds),
                probability(found.p),
                probability(found.p_signs),
                pairs,
            )
        )
    columns = ("arm", "mean", "interval", "confidence", "pairs", "p", "p by signs", "each seed")
    return Table(caption=f"Differences to the baseline, {summary.bits}", columns=columns, rows=tuple(rows))


def spreads(summary: ExperimentResult) -> Table:
    """Whether an arm is steadier over seeds than the baseline."""
    rows = []
    for comparison in summary.comparisons:
        found = comparison.spread
        if found is None:
            rows.append((comparison.arm, MISSING, MISSING, MISSING, "too few seeds", MISSING))
            continue
        ends = interval(found.low, found.high, 2, sign=False)
        rows.append(
            (
                comparison.arm,
                fixed(found.arm),
                fixed(found.baseline),
                ratio(found.ratio),
                "too few seeds" if found.low is None else ends,
                probability(found.p),
            )
        )
    columns = ("arm", "its spread", "baseline's spread", "ratio", "interval", "p")
    caption = f"Spread over seeds: standard deviation of {summary.bits}"
    return Table(caption=caption, columns=columns, rows=tuple(rows))


def readings(summary: ExperimentResult) -> Table:
    """Both readings: at equal tokens, and at equal compute."""
    rows = []
    for comparison in summary.comparisons:
        found, reach = comparison.difference, comparison.reach
        relative = _relative(summary, comparison)
        rows.append(
            (
                comparison.arm,
                MISSING if found is None else f"{signed(found.mean)} ({percent(relative)})",
                MISSING if reach is None else reached(reach.tokens, reach.tokens_low, reach.tokens_high),
                MISSING if reach is None else reached(reach.seconds, reach.seconds_low, reach.seconds_high),
                MISSING if reach is None else _came(reach),
            )
        )
    columns = (
        "arm",
        "difference at the end",
        "tokens to the same loss",
        "seconds to the same loss",
        "seeds that came there",
    )
    return Table(caption="Two readings: how far, and how fast", columns=columns, rows=tuple(rows))


def reached(value: float | None, low: float | None, high: float | None) -> str:
    """A ratio and its interval.

    >>> reached(0.5, 0.4, 0.6), reached(None, None, None), reached(2.0, None, None)
    ('0.50 (0.40 to 0.60)', 'not reached', '2.00')
    """
    if value is None:
        return "not reached"
    return ratio(value) if low is None or high is None else f"{ratio(value)} ({ratio(low)} to {ratio(high)})"


def costs(summary: ExperimentResult) -> Table:
    """What each arm takes, and what matching left."""
    rows = []
    for arm in summary.arms:
        rows.append(
            (
                arm.name,
                count(arm.parameters),
                percent(arm.parameters_off),
                count(arm.hidden),
                brief(arm.flops_per_token),
                brief(arm.tokens),
                count(arm.tokens_per_second),
                size(arm.peak_bytes),
                size(arm.state_bytes),
            )
        )
    columns = (
        "arm",
        "parameters",
        "against the baseline",
        "feed-forward width",
        "FLOPs a token",
        "tokens a run",
        "tokens/s",
        "peak memory",
        "state",
    )
    return Table(caption="What each arm takes", columns=columns, rows=tuple(rows))


def tuning(summary: ExperimentResult) -> Table | None:
    """What each learning rate came to; None where there was nothing to choose."""
    rates = sorted({rate for arm in summary.arms for rate, _ in arm.tuning})
    if not rates:
        return None
    rows = []
    for arm in summary.arms:
        found = dict(arm.tuning)
        chosen = MISSING if arm.learning_rate is None else f"{arm.learning_rate:g}"
        cells = [MISSING if rate not in found else fixed(found[rate]) if found[rate] else "failed" for rate in rates]
        rows.append((arm.name, chosen, *cells))
    return Table(
        caption=f"Learning rates tried, and the {summary.bits} they came to",
        columns=("arm", "chosen", *(f"{rate:g}" for rate in rates)),
        rows=tuple(rows),
    )


def _relative(summary: ExperimentResult, comparison: Comparison) -> float | None:
    base = summary.arms[0].mean if summary.arms else None
    return None if comparison.difference is None or not base else comparison.difference.mean / base


def _spread_over(point: tuple[float, float, float] | None) -> str:
    if point is None:
        return MISSING
    mean, low, high = point
    return fixed(mean) if low == high else f"{fixed(mean)} ({fixed(low)} to {fixed(high)})"


def _came(reach: CostRatio) -> str:
    return f"{reach.reached} of {reach.seeds}"
