"""Verdicts for runs made by anybody with any framework, from a table of their losses.

    arm,seed,loss            one row per run, or one per run and held-out block:
    arm,seed,block,loss,weight

The statistics are those of `qkflow compare` (`qkflow.experiment.stats`), without a prior on the spread over seeds: it
was calibrated on our own runs. Runs of the baseline and of an arm are paired by seed. An arm that shares only some
seeds with the baseline is compared on these, one that shares none by Welch's test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qkflow.errors import UsageError, unknown
from qkflow.judge.loss_table import LossTable, arrange, read_csv, read_records
from qkflow.judge.run_folders import read_folder

if TYPE_CHECKING:
    from qkflow.experiment.stats.rounds import Rule
    from qkflow.experiment.stats.verdict import Verdict


_MAX_LOOKS = 30
"""The error rate that is left for later looks is below one in a billion of the first."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The verdicts on a table of losses."""

    baseline: str
    error_rate: float
    """The rate that adjusted p values are compared with: the share of this look."""
    margin: float
    """The equivalence margin, in the unit of the losses."""
    is_higher_better: bool
    verdicts: tuple[Verdict, ...]
    """One per arm but the baseline, in the order of the table."""
    losses: Mapping[str, Mapping[str, float]]
    """The loss of each run by arm and seed: the weighted mean over blocks."""
    blocks: int
    """Held-out blocks per run; 1 if the table has none."""
    notices: tuple[str, ...]
    """What a reader must know: how the baseline was chosen, arms that are not paired, runs that were left out."""

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, as `qkflow judge --json` prints it."""
        return {
            "baseline": self.baseline,
            "error_rate": self.error_rate,
            "verdicts": [
                {
                    "arm": verdict.arm,
                    "verdict": verdict.kind,
                    "difference": None if verdict.difference is None else verdict.difference.mean,
                    "low": None if verdict.difference is None else verdict.difference.low,
                    "high": None if verdict.difference is None else verdict.difference.high,
                    "p_adjusted": verdict.p_adjusted,
                    "paired": verdict.paired,
                    "seeds": 0 if verdict.difference is None else verdict.difference.seeds,
                    "seeds_needed": verdict.seeds_needed,
                }
                for verdict in self.verdicts
            ],
        }


def judge(
    table: Any,
    *,
    baseline: str | None = None,
    margin: float | None = None,
    margin_absolute: float | None = None,
    higher_is_better: bool = False,
    look: int | None = None,
    error_rate: float = 0.05,
) -> Judgement:
    """Judge every arm of a table against the baseline.

    Args:
        table: Rows with the columns `arm`, `seed`, `loss` and optionally `block` and `weight`: a list of dictionaries
            or tuples, a data frame (pandas or polars), a dictionary of columns, the path of a CSV file, or a folder of
            runs with `metrics.jsonl`.
        baseline: The arm to compare with; by default `standard` if there is one, else the first arm.
        margin: Differences within this fraction of the baseline's mean are equivalent; by default 0.005.
        margin_absolute: The same in the unit of the losses.
        higher_is_better: Whether the numbers are scores, such as accuracies, and not losses.
        look: If the table grows and is judged several times, the number of this time, counted from 1. Every look spends
            half of the error rate that is left. None: the table is judged once.
        error_rate: The chance of a false better or worse over all arms (and looks).

    >>> rows = [("standard", s, 2.50 + 0.01 * s) for s in range(4)] + [("mine", s, 2.41 + 0.01 * s) for s in range(4)]
    >>> rows[-1] = ("mine", 3, 2.442)
    >>> result = judge(rows)
    >>> result.verdicts[0].kind, result.verdicts[0].sentence
    ('better', 'better by 0.0895 (3.6%), 95% interval 0.0879 to 0.0911, 4 seeds')
    """
    from qkflow.experiment.stats.verdict import judge_round

    _check_options(margin, margin_absolute, look)
    table = _read_losses(table)
    baseline, notices = _choose_baseline(table, baseline)
    losses = {
        arm: {seed: float(run.sum() / table.weights.sum()) for seed, run in runs.items()}
        for arm, runs in table.runs.items()
    }
    rule = _rule(error_rate, margin, look)
    if margin_absolute is None:
        margin_absolute = _absolute_margin(rule.margin, list(losses[baseline].values()))
    verdicts = judge_round(
        table.runs,
        table.weights,
        baseline=baseline,
        rule=rule,
        round=1,
        unit=None,
        scale=1.0,
        margin=margin_absolute,
        is_higher_better=higher_is_better,
        may_be_unpaired=True,
        resolution=table.resolution,
    )
    pairing = [notice for verdict in verdicts if (notice := _pairing_notice(verdict, baseline, losses))]
    return Judgement(
        baseline=baseline,
        error_rate=error_rate * rule.spending[0],
        margin=margin_absolute,
        is_higher_better=higher_is_better,
        verdicts=verdicts,
        losses=losses,
        blocks=len(table.weights),
        notices=(*table.notices, *notices, *pairing),
    )


def _check_options(margin: float | None, margin_absolute: float | None, look: int | None) -> None:
    if margin is not None and margin_absolute is not None:
        raise UsageError("got both a relative and an absolute margin: give one of them")
    for name, value in (("margin", margin), ("margin-absolute", margin_absolute)):
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"the {name} must be a number above 0, got {value}")
    if look is not None and not 1 <= look <= _MAX_LOOKS:
        raise UsageError(f"looks are counted from 1 and end at {_MAX_LOOKS}, got {look}")


def _read_losses(table: Any) -> LossTable:
    """Read and check a table in any of the forms that `judge` takes."""
    if isinstance(table, str | Path):
        path = Path(table)
        return read_folder(path) if path.is_dir() else arrange(read_csv(path))
    return arrange(read_records(table))


def _choose_baseline(table: LossTable, baseline: str | None) -> tuple[str, tuple[str, ...]]:
    """The baseline, and a notice if it was not given."""
    arms = list(table.runs)
    if baseline is not None and baseline.strip() not in arms:
        raise unknown("baseline", baseline.strip(), arms)
    if len(arms) < 2:
        raise UsageError(f"the table has a single arm, {arms[0]!r}: expected at least two arms to compare")
    chosen = baseline.strip() if baseline is not None else "standard" if "standard" in arms else arms[0]
    counts = {arm: len(runs) for arm, runs in table.runs.items()}
    if counts[chosen] < 2 or max(count for arm, count in counts.items() if arm != chosen) < 2:
        alone = chosen if counts[chosen] < 2 else next(arm for arm in arms if arm != chosen)
        raise UsageError(f"{alone} has one seed, which has no spread: expected at least 2 seeds of every arm")
    if baseline is not None:
        return chosen, ()
    why = "" if chosen == "standard" else ", the first arm of the table"
    return chosen, (f"the baseline is {chosen}{why}",)


def _rule(error_rate: float, margin: float | None, look: int | None) -> Rule:
    """The rule of a single judgement, or of one look: each spends half of the error rate that is left."""
    from qkflow.experiment.stats.rounds import MARGIN, Rule

    share = 1.0 if look is None else 0.5**look
    return Rule(
        error_rate=error_rate,
        margin=MARGIN if margin is None else margin,
        seeds_by_round=(2,) if look is None else (2, 3),
        spending=(share,) if look is None else (share, share / 2),
    )


def _absolute_margin(fraction: float, losses: Sequence[float]) -> float:
    """The margin in the unit of the losses, from a fraction of their mean."""
    mean = float(np.mean(losses))
    if mean == 0:
        raise UsageError("the baseline's mean is 0, so a relative margin is 0: give an absolute margin")
    return fraction * abs(mean)


def _pairing_notice(verdict: Verdict, baseline: str, losses: Mapping[str, Mapping[str, float]]) -> str | None:
    if verdict.difference is None or verdict.p_adjusted is None:
        return f"{verdict.arm} has fewer than 2 seeds: not compared"
    if verdict.paired == "unpaired":
        return f"{verdict.arm} and {baseline} share fewer than 2 seeds: compared without pairs (Welch's test)"
    if verdict.paired == "partly":
        seeds = losses[verdict.arm].keys()
        pairs = len(seeds & losses[baseline].keys())
        return f"{verdict.arm} has {pairs} of its {len(seeds)} seeds in common with {baseline}: only these count"
    return None
