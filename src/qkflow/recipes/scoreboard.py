"""The outcomes of claims as records for a file, and as the rows of a table.

A record holds everything behind an outcome: the arms of each study with their learning rates, trials, seeds and losses
(or metrics), and the measured quantities with their intervals. Tables are made from records only.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from qkflow.config import to_dict
from qkflow.experiment.metrics.rationale import RationaleSummary
from qkflow.experiment.result import ExperimentResult
from qkflow.experiment.stats.curves import Curve
from qkflow.formatting import MISSING
from qkflow.recipes.claims import CLAIMS, Claim
from qkflow.recipes.criteria import ClaimVerdict

OUTCOMES = ("confirmed", "contradicted", "undecided")
COLUMNS = ("", "claim", "published", "measured here", "seeds", "tokens per run", "outcome")
_METRICS = ("performance", "mass", "confident", "comprehensiveness")
_FORMATS = {"times": "{:.2f} x", "points": "{:+.1f}", "runs": "{:.0f}", "of the loss": "{:+.2%}"}
"""How numbers are written, by unit; the rest are bits."""

Record = Mapping[str, Any]


def claim_record(claim: Claim, verdict: ClaimVerdict, results: Mapping[str, ExperimentResult]) -> dict[str, Any]:
    """What claims.json holds of a claim."""
    return {
        "number": claim.number,
        "claim": claim.text,
        "published": claim.published,
        "verdict": to_dict(verdict),
        "deciding": list(claim.deciding),
        "studies": {name: _study_record(result) for name, result in results.items()},
    }


def _study_record(result: ExperimentResult) -> dict[str, Any]:
    record: dict[str, Any] = {"data": result.data, "digest": result.digest}
    if result.rationale is not None:
        return record | {"arms": _rationale_arms(result.rationale)}
    arms = [
        {
            "arm": arm.name,
            "learning_rate": arm.learning_rate,
            "tuning": [list(trial) for trial in arm.tuning],
            "seeds": list(arm.seeds),
            "losses": [round(loss, 6) for loss in arm.losses],
            "tokens": arm.tokens,
            "failures": list(arm.failures),
            "curve": [[tokens, round(loss, 6)] for tokens, loss in mean_curve(arm.curves)],
        }
        for arm in result.arms
    ]
    return record | {"size": result.size, "tokens": result.arms[0].tokens, "arms": arms, "rows": result.rows()}


def mean_curve(curves: Sequence[Curve]) -> list[tuple[int, float]]:
    """The validation loss over tokens, as the mean over seeds, where all seeds were evaluated.

    >>> one = Curve(seed=0, tokens=(10, 20), seconds=(1.0, 2.0), losses=(3.0, 2.0))
    >>> two = Curve(seed=1, tokens=(10, 20), seconds=(1.0, 2.0), losses=(4.0, 2.5))
    >>> mean_curve([one, two])
    [(10, 3.5), (20, 2.25)]
    """
    by_seed = [dict(zip(curve.tokens, curve.losses, strict=True)) for curve in curves]
    common = sorted(set.intersection(*map(set, by_seed))) if by_seed else []
    return [(tokens, statistics.fmean(losses[tokens] for losses in by_seed)) for tokens in common]


def _rationale_arms(summary: RationaleSummary) -> list[dict[str, Any]]:
    return [
        {
            "arm": arm.name,
            "learning_rate": arm.lr,
            "tuning": [list(trial) for trial in arm.tried.items()],
            "seeds": list(arm.seeds),
            **{
                name: [round(value, 6) for value in reading.by_seed]
                for name, reading in arm.readings.items()
                if name in _METRICS
            },
        }
        for arm in summary.arms
    ]


class ScoreRow(NamedTuple):
    """A claim in a table."""

    number: str
    claim: str
    published: str
    measured: str
    seeds: str
    tokens: str
    outcome: str


def score_rows(records: Mapping[str, Record]) -> Iterator[ScoreRow]:
    """One row per claim that has a record, by number."""
    for claim in CLAIMS:
        if (record := records.get(claim.name)) is None:
            continue
        readings = record["verdict"]["readings"]
        studies = [record["studies"][name] for name in record["deciding"] if name in record["studies"]]
        yield ScoreRow(
            number=str(claim.number),
            claim=claim.text,
            published=claim.published,
            measured="; ".join(map(format_reading, readings)) or MISSING,
            seeds=_range([reading["seeds"] for reading in readings]),
            tokens=_range([study["tokens"] for study in studies if "tokens" in study]),
            outcome=record["verdict"]["outcome"],
        )


def control_rows(records: Mapping[str, Record]) -> Iterator[tuple[str, ...]]:
    """One row per arm of the studies that do not decide a claim: controls and larger models."""
    for claim in CLAIMS:
        record = records.get(claim.name, {"studies": {}})
        for name, study in record["studies"].items():
            if name in claim.deciding:
                continue
            for row in study.get("rows", ()):
                interval = _interval(row["difference"], row["low"], row["high"], "bits")
                arms = f"`{row['arm']}` - `{study['arms'][0]['arm']}`"
                tokens = f"{study['tokens']:,}"
                yield (
                    str(claim.number),
                    name,
                    arms,
                    interval,
                    str(row["seeds"]),
                    study["size"],
                    tokens,
                    row["verdict"],
                )


def gap_rows(study: Record) -> Iterator[tuple[int, tuple[float, ...]]]:
    """Tokens, and for each arm but the baseline the mean validation loss minus the baseline's.

    >>> arms = [{"curve": [[10, 3.0], [20, 2.0]]}, {"curve": [[10, 3.5], [20, 2.25]]}]
    >>> list(gap_rows({"arms": arms}))
    [(10, (0.5,)), (20, (0.25,))]
    """
    baseline, *arms = (dict(arm["curve"]) for arm in study["arms"])
    for tokens, loss in baseline.items():
        if all(tokens in curve for curve in arms):
            yield tokens, tuple(curve[tokens] - loss for curve in arms)


def summary(records: Mapping[str, Record]) -> str:
    """How many claims have which outcome.

    >>> summary({"coupled-better": {"verdict": {"outcome": "confirmed"}}})
    '1 confirmed, 0 contradicted, 0 undecided'
    """
    outcomes = [record["verdict"]["outcome"] for record in records.values()]
    return ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in OUTCOMES)


def format_reading(reading: Record) -> str:
    """A measured quantity with its interval."""
    return f"{reading['name']}: {_interval(reading['value'], reading['low'], reading['high'], reading['unit'])}"


def _interval(value: float | None, low: float | None, high: float | None, unit: str) -> str:
    if value is None:
        return MISSING
    text = format_number(value, unit)
    if low is None or high is None:
        return text
    return f"{text} ({format_number(low, unit)} to {format_number(high, unit)})"


def format_number(value: float, unit: str) -> str:
    """A number of a reading.

    >>> format_number(2.134, "times"), format_number(-0.0123, "of the loss"), format_number(-0.0123, "bits")
    ('2.13 x', '-1.23%', '-0.0123')
    """
    return _FORMATS.get(unit, "{:+.4f}").format(value)


def _range(values: Sequence[int]) -> str:
    """The smallest and the largest of some numbers, once if they are equal."""
    ends = [f"{value:,}" for value in sorted({min(values), max(values)})] if values else [MISSING]
    return " to ".join(ends)
