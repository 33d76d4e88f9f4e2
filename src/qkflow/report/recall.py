"""The report section on recall: accuracy on the test instances of a task."""

from __future__ import annotations

from qkflow.experiment.metrics.recall import RecallSummary, SeedMean, places
from qkflow.formatting import MISSING, format_interval, format_number, format_signed
from qkflow.report.figures import Line, PlotlyFigure, annotation, line_chart, percent_map, rule
from qkflow.report.sections import (
    Block,
    Column,
    Figure,
    FigureGrid,
    Note,
    Section,
    Table,
    attributes,
    interval_column,
    number_column,
    text_column,
)

AXES = {"pairs": "number of pairs", "length": "length in tokens", "depth": "depth of the needle in %"}
"""Titles of the axes of a test grid."""
_POSITIONS = {"pairs": "{} pairs", "length": "{} tokens", "depth": "depth {}%"}
EQUAL = " (equal)"
"""Shown instead of an interval if all seeds have the same accuracy."""
_EPSILON = 1e-9
_SMALLEST_CHANCE = 1e-6
_MEAN, _ENDS = ("mean", "half"), ("mean", "low", "high")


def section(recall: RecallSummary) -> Section:
    """Accuracy along the first axis of the test grid, and in every cell."""
    is_by_length, level = recall.axes[0] == "length", f"{100 * recall.level:.4g}%"
    text = (
        "An answer is correct if every token of it is the most likely one. All runs answer the same test instances,"
        f" so the {level} intervals describe other seeds, not other instances. They are not corrected for the number"
        " of arms and cells. With few seeds they are rough: runs tend to learn such a task suddenly or not at all."
    )
    caption = "Mean over seeds. The band is the interval; the dotted line is chance."
    if is_by_length:
        caption += " Each point is a mean over depths."
    if is_by_length and recall.context in recall.places:
        caption += " The vertical line marks the length of the training instances."
    blocks: list[Block] = [
        Note(text=text),
        Figure(name="recall", caption=caption, charts={"": accuracy_chart(recall)}, has_arm_buttons=True),
        accuracy_table(recall),
        Note(text=f"{chance_sentence(recall)} Verdicts use the loss, not the accuracy.", in_terminal=True),
        difference_table(recall),
    ]
    if len(recall.axes) == 2:
        blocks += [
            Note(text="By length and depth", style="heading"),
            Note(text="Accuracy in percent, mean over seeds. Depth 0 is the beginning of the text."),
            FigureGrid(figures=_cell_maps(recall)),
        ]
    blocks += [cell_table(recall), run_table(recall)]
    return Section(name="recall", title="Recall", nav="Recall", blocks=blocks)


def accuracy_table(recall: RecallSummary) -> Table:
    """The accuracy of each arm over all cells and along the first axis."""
    halves = [a.half for arm in recall.arms for item in (arm.overall, *arm.along) if (a := item.accuracy) is not None]
    equal = any(half is not None and half < _EPSILON for half in halves)
    note = "; equal: the same in every seed" if equal else ""
    titles = {"all": "all"} | {f"{value:,}": position(recall.axes[0], value) for value in recall.places}
    columns = [
        Column(title=title, keys=(key, f"{key} half width"), format=format_accuracy) for key, title in titles.items()
    ]
    return Table(
        caption=f"Accuracy on the test instances in % (± {_interval(recall)} over seeds{note})",
        columns=[text_column("arm"), *columns],
        rows=[
            (arm.arm, *(v for item in (arm.overall, *arm.along) for v in attributes(item.accuracy, *_MEAN)))
            for arm in recall.arms
        ],
        terminal=["arm", *titles],
    )


def difference_table(recall: RecallSummary) -> Table:
    """The accuracy of each arm minus the baseline's, over all cells and along the first axis."""
    titles = ["all", *(position(recall.axes[0], value) for value in recall.places)]
    return Table(
        caption=f"Accuracy minus the baseline's, paired by seed, in percentage points ({_interval(recall)})",
        columns=[text_column("arm"), *(interval_column(title, title, _format_points) for title in titles)],
        rows=[
            (arm.arm, *(v for item in (arm.overall, *arm.along) for v in attributes(item.difference, *_ENDS)))
            for arm in recall.arms[1:]
        ],
    )


def cell_table(recall: RecallSummary) -> Table:
    """The accuracy of each arm in every cell of the test grid."""
    rows = []
    for arm in recall.arms:
        for cell, item in zip(recall.cells, arm.cells, strict=True):
            numbers = (*attributes(item.accuracy, *_MEAN), *attributes(item.difference, *_ENDS))
            rows.append((arm.arm, *(cell.at(axis) for axis in recall.axes), *numbers))
    return Table(
        caption=f"Accuracy in every cell of the test grid ({_interval(recall)})",
        columns=[
            text_column("arm"),
            *(number_column(AXES[axis], axis, "{:,}".format) for axis in recall.axes),
            Column(title="accuracy, %", keys=("accuracy", "half width"), format=format_accuracy),
            interval_column("minus the baseline's (interval)", "difference", _format_points),
        ],
        rows=rows,
        summary="Every cell as a table",
    )


def run_table(recall: RecallSummary) -> Table:
    """The number of correct answers of every run in every cell."""
    grid, counts = ("pairs", "length", "depth"), ("instances", "questions", "right")
    return Table(
        caption="Answers of every run",
        columns=[
            text_column("arm"),
            number_column("seed", "seed"),
            *(number_column(key, key, is_setting=True) for key in (*grid, *counts[:-1])),
            number_column("correct", counts[-1]),
        ],
        rows=[
            (arm.arm, run.seed, *attributes(cell, *grid), *attributes(tally, *counts))
            for arm in recall.arms
            for run in arm.runs
            for cell, tally in zip(recall.cells, run.tallies, strict=True)
        ],
        name="recall",
        summary="Every run as a table",
    )


def accuracy_sentence(recall: RecallSummary, arm_name: str) -> str:
    """The accuracy of an arm compared with the baseline's; empty without a finished run."""
    arm = next((arm for arm in recall.arms if arm.arm == arm_name), None)
    if arm is None or arm.overall.accuracy is None:
        return ""
    text = f"Accuracy: {_percent(arm.overall.accuracy.mean)}%"
    if (difference := arm.overall.difference) is None:
        return f"{text}."
    points = 100 * difference.mean
    direction = f"{_percent(abs(difference.mean))} points {'above' if points > 0 else 'below'}"
    interval = "one seed, no interval"
    if difference.half is not None and difference.half < _EPSILON:
        interval = f"the same in all {len(difference.seeds)} seeds"
    elif difference.low is not None and difference.high is not None:
        ends = format_interval(100 * difference.low, 100 * difference.high, 1)
        interval = f"{_interval(recall)} {ends}; {len(difference.seeds)} seeds"
    return f"{text}, {direction if abs(points) >= 0.05 else 'equal to'} {recall.arms[0].arm} ({interval})."


def chance_sentence(recall: RecallSummary) -> str:
    """The accuracy of guessing."""
    chance = max(recall.chance, _SMALLEST_CHANCE)
    return f"Guessing is correct in {'less than ' if chance > recall.chance else ''}{100 * chance:.2g}% of the cases."


def position(axis: str, value: int) -> str:
    """A position on an axis of the test grid.

    >>> position("pairs", 8), position("length", 2048), position("depth", 25), position("pairs", 1)
    ('8 pairs', '2,048 tokens', 'depth 25%', '1 pair')
    """
    text = _POSITIONS[axis].format(f"{value:,}")
    return text.removesuffix("s") if value == 1 else text


def format_accuracy(mean: float | None, half_width: float | None) -> str:
    """An accuracy in percent with half the width of its interval; equal seeds do not have an interval of width 0.

    >>> format_accuracy(0.905, 0.064), format_accuracy(0.5, None), format_accuracy(1.0, 0.0)
    ('90.5±6.4', '50.0', '100.0 (equal)')
    """
    if mean is None:
        return MISSING
    if half_width is None:
        return _percent(mean)
    return _percent(mean) + (EQUAL if half_width < _EPSILON else f"±{_percent(min(half_width, 1.0))}")


def accuracy_chart(recall: RecallSummary) -> PlotlyFigure:
    """Accuracy along the first axis, with the intervals over seeds as bands."""
    x = list(recall.places)
    lines = []
    for n, arm in enumerate(recall.arms):
        points = [(value, item.accuracy) for value, item in zip(x, arm.along, strict=True) if item.accuracy is not None]
        ends = [(value, 100 * a.low, 100 * a.high) for value, a in points if a.low is not None and a.high is not None]
        if points:
            lines.append(
                Line(
                    arm=n,
                    name=arm.arm,
                    x=[value for value, _ in points],
                    y=[round(100 * accuracy.mean, 3) for _, accuracy in points],
                    band_x=[value for value, _, _ in ends],
                    low=[low for _, low, _ in ends],
                    high=[high for _, _, high in ends],
                    text=[_hover(accuracy) for _, accuracy in points],
                    hover="%{text}",
                )
            )
    ticks = {"tickmode": "array", "tickvals": x, "ticktext": [f"{value:,}" for value in x], "minor": {"ticks": ""}}
    shapes = [rule("y", at=100 * recall.chance, dash="dot")]
    if recall.axes[0] == "length" and recall.context in x:
        shapes.append(rule("x", at=float(recall.context or 0)))
    figure = line_chart(
        lines,
        x_axis={"title": {"text": AXES[recall.axes[0]]}, **({"type": "log"} if x[0] > 0 else {}), **ticks},
        y_axis={"title": {"text": "accuracy, %"}, "range": [-2, 103]},
        hovermode="x unified",
    )
    position = {"xref": "paper", "x": 0, "xanchor": "left", "y": 100 * recall.chance}
    figure["layout"] |= {"shapes": shapes, "annotations": [annotation("chance", position)]}
    return figure


def _cell_maps(recall: RecallSummary) -> list[Figure]:
    """A heat map of all cells for each arm with finished runs: the first axis across, the second down."""
    across, down = (places(recall.cells, axis) for axis in recall.axes)
    figures = []
    for n, arm in enumerate(recall.arms):
        if arm.overall.accuracy is None:
            continue
        cells = {
            tuple(cell.at(axis) for axis in recall.axes): item.accuracy
            for cell, item in zip(recall.cells, arm.cells, strict=True)
        }
        grid = [[cells.get((x, y)) for x in across] for y in down]
        z = [[None if accuracy is None else round(100 * accuracy.mean, 3) for accuracy in row] for row in grid]
        texts = [
            [
                f"{position(recall.axes[0], x)}, {position(recall.axes[1], y)}: {_hover(cells.get((x, y)))}"
                for x in across
            ]
            for y in down
        ]
        labels = {AXES[recall.axes[0]]: [f"{x:,}" for x in across], AXES[recall.axes[1]]: [f"{y:,}" for y in down]}
        chart = percent_map(z, texts, labels)
        figures.append(Figure(name=f"recall-{n}", caption=arm.arm, charts={"": chart}))
    return figures


def _hover(accuracy: SeedMean | None) -> str:
    if accuracy is None:
        return "not measured"
    if accuracy.low is None or accuracy.high is None:
        return f"{_percent(accuracy.mean)}% (one seed)"
    ends = format_interval(100 * accuracy.low, 100 * accuracy.high, 1, signed=False)
    return f"{_percent(accuracy.mean)}% ({ends}; {len(accuracy.seeds)} seeds)"


def _format_points(mean: float | None, low: float | None, high: float | None) -> str:
    if mean is None:
        return MISSING
    text = format_signed(100 * mean, 1)
    if low is None or high is None:
        return text
    return text + (EQUAL if high - low < _EPSILON else f" ({format_interval(100 * low, 100 * high, 1)})")


def _interval(recall: RecallSummary) -> str:
    return f"{100 * recall.level:.4g}% interval"


def _percent(fraction: float) -> str:
    return format_number(100 * fraction, 1)
