"""The numbers of a test instance that a study of sharper attention reports."""

from __future__ import annotations

from qkflow.data.tasks import Task
from qkflow.experiment.sharpen.summary import Metric


def metrics_of(task: Task, tau: float) -> tuple[Metric, ...]:
    """The metrics of a task, in the order of a table's columns."""
    writes = task.kind == "generation"
    return (
        Metric(
            name="performance",
            title="F1" if writes else "accuracy",
            unit="percent",
            better="higher",
            told="Overlap of the answer written with the right one, as bags of words."
            if writes
            else "The part of test instances answered rightly.",
        ),
        Metric(
            name="mass",
            title="mass",
            unit="percent",
            better="higher",
            told="Attention of the last token on the words that the answer rests on.",
        ),
        Metric(
            name="confident",
            title=f"AC({tau:g})",
            unit="percent",
            better="higher",
            told=f"The part of test instances with a mass of at least {tau:g} on those words.",
        ),
        Metric(
            name="comprehensiveness",
            title="comprehensiveness",
            unit="",
            better="higher",
            told="What the answer's probability loses when the words attended to most are deleted.",
        ),
        Metric(
            name="sufficiency",
            title="sufficiency",
            unit="",
            better="lower",
            told="What it loses when all other words are deleted.",
        ),
        Metric(
            name="random",
            title="random words",
            unit="",
            better="neither",
            told="Comprehensiveness of words drawn at random: the floor.",
        ),
        Metric(
            name="gradient",
            title="gradient's words",
            unit="",
            better="neither",
            told="Comprehensiveness of the words that the gradient names: a yardstick.",
        ),
        Metric(
            name="effective",
            title="effective tokens",
            unit="tokens",
            better="neither",
            told="As many tokens, attended to evenly, would have the same entropy.",
        ),
    )
