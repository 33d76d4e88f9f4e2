"""The numbers of a test instance that a study of sharper attention reports."""

from __future__ import annotations

from qkflow.data.tasks import Task
from qkflow.experiment.metrics.rationale import RationaleMetric


def metrics_of(task: Task, tau: float) -> tuple[RationaleMetric, ...]:
    """The metrics of a task, in the order of a table's columns."""
    writes = task.kind == "generation"
    return (
        RationaleMetric(
            name="performance",
            title="F1" if writes else "accuracy",
            unit="percent",
            better="higher",
            told="Overlap of the answer written with the right one, as bags of words."
            if writes
            else "The part of test instances answered rightly.",
        ),
        RationaleMetric(
            name="mass",
            title="mass",
            unit="percent",
            better="higher",
            told="Attention of the last token on the words that the answer rests on.",
        ),
        RationaleMetric(
            name="confident",
            title=f"AC({tau:g})",
            unit="percent",
            better="higher",
            told=f"The part of test instances with a mass of at least {tau:g} on those words.",
        ),
        RationaleMetric(
            name="comprehensiveness",
            title="comprehensiveness",
            unit="",
            better="higher",
            told="What the answer's probability loses when the words attended to most are deleted.",
        ),
        RationaleMetric(
            name="sufficiency",
            title="sufficiency",
            unit="",
            better="lower",
            told="What it loses when all other words are deleted.",
        ),
        RationaleMetric(
            name="random",
            title="random words",
            unit="",
            better="neither",
            told="Comprehensiveness of words drawn at random: the floor.",
        ),
        RationaleMetric(
            name="gradient",
            title="gradient's words",
            unit="",
            better="neither",
            told="Comprehensiveness of the words that the gradient names: a yardstick.",
        ),
        RationaleMetric(
            name="effective",
            title="effective tokens",
            unit="tokens",
            better="neither",
            told="As many tokens, attended to evenly, would have the same entropy.",
        ),
    )
