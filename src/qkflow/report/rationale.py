"""The report sections on rationales: how much attention is on the words that decide an answer, and what it is worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from qkflow.experiment.metrics.rationale import (
    AttentionExample,
    MetricChange,
    MetricName,
    MetricSummary,
    RationaleArm,
    RationaleMetric,
    RationaleSummary,
    TrainingPoint,
)
from qkflow.formatting import (
    format_difference,
    format_integer,
    format_number,
    format_p_value,
    format_percent,
    shorten,
)
from qkflow.report.attention_maps import color_lines
from qkflow.report.figures import Line, PlotlyFigure, SeedValues, annotation, label, line_chart, rule, strip_chart
from qkflow.report.sections import (
    Block,
    ColoredText,
    Column,
    Definitions,
    Figure,
    Note,
    Section,
    Table,
    Value,
    number_column,
    text_column,
)

BEFORE_TRAINING = "before training"
"""The name of the untrained model among the models of an example."""
MAX_EXAMPLES = 6
MAX_POINTS = 60
"""Evaluations in the table of the training path; more are thinned evenly."""
_BETTER = {"higher": "Higher is better.", "lower": "Lower is better.", "neither": ""}
_ONLY_ON_PAGE: tuple[MetricName, ...] = ("gradient",)


def facts(result: RationaleSummary) -> list[tuple[str, str]]:
    """The settings of the study."""
    return [
        ("task", f"{shorten(result.task, 60)} ({result.digest[:12]})"),
        ("output", "a class" if result.kind == "classification" else "text"),
        (
            "test instances",
            f"{format_integer(result.instances)}, {format_integer(result.with_rationale)} with a rationale",
        ),
        ("layers pooled by", result.pooling),
        ("tau", f"{result.tau:g}"),
        ("deleted words", format_percent(result.part, 0)),
    ]


def sections(result: RationaleSummary) -> list[Section]:
    """Metrics, training path, attention confidence, seeds, examples and the published table."""
    optional = [_published_section(result), _kind_section(result)]
    return [
        _metric_section(result),
        _path_section(result),
        _confidence_section(result),
        _seed_section(result),
        _example_section(result),
        *(section for section in optional if section is not None),
    ]


def task_section(result: RationaleSummary) -> Section:
    """Hash, deletions, skipped instances and notes of the task."""
    deleted = f"the {format_percent(result.part, 0)} of the words with the most attention, at least one"
    items = [
        ("hash", f"`{result.digest}`", ""),
        ("deleted for faithfulness", "", deleted),
        *(("skipped", format_integer(count), reason) for reason, count in result.skipped.items()),
        *(("note", "", note) for note in result.notes),
    ]
    return Section(name="task", title="The task", nav="Task", blocks=(Definitions(items=tuple(items)),))


def decision(metric: RationaleMetric, change: MetricChange, level: float) -> str:
    """`better` or `worse` if the difference is significant after Holm's correction, else empty."""
    if metric.better == "neither" or change.p_holm is None or change.p_holm >= 1 - level:
        return ""
    return "better" if (change.mean > 0) == (metric.better == "higher") else "worse"


def metric_table(result: RationaleSummary) -> Table:
    """The metrics of each arm: means over test instances and seeds."""
    rows = [(arm.name, *(_mean(arm.readings.get(one.name)) for one in result.metrics)) for arm in result.arms]
    printed = [metric.name for metric in result.metrics if metric.name not in _ONLY_ON_PAGE]
    return Table(
        caption="Means over test instances and seeds",
        columns=(text_column("arm"), *map(_metric_column, result.metrics)),
        rows=tuple(rows),
        terminal=("arm", *printed),
    )


def change_table(result: RationaleSummary) -> Table:
    """The difference of each arm to the first in every metric, paired by seed and by instance."""
    metrics = {metric.name: metric for metric in result.metrics}
    rows: list[tuple[Value, ...]] = []
    for arm in result.arms[1:]:
        for metric in result.metrics:
            change = result.change(arm.name, metric.name)
            if change is not None:
                kind = None if metric.better == "neither" else decision(metric, change, result.level) or "undecided"
                numbers = (change.mean, change.low, change.high, change.p, change.p_holm)
                rows.append((arm.name, metric.name, metric.name, *numbers, kind))
    difference = Column(
        title=f"difference ({100 * result.level:.4g}% interval)",
        keys=("unit", "difference", "low", "high"),
        format=lambda name, *ends: _format_change(metrics[name], *ends),
    )
    return Table(
        caption=f"Differences to {result.arms[0].name if result.arms else 'the baseline'}, paired by seed and instance",
        columns=(
            text_column("arm"),
            Column(title="metric", keys=("metric",), is_text=True, format=lambda name: _title(metrics[name])),
            difference,
            number_column("p", "p", format_p_value),
            number_column("p (Holm)", "p_holm", format_p_value),
            Column(title="verdict", keys=("verdict",), is_text=True, style="verdict"),
        ),
        rows=tuple(rows),
        name="comparisons",
        terminal=("arm", "metric", "unit", "p_holm", "verdict"),
    )


def run_table(result: RationaleSummary) -> Table:
    """The metrics of every finished run."""
    rows = [
        (arm.name, seed, arm.lr, *(_of_seed(arm.readings.get(metric.name), n) for metric in result.metrics))
        for arm in result.arms
        for n, seed in enumerate(arm.seeds)
    ]
    rate = number_column("learning rate", "lr", lambda value: "" if value is None else f"{value:g}", is_setting=True)
    return Table(
        caption="Every run: means over test instances",
        columns=(text_column("arm"), number_column("seed", "seed"), rate, *map(_metric_column, result.metrics)),
        rows=tuple(rows),
        name="runs",
        summary="Every run as a table",
    )


def equal_loss_table(result: RationaleSummary) -> Table | None:
    """The mass at a loss that every run has passed; None without such a loss."""
    if result.equal_loss is None or not any(arm.at_equal_loss for arm in result.arms):
        return None
    mass = _metric(result, "mass")
    each = Column(title="each seed", keys=("by_seed",), is_text=True, format=partial(_format_each, mass))
    rows = [
        (arm.name, _mean(arm.at_equal_loss), arm.at_equal_loss.by_seed if arm.at_equal_loss else ())
        for arm in result.arms
    ]
    return Table(
        caption=f"Mass on the rationale at a validation loss of {result.equal_loss:.4g} nats, which every run passed",
        columns=(text_column("arm"), _metric_column(mass), each),
        rows=tuple(rows),
        terminal=("arm", "mass"),
    )


def path_table(result: RationaleSummary) -> Table:
    """Loss, mass and performance at each evaluation: means over seeds."""
    performance = _metric(result, "performance")
    title = _title(performance) if result.kind == "classification" else "first word correct (%)"
    rows = [
        (arm.name, point.step, point.loss, point.mass, point.performance)
        for arm in result.arms
        for point in thin(mean_path(arm))
    ]
    columns = (
        text_column("arm"),
        number_column("step", "step", format_integer),
        number_column("validation loss, nats", "loss", format_number),
        _metric_column(_metric(result, "mass")),
        number_column(title, "performance", partial(_format_metric, performance)),
    )
    return Table(
        caption="During training: means over seeds", columns=columns, rows=tuple(rows), summary="Training as a table"
    )


def mean_path(arm: RationaleArm) -> list[TrainingPoint]:
    """Average the n-th evaluations of all seeds; losses by their geometric mean, for a logarithmic axis."""
    path = []
    for n in range(max((len(path) for path in arm.paths), default=0)):
        points = [path[n] for path in arm.paths if n < len(path) and _is_drawable(path[n])]
        if points:
            path.append(
                TrainingPoint(
                    step=round(_average([point.step for point in points])),
                    loss=math.exp(_average([math.log(point.loss) for point in points])),
                    mass=_average([point.mass for point in points]),
                    performance=_average([point.performance for point in points]),
                )
            )
    return path


def thin(points: Sequence[TrainingPoint]) -> list[TrainingPoint]:
    """Keep at most `MAX_POINTS`, evenly spaced, the last among them."""
    step = -(-len(points) // MAX_POINTS) or 1
    return [point for n, point in enumerate(points) if (len(points) - 1 - n) % step == 0]


def path_chart(result: RationaleSummary) -> PlotlyFigure:
    """Attention on the rationale against the loss: thin lines for seeds, a bold one for their mean."""
    mass = _metric(result, "mass")
    scale, lines = _scale(mass), []
    for n, arm in enumerate(result.arms):
        seeds = [[point for point in path if _is_drawable(point)] for path in arm.paths]
        if mean := mean_path(arm):
            title = label(_title(mass))
            lines.append(
                Line(
                    arm=n,
                    name=arm.name,
                    x=[point.loss for point in mean],
                    y=[scale * point.mass for point in mean],
                    text=[f"step {p.step:,}: loss {p.loss:.4g}, {title} {_format_metric(mass, p.mass)}" for p in mean],
                    hover="%{text}",
                    seeds=[([p.loss for p in path], [scale * p.mass for p in path]) for path in seeds],
                )
            )
    losses = [loss for line in lines for x, _ in line.seeds for loss in x]
    span = max(losses) / min(losses) if losses else 1.0
    ticks = {"dtick": 1} if span > 1000 else {"dtick": "D2"} if span > 4 else {"nticks": 5}  # enough space on a phone
    title = {"text": "validation loss, nats (later is right)"}
    figure = line_chart(
        lines,
        x_axis={"title": title, "type": "log", "autorange": "reversed", "tickformat": "~g", **ticks},
        y_axis={"title": {"text": f"attention on the rationale{', %' if scale > 1 else ''}"}, "rangemode": "tozero"},
    )
    if result.equal_loss is not None and result.equal_loss > 0 and lines:
        figure["layout"] |= _marked(result.equal_loss, "equal loss", math.log10(result.equal_loss))
    return figure


def confidence_chart(result: RationaleSummary) -> PlotlyFigure:
    """AC(tau) of each arm."""
    lines = []
    for n, arm in enumerate(result.arms):
        points = [(tau, 100 * fraction) for tau, fraction in arm.curve if math.isfinite(fraction)]
        if points:
            x, y = ([point[axis] for point in points] for axis in (0, 1))
            lines.append(Line(arm=n, name=arm.name, x=x, y=y, hover="tau %{x:.2f}: %{y:.1f}%"))
    figure = line_chart(
        lines,
        x_axis={"title": {"text": "tau"}, "range": [0, 1]},
        y_axis={"title": {"text": "AC(tau), % of instances"}, "range": [0, 103]},
    )
    if lines:
        figure["layout"] |= _marked(result.tau, f"tau = {result.tau:g}", result.tau)
    return figure


def metric_strips(result: RationaleSummary, name: MetricName) -> PlotlyFigure:
    """A metric of every run."""
    metric = _metric(result, name)
    arms = []
    for n, arm in enumerate(result.arms):
        values = {seed: _of_seed(arm.readings.get(name), place) for place, seed in enumerate(arm.seeds)}
        finite = {seed: _scale(metric) * x for seed, x in values.items() if x is not None and math.isfinite(x)}
        mean = _mean(arm.readings.get(name))
        scaled = None if mean is None or not finite else _scale(metric) * mean
        arms.append(SeedValues(arm=n, name=arm.name, values=finite, mean=scaled))
    return strip_chart(arms, label(_title(metric), 60))


def _metric_section(result: RationaleSummary) -> Section:
    text = (
        "The difference is to the first arm. “better” and “worse” mean that the p value of this metric is below"
        f" {100 * (1 - result.level):.3g}% after Holm's correction over the arms; otherwise the study is undecided."
    )
    meanings = [(arm.name, "", arm.told) for arm in result.arms]
    meanings += [(_title(one), "", f"{one.told} {_BETTER[one.better]}".strip()) for one in result.metrics]
    blocks = (metric_table(result), change_table(result), Note(text=text), Definitions(items=tuple(meanings)))
    return Section(name="arms", title="Metrics of each arm", nav="Metrics", blocks=blocks)


def _path_section(result: RationaleSummary) -> Section:
    figure = Figure(
        name="path",
        caption=(
            "On validation instances. Thin lines: seeds. Bold lines: their mean. At the same loss, an arm that is"
            " higher puts more attention on the rationale."
        ),
        charts={"": path_chart(result)},
        has_arm_buttons=True,
        empty="No run has been evaluated yet.",
    )
    equal = equal_loss_table(result) or Note(text="There is no loss that every finished run has passed.")
    blocks = (figure, equal, path_table(result))
    return Section(name="training", title="Attention during training", nav="Training", blocks=blocks)


def _confidence_section(result: RationaleSummary) -> Section:
    figure = Figure(
        name="curve",
        caption=(
            "The fraction of test instances with at least tau of their attention on the rationale. The area under a"
            " curve is the mean mass."
        ),
        charts={"": confidence_chart(result)},
        has_arm_buttons=True,
        empty="No finished run has instances with a rationale.",
    )
    curves = [dict(arm.curve) for arm in result.arms]
    arms = [number_column(arm.name, f"arm {n}", _format_percent) for n, arm in enumerate(result.arms)]
    taus = sorted({tau for curve in curves for tau in curve})
    table = Table(
        caption="AC(tau): test instances with at least tau of their attention on the rationale, %",
        columns=(number_column("tau", "tau", "{:.3g}".format), *arms),
        rows=tuple((tau, *(curve.get(tau) for curve in curves)) for tau in taus),
        summary="AC as a table",
    )
    return Section(name="confidence", title="Attention confidence", nav="Confidence", blocks=(figure, table))


def _seed_section(result: RationaleSummary) -> Section:
    caption = "Every run; lines connect the runs of a seed, and the tall mark is the mean."
    mass, performance = metric_strips(result, "mass"), metric_strips(result, "performance")
    blocks = (
        Figure(name="strips-mass", caption=caption, charts={"": mass}, empty="No run is finished yet."),
        Figure(name="strips-performance", caption="The performance of the same runs.", charts={"": performance}),
        run_table(result),
    )
    return Section(name="seeds", title="Variation between seeds", nav="Seeds", blocks=blocks)


def _example_section(result: RationaleSummary) -> Section:
    text = (
        "Test instances and the models of one seed. Colour: the share of each word in the attention of the last word,"
        f" layers pooled by {result.pooling}; each example has its own scale. Underlined: the rationale. Point at a"
        " word to see its share."
    )
    blocks: list[Block] = [Note(text=text)]
    for n, example in enumerate(result.examples[:MAX_EXAMPLES], start=1):
        rationale = ", ".join(example.words[place] for place in example.rationale if place < len(example.words))
        because = f"; rationale: {shorten(rationale, 120)}" if rationale else ""
        shares = {
            name: example.attention[name]
            for name in _models(result, example)
            if len(example.attention[name]) == len(example.words)
        }
        lines = color_lines(example.words, shares, example.predicted, marked=example.rationale)
        colored = ColoredText(caption=f"Example {n}", name_title="model", end_title="prediction", lines=tuple(lines))
        blocks += [
            Note(text=f"Example {n}", style="heading"),
            Note(text=f"Correct answer: {example.answer}{because}."),
            colored,
        ]
        blocks.append(example_table(result, n))
    if not result.examples:
        reason = "No run is finished yet."
        if result.finished:
            reason = "No examples: the texts of this task may not be shown, or no seed has finished in every arm."
        blocks = [Note(text=reason, style="plain")]
    return Section(name="examples", title="Examples", nav="Examples", blocks=tuple(blocks))


def example_table(result: RationaleSummary, number: int) -> Table:
    """The attention on every word of an example (numbered from 1) under each model."""
    example = result.examples[number - 1]
    names = _models(result, example)
    rows = [
        (
            f"{place + 1} {word}",
            "yes" if place in example.rationale else "",
            *(shares[place] if place < len(shares := example.attention[name]) else None for name in names),
        )
        for place, word in enumerate(example.words)
    ]
    shares = [
        Column(title=name, keys=(f"model {n}",), format=lambda value: format_number(value, 3))
        for n, name in enumerate(names)
    ]
    return Table(
        caption=f"Example {number}: the share of each word in the attention of the last word",
        columns=(text_column("word"), text_column("rationale"), *shares),
        rows=tuple(rows),
        summary=f"Example {number} as a table",
    )


def _models(result: RationaleSummary, example: AttentionExample) -> list[str]:
    """The models of an example: before training, the arms in order, then any others."""
    order = [BEFORE_TRAINING, *(arm.name for arm in result.arms)]
    known = [name for name in order if name in example.attention]
    return known + [name for name in example.attention if name not in order]


def _published_section(result: RationaleSummary) -> Section | None:
    if not result.published:
        return None
    rows: list[tuple[Value, ...]] = [
        ("published", name, performance / 100, confident / 100, comprehensiveness)
        for name, performance, confident, comprehensiveness in result.published
    ]
    names: tuple[MetricName, ...] = ("performance", "confident", "comprehensiveness")
    rows += [("this study", arm.name, *(_mean(arm.readings.get(name)) for name in names)) for arm in result.arms]
    columns = (
        text_column("source"),
        text_column("arm"),
        number_column("performance (%)", "performance", _format_percent),
        number_column(f"AC({result.tau:g}) (%)", "confident", _format_percent),
        number_column("comprehensiveness", "comprehensiveness", lambda value: format_number(value, 3)),
    )
    keys = ("source", "arm", "performance", "confident", "comprehensiveness")
    table = Table(
        caption="Published results on this task and this study's", columns=columns, rows=tuple(rows), terminal=keys
    )
    text = (
        "Data, models and definitions differ: the published arms also speed up other parameters, and the paper does not"
        " define its attention confidence. Only the direction of the effects can be compared."
    )
    blocks = (table, Note(text=text))
    return Section(name="published", title="Comparison with the paper", nav="Published", blocks=blocks)


def _kind_section(result: RationaleSummary) -> Section | None:
    """The metrics of each arm by kind of instance; None if the task has no kinds."""
    kinds = list(dict.fromkeys(kind for arm in result.arms for kind in arm.by_kind))
    measured = {name for arm in result.arms for metrics in arm.by_kind.values() for name in metrics}
    metrics = [metric for metric in result.metrics if metric.name in measured]
    rows = [
        (kind, arm.name, *(arm.by_kind[kind].get(metric.name) for metric in metrics))
        for kind in kinds
        for arm in result.arms
        if kind in arm.by_kind
    ]
    if not rows:
        return None
    table = Table(
        caption="Metrics by kind of instance",
        columns=(text_column("kind"), text_column("arm"), *map(_metric_column, metrics)),
        rows=tuple(rows),
        summary="Every kind as a table",
    )
    return Section(name="kinds", title="Kinds of instances", nav="Kinds", blocks=(table,))


def _marked(x: float, text: str, position: float) -> PlotlyFigure:
    """A vertical line with its label; on a logarithmic axis the label's position is the exponent."""
    line = {**rule("x", x, width=1.5, dash="4px,3px"), "layer": "above"}
    return {"shapes": [line], "annotations": [annotation(text, x=position, y=1, yref="paper")]}


def _metric(result: RationaleSummary, name: MetricName) -> RationaleMetric:
    default = RationaleMetric(name=name, title=name, unit="", better="neither", told="")
    return next((metric for metric in result.metrics if metric.name == name), default)


def _metric_column(metric: RationaleMetric) -> Column:
    return number_column(_title(metric), metric.name, partial(_format_metric, metric))


def _title(metric: RationaleMetric) -> str:
    return f"{metric.title} (%)" if metric.unit == "percent" else metric.title


def _format_metric(metric: RationaleMetric, value: float | None) -> str:
    return format_number(None if value is None else _scale(metric) * value, _digits(metric))


def _format_change(metric: RationaleMetric, *ends: float | None) -> str:
    mean, low, high = (None if end is None else _scale(metric) * end for end in ends)
    return format_difference(mean, low, high, _digits(metric))


def _format_each(metric: RationaleMetric, values: Sequence[float]) -> str:
    return ", ".join(_format_metric(metric, value) for value in values)


def _scale(metric: RationaleMetric) -> float:
    return 100.0 if metric.unit == "percent" else 1.0


def _digits(metric: RationaleMetric) -> int:
    return {"percent": 2, "tokens": 2, "": 3}[metric.unit]


def _mean(reading: MetricSummary | None) -> float | None:
    return None if reading is None else reading.mean


def _of_seed(reading: MetricSummary | None, place: int) -> float | None:
    return None if reading is None or place >= len(reading.by_seed) else reading.by_seed[place]


def _is_drawable(point: TrainingPoint) -> bool:
    return math.isfinite(point.loss) and point.loss > 0 and math.isfinite(point.mass)


def _format_percent(value: float | None) -> str:
    return format_number(None if value is None else 100 * value, 2)


def _average(values: Sequence[int] | Sequence[float]) -> float:
    return math.fsum(values) / len(values)
