"""The tables of a study of sharper attention, once: the page and the terminal show the same rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
from qkflow.report.rows import Table
from qkflow.report.wording import MISSING, count, fixed, interval, probability, signed

BEFORE = "before training"
"""The name of the models as they begin, among the models of an example."""
MOST_POINTS = 60
"""Moments of training in the table beside the figure; more are thinned evenly."""


def written(metric: RationaleMetric, value: float | None) -> str:
    """A metric's value in its unit, which the column's head names.

    >>> mass = RationaleMetric(name="mass", title="mass", unit="percent", better="higher", told="")
    >>> written(mass, 0.4167), written(mass, None)
    ('41.67', '–')
    """
    return fixed(None if value is None else value * scale(metric), _digits(metric))


def differing(metric: RationaleMetric, value: float | None) -> str:
    """A difference of a metric, with its sign, in the same unit."""
    return signed(None if value is None else value * scale(metric), _digits(metric))


def within(metric: RationaleMetric, change: MetricChange) -> str:
    """The interval of a difference."""
    if change.low is None or change.high is None:
        return "no interval"
    return interval(change.low * scale(metric), change.high * scale(metric), _digits(metric))


def head(metric: RationaleMetric) -> str:
    """A metric's title with its unit.

    >>> head(RationaleMetric(name="mass", title="mass", unit="percent", better="higher", told=""))
    'mass, %'
    """
    return f"{metric.title}, %" if metric.unit == "percent" else metric.title


def metric_named(found: RationaleSummary, name: MetricName) -> RationaleMetric:
    """A metric of the study; one that it does not report is a plain number of that name."""
    plain = RationaleMetric(name=name, title=name, unit="", better="neither", told="")
    return next((metric for metric in found.metrics if metric.name == name), plain)


def decided(metric: RationaleMetric, change: MetricChange, level: float) -> str:
    """Whether a change is `better` or `worse` at the study's level after Holm's correction; else nothing."""
    if metric.better == "neither" or change.p_holm is None or change.p_holm >= 1 - level:
        return ""
    return "better" if (change.mean > 0) == (metric.better == "higher") else "worse"


def readings(found: RationaleSummary) -> Table:
    """Each arm's metrics."""
    rows = [(arm.name, *(written(metric, _mean(arm, metric)) for metric in found.metrics)) for arm in found.arms]
    return Table(caption="What each arm comes to", columns=("arm", *map(head, found.metrics)), rows=tuple(rows))


def changes(found: RationaleSummary) -> Table:
    """Every paired difference with its interval and both p values."""
    rows = [
        (
            arm.name,
            head(metric),
            differing(metric, change.mean),
            within(metric, change),
            probability(change.p),
            probability(change.p_holm),
            decided(metric, change, found.level) or MISSING,
        )
        for arm in found.arms[1:]
        for metric in found.metrics
        if (change := found.change(arm.name, metric.name)) is not None
    ]
    return Table(
        caption=f"Differences to {_baseline(found)}, paired by seed and by instance",
        columns=("arm", "metric", "difference", f"{100 * found.level:.4g} % interval", "p", "p (Holm)", "decided"),
        rows=tuple(rows),
        words=(0, 1, 6),
    )


def seeds(found: RationaleSummary) -> Table:
    """Every finished run."""
    rows = []
    for arm in found.arms:
        for place, seed in enumerate(arm.seeds):
            cells = [written(metric, _at(arm.readings.get(metric.name), place)) for metric in found.metrics]
            rows.append((arm.name, f"{seed}", *cells))
    columns = ("arm", "seed", *map(head, found.metrics))
    return Table(caption="Every run: means over test instances", columns=columns, rows=tuple(rows))


def equal_loss(found: RationaleSummary) -> Table | None:
    """The mass where every run has the same loss; None where there is no such loss."""
    if found.equal_loss is None or not any(arm.at_equal_loss for arm in found.arms):
        return None
    mass, rows = metric_named(found, "mass"), []
    for arm in found.arms:
        there = arm.at_equal_loss
        each = ", ".join(written(mass, value) for value in there.by_seed) if there else ""
        rows.append((arm.name, written(mass, _of(there)), each or MISSING))
    caption = f"Mass on the rationale at a validation loss of {found.equal_loss:.4g} nats, which every run has passed"
    return Table(caption=caption, columns=("arm", head(mass), "each seed"), rows=tuple(rows), words=(0, 2))


def paths(found: RationaleSummary) -> Table:
    """Training as the figure draws it: means over seeds at each evaluation."""
    mass, performance = metric_named(found, "mass"), metric_named(found, "performance")
    rows = [
        (
            arm.name,
            count(point.step),
            fixed(point.loss),
            written(mass, point.mass),
            written(performance, point.performance),
        )
        for arm in found.arms
        for point in thinned(mean_path(arm))
    ]
    right = head(performance) if found.kind == "classification" else "first word right, %"
    columns = ("arm", "step", "validation loss, nats", head(mass), right)
    return Table(caption="Along training: means over seeds", columns=columns, rows=tuple(rows))


def mean_path(arm: RationaleArm) -> list[TrainingPoint]:
    """The n-th evaluations of all seeds as one point: losses by their geometric mean, as a log axis shows them."""
    made = []
    for number in range(max((len(path) for path in arm.paths), default=0)):
        at = [path[number] for path in arm.paths if number < len(path) and drawable(path[number])]
        if at:
            made.append(
                TrainingPoint(
                    step=round(_average([point.step for point in at])),
                    loss=math.exp(_average([math.log(point.loss) for point in at])),
                    mass=_average([point.mass for point in at]),
                    performance=_average([point.performance for point in at]),
                )
            )
    return made


def drawable(point: TrainingPoint) -> bool:
    """Whether a point has a place on a log axis of losses."""
    return math.isfinite(point.loss) and point.loss > 0 and math.isfinite(point.mass)


def thinned(points: Sequence[TrainingPoint]) -> list[TrainingPoint]:
    """At most `MOST_POINTS` of them, evenly, the last among them."""
    step = -(-len(points) // MOST_POINTS) or 1
    return [point for number, point in enumerate(points) if (len(points) - 1 - number) % step == 0]


def curve(found: RationaleSummary) -> Table:
    """AC at every tau."""
    taus = sorted({tau for arm in found.arms for tau, _ in arm.curve})
    known = [dict(arm.curve) for arm in found.arms]
    rows = [(f"{tau:.3g}", *(fixed(_percent(own.get(tau)), 2) for own in known)) for tau in taus]
    caption = "AC(tau): instances with at least tau of the attention on their rationale, %"
    return Table(caption=caption, columns=("tau", *(arm.name for arm in found.arms)), rows=tuple(rows), words=())


def example(found: RationaleSummary, number: int) -> Table:
    """The shares of one example's words under every model."""
    one = found.examples[number]
    names = models(found, one)
    rows = [
        (f"{place + 1} {word}", "yes" if place in one.rationale else "", *(_share(one, name, place) for name in names))
        for place, word in enumerate(one.words)
    ]
    caption = f"Example {number + 1}: the share of each word in the attention of the last"
    return Table(caption=caption, columns=("word", "rationale", *names), rows=tuple(rows), words=(0, 1))


def models(found: RationaleSummary, one: AttentionExample) -> list[str]:
    """The models that read an example: as they began, the arms in their order, then whoever else did."""
    order = [BEFORE, *(arm.name for arm in found.arms)]
    return [name for name in order if name in one.attention] + [name for name in one.attention if name not in order]


def published(found: RationaleSummary) -> Table | None:
    """The paper's rows, and ours beside them; None where it has none for the task."""
    if not found.published:
        return None
    rows = [
        ("published", name, fixed(performance, 2), fixed(confident, 2), fixed(comprehensiveness, 3))
        for name, performance, confident, comprehensiveness in found.published
    ]
    for arm in found.arms:
        ours = {name: _of(arm.readings.get(name)) for name in ("performance", "confident", "comprehensiveness")}
        cells = fixed(_percent(ours["performance"]), 2), fixed(_percent(ours["confident"]), 2)
        rows.append(("here", arm.name, *cells, fixed(ours["comprehensiveness"], 3)))
    columns = ("whose", "arm", "performance, %", f"AC({found.tau:g}), %", "comprehensiveness")
    return Table(caption="The paper's table for this task, and ours", columns=columns, rows=tuple(rows), words=(0, 1))


def kinds(found: RationaleSummary) -> Table | None:
    """Each arm's metrics by kind of instance; None where the task has no kinds."""
    names = list(dict.fromkeys(kind for arm in found.arms for kind in arm.by_kind))
    shown = [
        metric for metric in found.metrics if any(metric.name in one for a in found.arms for one in a.by_kind.values())
    ]
    rows = [
        (kind, arm.name, *(written(metric, arm.by_kind[kind].get(metric.name)) for metric in shown))
        for kind in names
        for arm in found.arms
        if kind in arm.by_kind
    ]
    columns = ("kind", "arm", *map(head, shown))
    return Table(caption="By kind of instance", columns=columns, rows=tuple(rows), words=(0, 1)) if rows else None


def tuning(found: RationaleSummary) -> Table | None:
    """What each learning rate came to; None where there was nothing to choose."""
    rates = sorted({rate for arm in found.arms for rate in arm.tried})
    if not rates:
        return None
    rows = []
    for arm in found.arms:
        cells = [MISSING if rate not in arm.tried else _loss(arm.tried[rate]) for rate in rates]
        rows.append((arm.name, MISSING if arm.lr is None else f"{arm.lr:g}", *cells))
    columns = ("arm", "chosen", *(f"{rate:g}" for rate in rates))
    caption = "Learning rates tried, and the validation loss they came to, nats"
    return Table(caption=caption, columns=columns, rows=tuple(rows))


def _loss(value: float | None) -> str:
    return "failed" if value is None or not math.isfinite(value) else fixed(value)


def _share(one: AttentionExample, name: str, place: int) -> str:
    shares = one.attention[name]
    return fixed(shares[place] if place < len(shares) else None, 3)


def _baseline(found: RationaleSummary) -> str:
    return found.arms[0].name if found.arms else "the baseline"


def _mean(arm: RationaleArm, metric: RationaleMetric) -> float | None:
    return _of(arm.readings.get(metric.name))


def _of(reading: MetricSummary | None) -> float | None:
    return None if reading is None else reading.mean


def _at(reading: MetricSummary | None, place: int) -> float | None:
    return None if reading is None or place >= len(reading.by_seed) else reading.by_seed[place]


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _average(values: Sequence[int] | Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def scale(metric: RationaleMetric) -> float:
    """What a metric's numbers are shown times."""
    return 100.0 if metric.unit == "percent" else 1.0


def _digits(metric: RationaleMetric) -> int:
    return {"percent": 2, "tokens": 2, "": 3}[metric.unit]
