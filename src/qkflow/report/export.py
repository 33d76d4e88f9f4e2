"""The numbers of a study as files for other programs: `results.json` whole, `results.csv` a row a run."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from qkflow import io as files
from qkflow.config import from_dict, to_dict
from qkflow.errors import UsageError
from qkflow.experiment.metrics.recall import RecallSummary
from qkflow.experiment.stats.verdict import Verdict
from qkflow.experiment.summary import ArmSummary, Comparison, CorpusNote, ExperimentResult
from qkflow.report.rows import verdict_of
from qkflow.report.wording import visible

RUNS = (
    "arm",
    "seed",
    "bits_per_byte",
    "parameters",
    "hidden",
    "flops_per_token",
    "steps",
    "tokens",
    "learning_rate",
)
ANSWERS = ("arm", "seed", "pairs", "length", "depth", "instances", "questions", "right")
COMPARISONS = (
    "arm",
    "baseline",
    "verdict",
    "mean",
    "low",
    "high",
    "level",
    "pairs",
    "documents",
    "spread",
    "error",
    "p",
    "p_holm",
    "p_signs",
    "smallest",
    "smallest_rests_on",
    "spread_ratio",
    "spread_low",
    "spread_high",
    "spread_p",
    "reach_tokens",
    "reach_tokens_low",
    "reach_tokens_high",
    "reach_seconds",
    "reach_seconds_low",
    "reach_seconds_high",
    "reached",
)


def write_json(summary: ExperimentResult, path: Path) -> Path:
    """The whole summary as JSON; a loss that is not finite is null, since JSON has no name for it."""
    files.write_json(path, finite(to_dict(summary)))
    return path


def read_json(path: Path) -> ExperimentResult:
    """Read what `write_json` wrote; anything else is a `UsageError`."""
    try:
        data = json.loads(path.read_bytes())
        lists = {
            "arms": tuple(from_dict(ArmSummary, _losses(arm)) for arm in data["arms"]),
            "comparisons": tuple(from_dict(Comparison, item) for item in data["comparisons"]),
            "verdicts": tuple(from_dict(Verdict, item) for item in data["verdicts"]),
            "notes": tuple(from_dict(CorpusNote, item) for item in data["notes"]),
            "recall": None if data.get("recall") is None else from_dict(RecallSummary, data["recall"]),
            "remarks": tuple(data["remarks"]),
            "command": tuple(data["command"]),
        }
        return ExperimentResult(**{**data, **lists})
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{path} is not the results.json of a study ({error}): run `qkflow report STUDY`") from error


def write_csv(summary: ExperimentResult, path: Path) -> tuple[Path, Path]:
    """A row for each finished run into `path`, and one for each comparison into a file beside it (`-comparisons`).

    Text that a spreadsheet would take for a formula gets an apostrophe before it.
    """
    runs = [
        (
            arm.name,
            seed,
            loss,
            arm.parameters,
            arm.hidden,
            arm.flops_per_token,
            arm.steps,
            arm.tokens,
            arm.learning_rate,
        )
        for arm in summary.arms
        for seed, loss in zip(arm.seeds, arm.bits_per_byte, strict=True)
    ]
    beside = path.with_name(f"{path.stem}-comparisons{path.suffix}")
    files.write_file(path, csv_text(RUNS, runs))
    files.write_file(beside, csv_text(COMPARISONS, [_comparison(summary, item) for item in summary.comparisons]))
    return path, beside


def write_recall_csv(recall: RecallSummary, path: Path) -> Path:
    """A row for each run and cell of a task's test grid: how many questions there were, and how many it got right."""
    rows = [
        (one.arm, run.seed, *_fields(cell, ANSWERS[2:5]), *_fields(tally, ANSWERS[5:]))
        for one in recall.arms
        for run in one.runs
        for cell, tally in zip(recall.cells, run.tallies, strict=True)
    ]
    files.write_file(path, csv_text(ANSWERS, rows))
    return path


def cell(value: str | int | float | None) -> str | int | float | None:
    """A cell that no spreadsheet runs: only text is guarded, a negative number stays a number.

    >>> cell("=1+1"), cell("standard"), cell(-0.5)
    ("'=1+1", 'standard', -0.5)
    """
    if not isinstance(value, str):
        return value
    text = visible(value)
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@", "|", "%")) else text


def _comparison(summary: ExperimentResult, item: Comparison) -> tuple[Any, ...]:
    names = ("mean", "low", "high", "level", "seeds", "documents", "spread", "error", "p")
    more = ("p_signs", "smallest", "smallest_rests_on")
    reach = ("tokens", "tokens_low", "tokens_high", "seconds", "seconds_low", "seconds_high", "reached")
    return (
        item.arm,
        summary.baseline,
        verdict_of(summary, item.arm).kind,
        *_fields(item.difference, names),
        item.p_holm,
        *_fields(item.difference, more),
        *_fields(item.spread, ("ratio", "low", "high", "p")),
        *_fields(item.reach, reach),
    )


def _fields(value: object, names: Iterable[str]) -> list[Any]:
    return [None if value is None else getattr(value, name) for name in names]


def csv_text(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    r"""A table as CSV, no cell of which a spreadsheet runs.

    >>> csv_text(["arm", "loss"], [["=x", 2.5]])
    "arm,loss\n'=x,2.5\n"
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([cell(value) for value in row] for row in rows)
    return text.getvalue()


def finite(value: Any) -> Any:
    """Plain data with None for every number that is not finite.

    >>> finite({"losses": (2.0, float("nan"))})
    {'losses': [2.0, None]}
    """
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _losses(arm: dict[str, Any]) -> dict[str, Any]:
    """An arm whose learning curves have their nulls back as the losses they were: not finite."""

    def curve(item: dict[str, Any]) -> dict[str, Any]:
        return {**item, "bits_per_byte": [math.nan if loss is None else loss for loss in item["bits_per_byte"]]}

    return {**arm, "curves": [curve(item) for item in arm["curves"]]}
