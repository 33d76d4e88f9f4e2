"""The report sections on rationales: how much attention is on the words that decide an answer, and what it is worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from statistics import fmean

from qkflow.experiment.metrics.rationale import (
    MetricChange,
    MetricName,
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
from qkflow.report.figures import Line, PlotlyFigure, annotation, label, line_chart, rule, strip_chart
from qkflow.report.sections import (
    Block,
    ColoredText,
    Column,
    Definitions,
    Figure,
    Note,
    Section,
    Table,
    number_column,
    text_column,
    verdict_column,
)

MAX_EXAMPLES = 6
MAX_POINTS = 60
"""Evaluations in the table of the training path; more are thinned evenly."""
_BETTER = {"higher": "Higher is better.", "lower": "Lower is better.", "neither": ""}
_DIGITS = {"percent": 2, "tokens": 2, "": 3}


def facts(result: RationaleSummary) -> list[tuple[str, str]]:
    """The settings of the study."""
    counts = f"{format_integer(result.instances)}, {format_integer(result.with_rationale)} with a rationale"
    return [
        ("task", f"{shorten(result.task, 60)} ({result.digest[:12]})"),
        ("output", "a class" if result.kind == "classification" else "text"),
        ("test instances", counts),
        ("layers pooled by", result.pooling),
        ("tau", f"{result.tau:g}"),
        ("deleted words", format_percent(result.fraction, 0)),
    ]


def sections(result: RationaleSummary) -> list[Section]:
    """Metrics, training path, attention confidence, seeds, examples and the published table."""
    return [
        _metric_section(result),
        _path_section(result),
        _confidence_section(result),
        _seed_section(result),
        _example_section(result),
        *_published_section(result),
        *_kind_section(result),
    ]


def task_section(result: RationaleSummary) -> Section:
    """Hash, deletions, skipped instances and notes of the task."""
    deleted = f"the {format_percent(result.fraction, 0)} of the words with the most attention, at least one"
    items = [
        ("hash", f"`{result.digest}`", ""),
        ("deleted for faithfulness", "", deleted),
        *(("skipped", format_integer(count), reason) for reason, count in result.skipped.items()),
        *(("note", "", note) for note in result.notes),
    ]
    return Section(name="task", title="The task", nav="Task", blocks=[Definitions(items=items)])


def _metric_section(result: RationaleSummary) -> Section:
    text = (
        "The difference is to the first arm. “better” and “worse” mean that the p value of this metric is below"
        f" {100 * (1 - result.level):.3g}% after Holm's correction over the arms; otherwise the study is undecided."
    )
    meanings = [(arm.name, "", arm.description) for arm in result.arms]
    meanings += [(_title(one), "", f"{one.description} {_BETTER[one.better]}".strip()) for one in result.metrics]
    blocks = [metric_table(result), change_table(result), Note(text=text), Definitions(items=meanings)]
    return Section(name="arms", title="Metrics of each arm", nav="Metrics", blocks=blocks)


def metric_table(result: RationaleSummary) -> Table:
    """The metrics of each arm: means over test instances and seeds."""
    return Table(
        caption="Means over test instances and seeds",
        columns=[text_column("arm"), *map(_metric_column, result.metrics)],
        rows=[(arm.name, *(arm.readings[metric.name].mean for metric in result.metrics)) for arm in result.arms],
        terminal=["arm", *(metric.name for metric in result.metrics if metric.name != "gradient")],
    )


def change_table(result: RationaleSummary) -> Table:
    """The difference of each arm to the first in every metric, paired by seed and by instance."""
    metrics: dict[str, RationaleMetric] = {metric.name: metric for metric in result.metrics}
    rows = []
    for arm in result.arms[1:]:
        for metric in result.metrics:
            if (change := result.change(arm.name, metric.name)) is not None:
                name = metric.name
                kind = None if metric.better == "neither" else decision(metric, change, result.level) or "undecided"
                rows.append((arm.name, name, name, change.mean, change.low, change.high, change.p, change.p_holm, kind))
    return Table(
        caption=f"Differences to {result.arms[0].name if result.arms else 'the baseline'}, paired by seed and instance",
        columns=[
            text_column("arm"),
            Column(title="metric", keys=("metric",), is_text=True, format=lambda name: _title(metrics[name])),
            Column(
                title=f"difference ({100 * result.level:.4g}% interval)",
                keys=("unit", "difference", "low", "high"),
                format=lambda name, *ends: _format_change(metrics[name], *ends),
            ),
            number_column("p", "p", format_p_value),
            number_column("p (Holm)", "p_holm", format_p_value),
            verdict_column(),
        ],
        rows=rows,
        name="comparisons",
        terminal=("arm", "metric", "unit", "p_holm", "verdict"),
    )


def decision(metric: RationaleMetric, change: MetricChange, level: float) -> str:
    """`better` or `worse` if the difference is significant after Holm's correction, else empty."""
    if metric.better == "neither" or change.p_holm is None or change.p_holm >= 1 - level:
        return ""
    return "better" if (change.mean > 0) == (metric.better == "higher") else "worse"


def _path_section(result: RationaleSummary) -> Section:
    caption = (
        "On validation instances. Thin lines: seeds. Bold lines: their mean. At the same loss, an arm that is"
        " higher puts more attention on the rationale."
    )
    empty = "No run has been evaluated yet."
    figure = Figure(name="path", caption=caption, charts={"": path_chart(result)}, has_arm_buttons=True, empty=empty)
    blocks = [figure, _equal_loss(result), path_table(result)]
    return Section(name="training", title="Attention during training", nav="Training", blocks=blocks)


def path_chart(result: RationaleSummary) -> PlotlyFigure:
    """Attention on the rationale against the loss: thin lines for seeds, a bold one for their mean."""
    mass, lines = _metric(result, "mass"), []
    scale, title = _scale(mass), label(_title(mass))
    for n, arm in enumerate(result.arms):
        seeds = [[point for point in path if _is_drawable(point)] for path in arm.paths]
        if mean := mean_path(arm):
            lines.append(
                Line(
                    arm=n,
                    name=arm.name,
                    x=[point.loss for point in mean],
                    y=[scale * point.mass for point in mean],
                    text=[f"step {p.step:,}: loss {p.loss:.4g}, {title} {_format(mass, p.mass)}" for p in mean],
                    hover="%{text}",
                    seeds=[([p.loss for p in path], [scale * p.mass for p in path]) for path in seeds],
                )
            )
    losses = [loss for line in lines for x, _ in line.seeds for loss in x]
    span = max(losses) / min(losses) if losses else 1.0
    ticks = {"dtick": 1} if span > 1000 else {"dtick": "D2"} if span > 4 else {"nticks": 5}  # enough space on a phone
    x_title = {"text": "validation loss, nats (later is right)"}
    figure = line_chart(
        lines,
        x_axis={"title": x_title, "type": "log", "autorange": "reversed", "tickformat": "~g", **ticks},
        y_axis={"title": {"text": f"attention on the rationale{', %' if scale > 1 else ''}"}, "rangemode": "tozero"},
    )
    if result.equal_loss is not None and result.equal_loss > 0 and lines:
        figure["layout"] |= _marked(result.equal_loss, "equal loss", math.log10(result.equal_loss))
    return figure


def mean_path(arm: RationaleArm) -> list[TrainingPoint]:
    """Average the n-th evaluations of all seeds; losses by their geometric mean, for a logarithmic axis."""
    means = []
    for n in range(max(map(len, arm.paths), default=0)):
        if points := [path[n] for path in arm.paths if n < len(path) and _is_drawable(path[n])]:
            means.append(
                TrainingPoint(
                    step=round(fmean(point.step for point in points)),
                    loss=math.exp(fmean(math.log(point.loss) for point in points)),
                    mass=fmean(point.mass for point in points),
                    performance=fmean(point.performance for point in points),
                )
            )
    return means


def _is_drawable(point: TrainingPoint) -> bool:
    return math.isfinite(point.loss) and point.loss > 0 and math.isfinite(point.mass)


def _equal_loss(result: RationaleSummary) -> Block:
    """The mass at a loss that every run has passed."""
    arms = [(arm.name, arm.at_equal_loss) for arm in result.arms if arm.at_equal_loss is not None]
    if result.equal_loss is None or not arms:
        return Note(text="There is no loss that every finished run has passed.")
    mass = _metric(result, "mass")
    each = Column(
        title="each seed",
        keys=("by_seed",),
        is_text=True,
        format=lambda values: ", ".join(_format(mass, value) for value in values),
    )
    return Table(
        caption=f"Mass on the rationale at a validation loss of {result.equal_loss:.4g} nats, which every run passed",
        columns=[text_column("arm"), _metric_column(mass), each],
        rows=[(name, summary.mean, summary.by_seed) for name, summary in arms],
        terminal=("arm", "mass"),
    )


def path_table(result: RationaleSummary) -> Table:
    """Loss, mass and performance at each evaluation: means over seeds."""
    performance = _metric(result, "performance")
    title = _title(performance) if result.kind == "classification" else "first word correct (%)"
    return Table(
        caption="During training: means over seeds",
        columns=[
            text_column("arm"),
            number_column("step", "step", format_integer),
            number_column("validation loss, nats", "loss", format_number),
            _metric_column(_metric(result, "mass")),
            number_column(title, "performance", partial(_format, performance)),
        ],
        rows=[
            (arm.name, point.step, point.loss, point.mass, point.performance)
            for arm in result.arms
            for point in thin(mean_path(arm))
        ],
        summary="Training as a table",
    )


def thin(points: Sequence[TrainingPoint]) -> Sequence[TrainingPoint]:
    """Keep at most `MAX_POINTS`, evenly spaced, the last among them."""
    step = -(-len(points) // MAX_POINTS) or 1
    return points[(len(points) - 1) % step :: step]


def _confidence_section(result: RationaleSummary) -> Section:
    figure = Figure(
        name="curve",
        caption=(
            "The fraction of test instances with at least tau of their attention on the rationale. The area under a"
            " curve is the mean mass."
        ),
        charts={"": _confidence_chart(result)},
        has_arm_buttons=True,
        empty="No finished run has instances with a rationale.",
    )
    curves = [dict(arm.curve) for arm in result.arms]
    taus = sorted({tau for curve in curves for tau in curve})
    table = Table(
        caption="AC(tau): test instances with at least tau of their attention on the rationale, %",
        columns=[
            number_column("tau", "tau", "{:.3g}".format),
            *(number_column(arm.name, f"arm {n}", _format_percent) for n, arm in enumerate(result.arms)),
        ],
        rows=[(tau, *(curve.get(tau) for curve in curves)) for tau in taus],
        summary="AC as a table",
    )
    return Section(name="confidence", title="Attention confidence", nav="Confidence", blocks=[figure, table])


def _confidence_chart(result: RationaleSummary) -> PlotlyFigure:
    """AC(tau) of each arm."""
    lines = []
    for n, arm in enumerate(result.arms):
        if curve := [(tau, 100 * fraction) for tau, fraction in arm.curve if math.isfinite(fraction)]:
            x, y = zip(*curve, strict=True)
            lines.append(Line(arm=n, name=arm.name, x=x, y=y, hover="tau %{x:.2f}: %{y:.1f}%"))
    figure = line_chart(
        lines,
        x_axis={"title": {"text": "tau"}, "range": [0, 1]},
        y_axis={"title": {"text": "AC(tau), % of instances"}, "range": [0, 103]},
    )
    if lines:
        figure["layout"] |= _marked(result.tau, f"tau = {result.tau:g}", result.tau)
    return figure


def _marked(x: float, text: str, position: float) -> PlotlyFigure:
    """A vertical line with its label; on a logarithmic axis the label's position is the exponent."""
    line = {**rule("x", x, width=1.5, dash="4px,3px"), "layer": "above"}
    return {"shapes": [line], "annotations": [annotation(text, {"x": position, "y": 1, "yref": "paper"})]}


def _seed_section(result: RationaleSummary) -> Section:
    rate = number_column("learning rate", "lr", lambda value: "" if value is None else f"{value:g}", is_setting=True)
    runs = Table(
        caption="Every run: means over test instances",
        columns=[text_column("arm"), number_column("seed", "seed"), rate, *map(_metric_column, result.metrics)],
        rows=[
            (arm.name, seed, arm.lr, *(_of_seed(arm, metric.name, n) for metric in result.metrics))
            for arm in result.arms
            for n, seed in enumerate(arm.seeds)
        ],
        name="runs",
        summary="Every run as a table",
    )
    caption = "Every run; lines connect the runs of a seed, and the tall mark is the mean."
    mass, performance = metric_strips(result, "mass"), metric_strips(result, "performance")
    blocks = [
        Figure(name="strips-mass", caption=caption, charts={"": mass}, empty="No run is finished yet."),
        Figure(name="strips-performance", caption="The performance of the same runs.", charts={"": performance}),
        runs,
    ]
    return Section(name="seeds", title="Variation between seeds", nav="Seeds", blocks=blocks)


def metric_strips(result: RationaleSummary, name: MetricName) -> PlotlyFigure:
    """A metric of every run."""
    metric, arms = _metric(result, name), {}
    for arm in result.arms:
        values = {seed: _of_seed(arm, name, index) for index, seed in enumerate(arm.seeds)}
        arms[arm.name] = {seed: _scale(metric) * x for seed, x in values.items() if x is not None and math.isfinite(x)}
    return strip_chart(arms, label(_title(metric), 60))


def _of_seed(arm: RationaleArm, name: MetricName, index: int) -> float | None:
    by_seed = arm.readings[name].by_seed
    return by_seed[index] if index < len(by_seed) else None


def _example_section(result: RationaleSummary) -> Section:
    text = (
        "Test instances and the models of one seed. Colour: the share of each word in the attention of the last word,"
        f" layers pooled by {result.pooling}; each example has its own scale. Underlined: the rationale. Point at a"
        " word to see its share."
    )
    blocks: list[Block] = [Note(text=text)]
    for n, example in enumerate(result.examples[:MAX_EXAMPLES], start=1):
        rationale = ", ".join(example.words[index] for index in example.rationale)
        because = f"; rationale: {shorten(rationale, 120)}" if rationale else ""
        lines = color_lines(example.words, example.attention, example.predicted, marked=example.rationale)
        models = [
            number_column(name, f"model {index}", partial(format_number, digits=3))
            for index, name in enumerate(example.attention)
        ]
        rows = [
            (f"{index + 1} {word}", "yes" if index in example.rationale else "", *shares)
            for index, (word, *shares) in enumerate(zip(example.words, *example.attention.values(), strict=True))
        ]
        blocks += [
            Note(text=f"Example {n}", style="heading"),
            Note(text=f"Correct answer: {example.answer}{because}."),
            ColoredText(caption=f"Example {n}", name_title="model", end_title="prediction", lines=lines),
            Table(
                caption=f"Example {n}: the share of each word in the attention of the last word",
                columns=[text_column("word"), text_column("rationale"), *models],
                rows=rows,
                summary=f"Example {n} as a table",
            ),
        ]
    if not result.examples:
        reason = "No run is finished yet."
        if result.finished:
            reason = "No examples: the texts of this task may not be shown, or no seed has finished in every arm."
        blocks = [Note(text=reason, style="plain")]
    return Section(name="examples", title="Examples", nav="Examples", blocks=blocks)


def _published_section(result: RationaleSummary) -> list[Section]:
    if not result.published:
        return []
    names: tuple[MetricName, ...] = ("performance", "confident", "comprehensiveness")
    table = Table(
        caption="Published results on this task and this study's",
        columns=[
            text_column("source"),
            text_column("arm"),
            number_column("performance (%)", "performance", _format_percent),
            number_column(f"AC({result.tau:g}) (%)", "confident", _format_percent),
            number_column("comprehensiveness", "comprehensiveness", partial(format_number, digits=3)),
        ],
        rows=[
            *(("published", arm, a / 100, b / 100, c) for arm, a, b, c in result.published),
            *(("this study", arm.name, *(arm.readings[name].mean for name in names)) for arm in result.arms),
        ],
        terminal=("source", "arm", *names),
    )
    text = (
        "Data, models and definitions differ: the published arms also speed up other parameters, and the paper does not"
        " define its attention confidence. Only the direction of the effects can be compared."
    )
    blocks = [table, Note(text=text)]
    return [Section(name="published", title="Comparison with the paper", nav="Published", blocks=blocks)]


def _kind_section(result: RationaleSummary) -> list[Section]:
    """The metrics of each arm by kind of instance, if the task has kinds."""
    kinds = dict.fromkeys(kind for arm in result.arms for kind in arm.by_kind)
    measured = {name for arm in result.arms for metrics in arm.by_kind.values() for name in metrics}
    metrics = [metric for metric in result.metrics if metric.name in measured]
    if not kinds:
        return []
    table = Table(
        caption="Metrics by kind of instance",
        columns=[text_column("kind"), text_column("arm"), *map(_metric_column, metrics)],
        rows=[
            (kind, arm.name, *(arm.by_kind[kind].get(metric.name) for metric in metrics))
            for kind in kinds
            for arm in result.arms
            if kind in arm.by_kind
        ],
        summary="Every kind as a table",
    )
    return [Section(name="kinds", title="Kinds of instances", nav="Kinds", blocks=[table])]


def _metric(result: RationaleSummary, name: MetricName) -> RationaleMetric:
    return next(metric for metric in result.metrics if metric.name == name)


def _metric_column(metric: RationaleMetric) -> Column:
    return number_column(_title(metric), metric.name, partial(_format, metric))


def _title(metric: RationaleMetric) -> str:
    return f"{metric.title} (%)" if metric.unit == "percent" else metric.title


def _scale(metric: RationaleMetric) -> float:
    return 100.0 if metric.unit == "percent" else 1.0


def _format(metric: RationaleMetric, value: float | None) -> str:
    return format_number(None if value is None else _scale(metric) * value, _DIGITS[metric.unit])


def _format_change(metric: RationaleMetric, *ends: float | None) -> str:
    mean, low, high = (None if end is None else _scale(metric) * end for end in ends)
    return format_difference(mean, low, high, _DIGITS[metric.unit])


def _format_percent(value: float | None) -> str:
    return format_number(None if value is None else 100 * value, 2)
