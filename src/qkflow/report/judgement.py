"""The report of `qkflow judge`: verdicts on a table of losses."""

from __future__ import annotations

import math
from statistics import fmean, stdev

from rich.console import Group, RenderableType
from rich.text import Text

from qkflow.experiment.stats.verdict import Verdict
from qkflow.formatting import MISSING, escape_unprintable, format_p_value, format_percent, shorten
from qkflow.judge import Judgement
from qkflow.report import figures
from qkflow.report.export import render_table
from qkflow.report.sections import (
    Column,
    Figure,
    Note,
    ReportContent,
    Section,
    Statement,
    Table,
    attributes,
    number_column,
    text_column,
    verdict_column,
)

_NAME_WIDTH = 12


def judgement_report(result: Judgement, source: str) -> ReportContent:
    """The page of a judgement; `source` is the name of its table."""
    better = "higher is better" if result.is_higher_better else "lower is better"
    rate = format_percent(result.error_rate, 2)
    note = (
        f"Differences are arm minus {result.baseline}, in the unit of the table; {better}. Intervals are marginal: each"
        " covers the true difference of its arm alone. The probability of a false “better” or “worse” is at most"
        f" {rate} for all arms together."
    )
    statements = [
        Statement(
            verdict=verdict.kind,
            text=f"{shorten(verdict.arm, 48)}: {verdict.sentence} ({verdict.paired}).",
            advice=verdict.advice or "",
        )
        for verdict in result.verdicts
    ]
    ordered = {result.baseline: result.losses[result.baseline], **result.losses}
    strips = Figure(
        name="strips",
        caption="Every run; lines connect the runs of a seed, and the tall mark is the mean.",
        charts={"": figures.strip_chart(ordered, better)},
    )
    shown = result.verdicts[0].arm if len(result.verdicts) == 1 else f"{len(result.verdicts)} arms"
    counts = [f"{sum(v.kind == kind for v in result.verdicts)} {kind}" for kind in _KINDS]
    return ReportContent(
        kind="judge",
        title=f"{shorten(shown, 48)} vs. {shorten(result.baseline, 48)}",
        answer=f"Against {shorten(result.baseline, 48)}: {', '.join(counts)}.",
        callouts=[f"{notice[:1].upper()}{notice[1:]}." for notice in result.notices],
        facts=[
            ("table", shorten(source, 60)),
            ("equivalence margin", f"\N{PLUS-MINUS SIGN}{result.margin:.{_digits(result)}f}"),
            ("error rate", f"{rate}, all arms together"),
            ("blocks per run", f"{result.blocks}"),
        ],
        sections=[
            Section(
                name="verdicts",
                title="Verdicts",
                nav="Verdicts",
                blocks=[verdict_table(result), *statements, Note(text=note)],
            ),
            Section(name="runs", title="Runs", nav="Runs", blocks=[strips, _run_table(result)]),
        ],
        arms=list(ordered),
        source="a table of losses",
    )


_KINDS = ("better", "worse", "equivalent", "undecided")


def judgement_terminal(result: Judgement) -> RenderableType:
    """One line per arm, at most 80 columns wide."""
    digits = _digits(result)
    losses = list(result.losses[result.baseline].values())
    better = "higher" if result.is_higher_better else "lower"
    name, rate = shorten(result.baseline, 32), format_percent(result.error_rate, 2)
    lines = [
        f"baseline {name}: mean {fmean(losses):.{digits}f}, {len(losses)} seeds; {better} is better",
        f"margin \N{PLUS-MINUS SIGN}{result.margin:.{digits}f}; error rate {rate} over all arms; marginal intervals",
    ]
    table = verdict_table(result)
    shown = table.select(table.terminal)
    rows = [(shorten(str(row[0]), _NAME_WIDTH), *row[1:]) for row in shown.rows]
    texts = [Text(escape_unprintable(line)) for line in lines]
    return Group(*texts, Text(), *render_table(Table(caption="", columns=shown.columns, rows=rows)))


def verdict_table(result: Judgement) -> Table:
    """Every arm against the baseline."""
    digits = _digits(result)

    def number(value: float | None) -> str:
        return MISSING if value is None else f"{value:.{digits}f}"

    def interval(mean: float | None, low: float | None, high: float | None) -> str:
        if mean is None:
            return MISSING
        return f"{mean:+.{digits}f}" + ("" if low is None else f" ({low:+.{digits}f} to {high:+.{digits}f})")

    level = next((v.difference.level for v in result.verdicts if v.difference is not None), 0.95)
    columns = (
        text_column("arm"),
        verdict_column(),
        number_column("mean", "mean", number),
        Column(
            title=f"difference ({100 * level:.6g}%)",
            keys=("difference", "low", "high"),
            format=interval,
            style="interval",
        ),
        number_column("p", "p_adjusted", format_p_value),
        number_column("pairs", "seeds"),
        number_column("needed", "seeds_needed"),
        text_column("pairing", "paired"),
    )
    return Table(
        caption=f"Each arm against {result.baseline}",
        columns=columns,
        rows=[_row(result, verdict) for verdict in result.verdicts],
        name="verdicts",
        terminal=("arm", "verdict", "difference", "p_adjusted", "seeds", "seeds_needed"),
        margin=result.margin,
    )


def _row(result: Judgement, verdict: Verdict) -> tuple[str | int | float | None, ...]:
    return (
        verdict.arm,
        verdict.kind,
        fmean(result.losses[verdict.arm].values()),
        *attributes(verdict.difference, "mean", "low", "high"),
        verdict.p_adjusted,
        *attributes(verdict.difference, "seeds"),
        verdict.seeds_needed,
        verdict.paired,
    )


def _run_table(result: Judgement) -> Table:
    digits = _digits(result)
    columns = (
        text_column("arm"),
        text_column("seed"),
        number_column("loss", "loss", lambda value: f"{value:.{digits}f}"),
    )
    rows = [(arm, seed, loss) for arm, runs in result.losses.items() for seed, loss in runs.items()]
    return Table(caption="Every run", columns=columns, rows=rows, name="runs", summary="Every run as a table")


def _digits(result: Judgement) -> int:
    """Decimals that show two significant digits of the narrowest interval, or else of the baseline's spread."""
    widths = [
        (difference.high - difference.low) / 2
        for verdict in result.verdicts
        if (difference := verdict.difference) is not None and difference.low is not None and difference.high is not None
    ]
    widths.append(stdev(result.losses[result.baseline].values()))
    narrow = min((width for width in widths if width > 0), default=1e-4)
    return min(8, max(0, 1 - math.floor(math.log10(narrow))))
