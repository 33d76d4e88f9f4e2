"""The report of `qkflow judge`: verdicts on a table of losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean, stdev

from rich.console import Group, RenderableType
from rich.text import Text

from qkflow.experiment.stats.verdict import Verdict
from qkflow.formatting import MISSING, escape_unprintable, format_p_value, shorten
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
    rate = _rate(result)
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
            ("equivalence margin", _margin(result)),
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
    number = _number_format(result)
    losses = list(result.losses[result.baseline].values())
    better = "higher" if result.is_higher_better else "lower"
    name = shorten(result.baseline, 32)
    lines = [
        f"baseline {name}: mean {number(fmean(losses))}, {len(losses)} seeds; {better} is better",
        f"margin {_margin(result)}; error rate {_rate(result)} over all arms; marginal intervals",
    ]
    table = verdict_table(result)
    shown = table.select(table.terminal)
    rows = [(shorten(str(row[0]), _NAME_WIDTH), *row[1:]) for row in shown.rows]
    texts = [Text(escape_unprintable(line)) for line in lines]
    return Group(*texts, Text(), *render_table(Table(caption="", columns=shown.columns, rows=rows)))


def verdict_table(result: Judgement) -> Table:
    """Every arm against the baseline."""
    number, signed = _number_format(result), _number_format(result, "+")

    def interval(mean: float | None, low: float | None, high: float | None) -> str:
        return signed(mean) + ("" if low is None else f" ({signed(low)} to {signed(high)})")

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
    columns = (
        text_column("arm"),
        text_column("seed"),
        number_column("loss", "loss", _number_format(result)),
    )
    rows = [(arm, seed, loss) for arm, runs in result.losses.items() for seed, loss in runs.items()]
    return Table(caption="Every run", columns=columns, rows=rows, name="runs", summary="Every run as a table")


def _number_format(result: Judgement, sign: str = "") -> Callable[[float | None], str]:
    """Writes losses with two significant digits of the narrowest interval, or else of the baseline's spread."""
    widths = [
        (difference.high - difference.low) / 2
        for verdict in result.verdicts
        if (difference := verdict.difference) is not None and difference.low is not None and difference.high is not None
    ]
    losses = result.losses[result.baseline].values()
    widths.append(stdev(losses))
    narrow = min((width for width in widths if width > 0), default=1e-4)
    largest = max(map(abs, losses))
    if 1e-4 < largest < 1e8 or not largest:
        form = f"{sign}.{min(8, max(0, 1 - math.floor(math.log10(narrow))))}f"
    else:
        form = f"{sign}.{min(8, max(1, 1 + math.floor(math.log10(largest / narrow))))}e"
    return lambda value: MISSING if value is None else format(value, form)


def _margin(result: Judgement) -> str:
    """The equivalence margin; with two significant digits where the decimals of the losses would round it off."""
    number = _number_format(result)(result.margin)
    return "\N{PLUS-MINUS SIGN}" + (
        number if abs(float(number) - result.margin) <= 0.05 * result.margin else f"{result.margin:.2g}"
    )


def _rate(result: Judgement) -> str:
    """The error rate of this look."""
    return f"{100 * result.error_rate:.3g}%"
