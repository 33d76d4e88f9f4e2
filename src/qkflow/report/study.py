"""The report of a study: `build_report` for every kind, and the sections on the loss."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qkflow.experiment.metrics.rationale import RationaleSummary
from qkflow.experiment.result import ArmSummary, Comparison, ExperimentResult
from qkflow.experiment.stats.verdict import Verdict
from qkflow.formatting import (
    MISSING,
    escape_unprintable,
    format_bytes,
    format_compact,
    format_difference,
    format_duration,
    format_integer,
    format_number,
    format_p_value,
    format_percent,
    format_ratio,
    format_signed,
    shorten,
)
from qkflow.report import figures, rationale, recall
from qkflow.report.attention_maps import AttentionMaps
from qkflow.report.diagnostics import diagnostic_blocks
from qkflow.report.sections import (
    Block,
    BulletList,
    Column,
    Definitions,
    Figure,
    MapViewer,
    Note,
    Record,
    ReportContent,
    Section,
    Statement,
    Table,
    attributes,
    interval_column,
    number_column,
    text_column,
    verdict_column,
)

TIMES = "\N{MULTIPLICATION SIGN}"


def build_report(result: ExperimentResult | RationaleSummary, maps: AttentionMaps | None = None) -> ReportContent:
    """The report of a study, finished or not; `maps` are the attention maps of its models."""
    maps = maps or AttentionMaps()
    names = [arm.name for arm in result.arms]
    failures = [f"{arm.name}: {line}" for arm in result.arms for line in arm.failures]
    if isinstance(result, RationaleSummary):
        answer, subject, facts = result.answer, result.task, rationale.facts(result)
        sections, last = rationale.sections(result), rationale.task_section(result)
        tuning = {arm.name: (arm.lr, arm.tried) for arm in result.arms}
        loss, folder = "validation loss in nats", []
        callouts = _progress(result.finished, result.runs, len(failures))
    else:
        answer, subject, facts = _answer(result), result.data, _facts(result)
        sections, last = _loss_sections(result, maps), _corpus_section(result)
        tuning = {arm.name: (arm.learning_rate, dict(arm.tuning)) for arm in result.arms}
        loss, folder = f"validation {result.bits}", [("folder", f"`{result.folder}`", "")]
        callouts = [*_progress(result.finished, result.runs, len(failures)), *_state(result)]
    sections += _tuning_section(tuning, loss)
    if failures:
        lines = BulletList(items=failures, in_terminal=True)
        sections.append(Section(name="failures", title="Failed runs", nav="Failures", blocks=[lines]))
    record = [
        Definitions(items=[("command", f"`{shlex.join(result.command)}`", ""), *folder]),
        Record(title="Design (design.json)", content=result.design),
        Record(title="Environment (environment.json)", content=result.environment),
        *(Record(title=f"Config of {shorten(name, 60)}", content=config) for name, config in maps.configs.items()),
    ]
    sections += [last, Section(name="record", title="How to reproduce", nav="Reproduce", blocks=record)]
    seeds = sorted({len(arm.seeds) for arm in result.arms}) or [0]
    per_arm = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    shown = names[1] if len(names) == 2 else f"{max(0, len(names) - 1)} arms"
    return ReportContent(
        kind="study",
        title=f"{shown} vs. {names[0] if names else MISSING} on {subject}",
        answer=answer or "No verdict yet.",
        callouts=[*callouts, *result.remarks],
        facts=[
            *facts,
            (f"arms {TIMES} seeds", f"{len(names)} {TIMES} {per_arm}"),
            ("finished runs", f"{result.finished} of {result.runs}"),
        ],
        sections=sections,
        arms=names,
    )


def _state(result: ExperimentResult) -> list[str]:
    """Whether the study has ended, what is still open, and the command that continues it."""
    state, folder = result.state, shlex.quote(result.folder)
    open_arms = [verdict.arm for verdict in result.verdicts if verdict.kind == "undecided"]
    if state.ended is None:
        rounds = "1 round is" if state.rounds == 1 else f"{state.rounds} rounds are"
        arms = "1 arm is" if len(open_arms) == 1 else f"{len(open_arms)} arms are"
        return [
            f"The study is running or was interrupted (`qkflow compare --resume {folder}`): {rounds} judged, {arms} "
            f"open of {len(result.verdicts)}{_time_left(result, len(open_arms))}."
        ]
    if not open_arms or state.budget is None or state.ended != "the budget is spent":
        return []
    more = format_duration(state.elapsed)
    return [f"More time for the undecided arms: `qkflow compare --extend {folder} --budget {more}`"]


def _time_left(result: ExperimentResult, open_arms: int) -> str:
    """How long a study takes at most: what is left of its budget, or else all its seeds at the speed until now."""
    state, seeds = result.state, result.design.get("rule", {}).get("seeds_by_round")
    if state.budget is not None:
        return f", at most about {format_duration(max(0.0, state.budget - state.elapsed))} left"
    if not seeds or not result.finished or not result.arms:
        return ""
    runs = max(0, seeds[-1] - len(result.arms[0].seeds)) * (1 + open_arms)
    return f", at most about {format_duration(state.elapsed / result.finished * runs)} left"


def _progress(finished: int, runs: int, failed: int) -> list[str]:
    if finished >= runs:
        return []
    count = f"{finished} of {runs} runs are finished" + (f", {failed} failed" if failed else "")
    return [f"{count}." if finished + failed >= runs else f"{count}; these results are preliminary."]


def _tuning_section(arms: Mapping[str, tuple[float | None, Mapping[float, float | None]]], loss: str) -> list[Section]:
    """The loss of each learning rate tried; `arms` has the chosen rate and the loss of each rate."""
    rates = sorted({rate for _, losses in arms.values() for rate in losses})
    if not rates:
        return []

    def trial(losses: Mapping[float, float | None], rate: float) -> str:
        text = format_number(losses.get(rate))
        return "failed" if text == MISSING and rate in losses else text

    table = Table(
        caption=f"Learning rates tried, and their {loss}",
        columns=[
            text_column("arm"),
            number_column("chosen", "chosen", _format_rate),
            *(number_column(f"{rate:g}", f"rate {rate:g}") for rate in rates),
        ],
        rows=[(name, chosen, *(trial(losses, rate) for rate in rates)) for name, (chosen, losses) in arms.items()],
    )
    note = Note(text="Every arm has the same tuning budget: each rate once, on a seed that is not used for verdicts.")
    return [Section(name="tuning", title="Learning-rate tuning", nav="Tuning", blocks=[table, note])]


# Studies of the loss.


def _answer(result: ExperimentResult) -> str:
    """All verdicts in one line."""
    if len(result.verdicts) <= 1:
        return "".join(f"{shorten(verdict.arm, 48)}: {verdict.sentence}." for verdict in result.verdicts)
    titles = {
        "better": f"better than {result.baseline}",
        "worse": "worse",
        "equivalent": "equivalent within the margin",
        "undecided": "undecided",
    }
    groups = []
    for kind, title in titles.items():
        if arms := [shorten(verdict.arm, 48) for verdict in result.verdicts if verdict.kind == kind]:
            groups.append(f"{title}: {', '.join(arms)}")
    text = "; ".join(groups)
    return f"{text[:1].upper()}{text[1:]}."


def _facts(result: ExperimentResult) -> list[tuple[str, str]]:
    tokens = [arm.tokens for arm in result.arms]
    per_run = {format_compact(min(tokens, default=None)), format_compact(max(tokens, default=None))}
    return [
        ("task" if result.on_task else "corpus", f"{shorten(result.data, 60)} ({result.digest[:12]})"),
        ("model", f"{result.size} parameters, context {format_integer(result.context)}"),
        ("tokens per run", " to ".join(sorted(per_run))),
        ("matched", f"parameters and {result.match}"),
        ("equivalence margin", f"\N{PLUS-MINUS SIGN}{result.margin:.4f} {result.bits}"),
        ("error rate", f"{100 * result.error_rate:.3g}%, all arms together"),
    ]


def _loss_sections(result: ExperimentResult, maps: AttentionMaps) -> list[Section]:
    table = comparison_table(result)
    arms = replace(table, rows=table.rows[1:])  # without the baseline
    sections = [
        _verdict_section(result, table),
        *([] if result.recall is None else [recall.section(result.recall)]),
        _learning_section(result),
        _difference_section(result, arms),
        _seed_section(result, arms),
        _speed_section(result, arms),
        _cost_section(result),
        _attention_section(result, maps),
    ]
    tokens = maps.excerpts[0]["tokens"] if maps.excerpts else ()
    if blocks := diagnostic_blocks(maps.diagnostics, [arm.name for arm in result.arms], tokens):
        title = "Diagnostics of the mechanisms"
        sections.append(Section(name="diagnostics", title=title, nav="Diagnostics", blocks=blocks))
    return sections


def comparison_table(result: ExperimentResult) -> Table:
    """Every arm against the baseline: the one description of all these columns."""
    columns = (
        text_column("arm"),
        verdict_column(),
        number_column(result.bits, result.loss_name, format_number),
        Column(
            title="difference (interval)",
            keys=("difference", "low", "high"),
            format=format_difference,
            style="interval",
        ),
        number_column("relative", "relative", lambda value: format_percent(value, signed=True)),
        number_column("confidence", "level", lambda value: format_percent(value, 0), is_setting=True),
        number_column("seeds", "pairs", format_integer, is_setting=True),
        number_column("documents", "documents", format_integer, is_setting=True),
        number_column("standard deviation", "std", format_number),
        number_column("standard error", "std_error", format_number),
        number_column("p", "p", format_p_value),
        number_column("p (adjusted)", "p_adjusted", format_p_value),
        number_column("p (sign flips)", "p_signs", format_p_value, is_setting=True),
        number_column("minimum detectable effect", "detectable", format_number),
        replace(number_column("calibrated spread", "prior_used", _format_use, is_setting=True), is_text=True),
        number_column(
            "difference of each seed", "by_seed", lambda x: ", ".join(map(format_signed, x or ())) or MISSING
        ),
        number_column("std of the arm", "std_arm", format_number),
        number_column("std of the baseline", "std_baseline", format_number),
        interval_column("ratio (interval)", "std_ratio", format_ratio),
        number_column("p of the ratio", "std_ratio_p", format_p_value),
        *(interval_column(f"{unit} to the same loss (ratio)", unit, _format_reach) for unit in ("tokens", "seconds")),
        Column(
            title="seeds at the baseline's loss",
            keys=("reached", "read"),
            format=lambda count, total: MISSING if count is None else f"{count} of {total}",
        ),
    )
    compared = {item.arm: item for item in result.comparisons}
    return Table(
        caption=f"Each arm against {result.baseline}, with the {_level(result)} of each arm alone",
        columns=columns,
        rows=[_comparison_row(result, arm, compared.get(arm.name)) for arm in result.arms],
        name="comparisons",
        page=("arm", "verdict", result.loss_name, "difference", "p_adjusted", "detectable"),
        terminal=("arm", "verdict", result.loss_name, "difference", "pairs"),
        margin=result.margin,
    )


def _comparison_row(result: ExperimentResult, arm: ArmSummary, item: Comparison | None) -> tuple[Any, ...]:
    verdicts = {verdict.arm: verdict.kind for verdict in result.verdicts}
    difference, spread, reach = (None, None, None) if item is None else (item.difference, item.spread, item.reach)
    mean, baseline = getattr(difference, "mean", None), result.arms[0].mean
    return (
        arm.name,
        "baseline" if item is None else verdicts.get(arm.name, "undecided"),
        arm.mean,
        *attributes(difference, "mean", "low", "high"),
        mean / baseline if mean is not None and baseline else None,
        *attributes(difference, "level", "seeds", "documents", "spread", "error", "p"),
        None if item is None else item.p_adjusted,
        *attributes(difference, "p_signs", "smallest", "prior_used", "by_seed"),
        *attributes(spread, "arm", "baseline", "ratio", "low", "high", "p"),
        *attributes(reach, "tokens", "tokens_low", "tokens_high", "seconds", "seconds_low", "seconds_high"),
        *attributes(reach, "reached", "seeds"),
    )


def _format_use(is_used: bool | None) -> str:
    return MISSING if is_used is None else "used" if is_used else "not used"


def _format_reach(ratio: float | None, low: float | None, high: float | None) -> str:
    return "not reached" if ratio is None else format_ratio(ratio, low, high)


def _level(result: ExperimentResult) -> str:
    return f"{100 * (1 - result.error_rate):.6g}% interval"


def _verdict_section(result: ExperimentResult, table: Table) -> Section:
    statements = []
    for verdict in result.verdicts:
        accuracy = "" if result.recall is None else recall.accuracy_sentence(result.recall, verdict.arm)
        advice = " ".join(filter(None, (verdict.advice, accuracy)))
        text = f"{shorten(verdict.arm, 48)}: {verdict.sentence}."
        statements.append(
            Statement(verdict=verdict.kind, text=text, advice=advice, in_terminal=_terminal_advice(verdict))
        )
    text = (
        f"Differences are in held-out {result.bits}: arm minus baseline, paired by seed and by document (the losses are"
        " means over the seeds of each arm, and arms that are decided early have fewer). Below zero,"
        f" the arm is better. The bars show the marginal {_level(result)} of each arm; the equivalence margin is"
        f" shaded. The probability of a false “better” or “worse” is at most {100 * result.error_rate:.3g}% for all"
        " arms and rounds together (step-down max-t). Each round spends a part of it, so an arm whose adjusted p is"
        " slightly smaller can still be undecided. A study like this one detects the minimum detectable effect with a"
        " probability of 80%."
    )
    if result.on_task:
        text += (
            " Verdicts use the loss of the answers on held-out instances of the training length. Accuracy is measured"
            " on the test instances and does not affect the verdict."
        )
    details = Note(text=text, summary="How to read this table")
    if not statements:
        statements = [Note(text="The study has one arm: there is nothing to compare.", style="plain")]
    return Section(name="verdicts", title="Verdicts", nav="Verdicts", blocks=[table, *statements, details])


def _terminal_advice(verdict: Verdict) -> str:
    """What would decide an undecided arm, on one line of 80 columns: the seeds alone if there is no room for more."""
    if not verdict.advice:
        return ""
    name = shorten(verdict.arm, 24)
    line = f"{name}: {verdict.advice}"
    if len(escape_unprintable(line)) <= 80:
        return line
    if verdict.seeds_needed is not None:
        return f"{name}: About {verdict.seeds_needed} seeds would decide."
    return f"{name}: {verdict.advice.partition(':')[0].rstrip('.')}."


def _learning_section(result: ExperimentResult) -> Section:
    caption = (
        "Mean over seeds; the band is the range from the lowest to the highest seed. The first evaluations are outside"
        " the frame: double-click to see them. Seconds count training only, on the machine of the study."
    )
    charts, empty = figures.learning_curves(result), "No run has been evaluated yet."
    figure = Figure(name="curves", caption=caption, charts=charts, has_arm_buttons=True, empty=empty)
    return Section(name="learning", title="Learning curves", nav="Learning", blocks=(figure, learning_table(result)))


def learning_table(result: ExperimentResult) -> Table:
    """The mean learning curve of each arm by training tokens."""
    bands = [figures.mean_curve(arm.curves, "tokens") for arm in result.arms]
    points = [dict(zip(band.x, zip(band.mean, band.low, band.high, strict=True), strict=True)) for band in bands]
    rows = [
        (x, *(value for point in points for value in point.get(x, (None, None, None))))
        for x in sorted({x for band in bands for x in band.x})
    ]
    arms = [interval_column(arm.name, f"arm {n}", _format_range) for n, arm in enumerate(result.arms)]
    return Table(
        caption=f"Held-out {result.bits}: mean over seeds (lowest to highest)",
        columns=(number_column("tokens", "tokens", format_compact), *arms),
        rows=rows,
        summary="Learning curves as a table",
    )


def _format_range(mean: float | None, low: float | None, high: float | None) -> str:
    text = format_number(mean)
    return text if low == high else f"{text} ({format_number(low)} to {format_number(high)})"


def _difference_section(result: ExperimentResult, arms: Table) -> Section:
    figure = Figure(
        name="forest",
        caption="Large markers: mean and interval. Small ticks: pairs of runs. Shaded: the equivalence margin.",
        charts={"": figures.forest(result)},
        empty="No seed has a finished run of an arm and of the baseline yet.",
    )
    keys = ("arm", "difference", "relative", "level", "pairs", "p", "p_signs", "by_seed")
    caption = f"Differences to the baseline in {result.bits}"
    differences = arms.show(*keys, caption=caption, summary="Differences as a table")
    return Section(name="differences", title="Differences", nav="Differences", blocks=(figure, differences))


def _seed_section(result: ExperimentResult, arms: Table) -> Section:
    figure = Figure(
        name="strips",
        caption="Every run; lines connect the runs of a seed, and the tall mark is the mean.",
        charts={"": figures.loss_strips(result)},
        empty="No run is finished yet.",
    )
    keys = ("arm", "std_arm", "std_baseline", "std_ratio", "std_ratio_p")
    spreads = arms.show(*keys, caption=f"Standard deviation over seeds, {result.bits}")
    note = Note(text="A ratio below one: the loss of the arm varies less from seed to seed than the baseline's.")
    blocks = (figure, spreads, note, run_table(result))
    return Section(name="seeds", title="Variation between seeds", nav="Seeds", blocks=blocks)


def run_table(result: ExperimentResult) -> Table:
    """The loss of every finished run."""
    columns = (
        text_column("arm"),
        number_column("seed", "seed"),
        number_column(result.bits, result.loss_name, format_number),
        number_column("parameters", "parameters", format_integer, is_setting=True),
        number_column("feed-forward width", "hidden", format_integer, is_setting=True),
        number_column("FLOPs per token", "flops_per_token", format_compact, is_setting=True),
        number_column("steps", "steps", format_integer, is_setting=True),
        number_column("tokens", "tokens", format_compact, is_setting=True),
        number_column("learning rate", "learning_rate", _format_rate, is_setting=True),
    )
    settings = [column.keys[0] for column in columns[3:]]
    rows = [
        (arm.name, seed, loss, *attributes(arm, *settings))
        for arm in result.arms
        for seed, loss in zip(arm.seeds, arm.losses, strict=True)
    ]
    return Table(
        caption=f"Held-out {result.bits} of every run",
        columns=columns,
        rows=rows,
        name="runs",
        page=("arm", "seed", result.loss_name, "learning_rate"),
        summary="Every run as a table",
    )


def _format_rate(rate: float | None) -> str:
    return MISSING if rate is None else f"{rate:g}"


def _speed_section(result: ExperimentResult, arms: Table) -> Section:
    text = (
        "Tokens and seconds that an arm needs to reach a loss that both arms reached, divided by the baseline's. Below"
        " one, the arm is faster. The curves are compared before the learning rate decays."
    )
    caption = "Tokens and seconds to the same loss, divided by the baseline's"
    ratios = arms.show("arm", "tokens", "seconds", "reached", caption=caption)
    marks = "Filled circles: tokens. Open squares: seconds."
    figure = Figure(name="reach", caption=marks, charts={"": figures.reach(result)})
    return Section(name="speed", title="Training speed", nav="Speed", blocks=(Note(text=text), ratios, figure))


def cost_table(result: ExperimentResult) -> Table:
    """Parameters, compute and memory of each arm."""
    columns = (
        text_column("arm", "name"),
        number_column("parameters", "parameters", format_integer),
        number_column("vs. baseline", "parameters_off", lambda value: format_percent(value, signed=True)),
        number_column("feed-forward width", "hidden", format_integer, is_setting=True),
        number_column("FLOPs per token", "flops_per_token", format_compact),
        number_column("tokens per run", "tokens", format_compact, is_setting=True),
        number_column("tokens per second", "tokens_per_second", format_integer),
        number_column("peak memory", "peak_bytes", format_bytes),
        number_column("state", "state_bytes", format_bytes),
    )
    keys = [column.keys[0] for column in columns]
    return Table(
        caption="Parameters, compute and memory of each arm",
        columns=columns,
        rows=[attributes(arm, *keys) for arm in result.arms],
        name="cost",
    )


def _cost_section(result: ExperimentResult) -> Section:
    text = (
        "“vs. baseline” is the difference in parameters that is left after matching. FLOPs are of one forward"
        " pass at the full context; training takes three times as many. Tokens per second were measured with as"
        " many runs in parallel as the study used. The state is what the mechanism carries per sequence after a"
        " full context."
    )
    return Section(name="cost", title="Cost and memory", nav="Cost", blocks=[cost_table(result), Note(text=text)])


def _attention_section(result: ExperimentResult, maps: AttentionMaps) -> Section:
    blocks: list[Block] = [Note(text="There are no attention maps to show yet.", style="plain")]
    if maps.arms and maps.excerpts:
        text = (
            "Attention of each token (row) to itself and to earlier tokens (columns), in the first finished run of an"
            " arm. Colours follow the square root of the weight, so that small weights are visible."
        )
        blocks = [Note(text=text), MapViewer(maps=maps)]
    if maps.missing:
        blocks.append(BulletList(items=maps.missing))
    title = f"Attention on held-out {'instances' if result.on_task else 'text'}"
    return Section(name="attention", title=title, nav="Attention", blocks=blocks)


def _corpus_section(result: ExperimentResult) -> Section:
    items = [("hash", f"`{result.digest}`", ""), *((note.name, note.value, note.meaning) for note in result.notes)]
    blocks: list[Block] = [Definitions(items=items)]
    if not result.on_task:
        text = (
            "Corpus statistics that published work relates to the effect of a mechanism. They do not affect verdicts."
        )
        blocks.insert(0, Note(text=text))
    name = "task" if result.on_task else "corpus"
    return Section(name="corpus", title=f"The {name}", nav=name.capitalize(), blocks=blocks)
