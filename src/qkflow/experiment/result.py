"""The result of an experiment: its arms, comparisons and verdicts."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkflow.errors import UsageError
from qkflow.experiment.decisions import StudyState
from qkflow.experiment.metrics.rationale import RationaleSummary
from qkflow.experiment.metrics.recall import RecallSummary
from qkflow.experiment.stats.curves import CostRatio, Curve
from qkflow.experiment.stats.paired import Difference, SpreadRatio
from qkflow.experiment.stats.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class CorpusNote:
    """A statistic of the data: context for a verdict, never part of it."""

    name: str
    value: str
    """The number, with its unit."""
    meaning: str
    """How to read it, in one sentence."""


@dataclass(frozen=True, kw_only=True)
class ArmSummary:
    """One arm: its model, its cost and its runs."""

    name: str
    parameters: int
    parameters_off: float
    """Parameters over the baseline's, minus one."""
    hidden: int
    """The feed-forward width that matching chose."""
    flops_per_token: int
    """Of one forward pass at the context length; training costs three times as much."""
    steps: int
    tokens: int
    """Training tokens per run."""
    learning_rate: float | None
    """None until tuning has chosen it."""
    tuning: tuple[tuple[float, float | None], ...]
    """Learning rates tried, each with its final loss (None: failed); empty if there is one rate."""
    seeds: tuple[int, ...]
    """Seeds of finished runs."""
    losses: tuple[float, ...]
    """Their held-out losses, in bits per unit of the data (`ExperimentResult.unit`)."""
    mean: float | None
    spread: float | None
    """Standard deviation over seeds."""
    tokens_per_second: float | None
    """Training speed, median over runs, with all concurrent runs."""
    peak_bytes: int | None
    """Peak memory per run, beyond what the process held before."""
    state_bytes: int
    """Size of the mechanism's state after one context length, per sequence."""
    curves: tuple[Curve, ...]
    failures: tuple[str, ...]
    """One line per failed run: its seed and the reason."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One arm against the baseline."""

    arm: str
    difference: Difference | None
    """None if no seed has finished runs of both."""
    p_adjusted: float | None
    """The p value adjusted over the arms."""
    spread: SpreadRatio | None
    reach: CostRatio | None


@dataclass(frozen=True, kw_only=True)
class ExperimentResult:
    """The result of an experiment."""

    folder: str
    data: str
    """The name of the corpus or task."""
    digest: str
    """The hash of the data."""
    baseline: str
    match: str
    """What the arms share besides parameters: tokens, flops or seconds."""
    size: str
    context: int
    margin: float
    """The equivalence margin, in bits."""
    error_rate: float
    """The rate of false positives over all arms that this look may have."""
    finished: int
    """Finished runs, tuning included."""
    runs: int
    """All runs, tuning included."""
    arms: tuple[ArmSummary, ...]
    """The baseline first."""
    comparisons: tuple[Comparison, ...]
    """Every arm but the baseline."""
    verdicts: tuple[Verdict, ...]
    """One per comparison."""
    notes: tuple[CorpusNote, ...]
    """Statistics of the data."""
    remarks: tuple[str, ...]
    """What a reader must know: missing seeds, a single seed, different machines."""
    design: dict[str, Any]
    """The content of design.json."""
    environment: dict[str, Any]
    """environment.json of the first run."""
    command: tuple[str, ...]
    """The command that started the experiment."""
    state: StudyState
    """How far the study is."""
    unit: str = "byte"
    """What losses are per."""
    recall: RecallSummary | None = None
    """Accuracy on the test instances of a recall task; None for text, and before a run is finished."""
    rationale: RationaleSummary | None = None
    """Attention on the rationales of a task; None if it was not measured. There are no verdicts on the loss then: the
    validation instances chose the learning rates."""

    @property
    def bits(self) -> str:
        """The unit of losses."""
        return f"bits per {self.unit}"

    @property
    def loss_name(self) -> str:
        """The name of the loss in tables, such as `bits_per_byte`."""
        return self.bits.replace(" ", "_")

    @property
    def on_task(self) -> bool:
        """Whether the runs learn a task instead of text."""
        return self.unit != "byte"

    @property
    def page(self) -> Path:
        """The report of the study."""
        return Path(self.folder) / "report.html"

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary per arm but the baseline: the verdict and its numbers."""
        arms = {arm.name: arm for arm in self.arms}
        return [
            {
                "arm": verdict.arm,
                "verdict": verdict.kind,
                self.loss_name: arms[verdict.arm].mean,
                "difference": None if verdict.difference is None else verdict.difference.mean,
                "low": None if verdict.difference is None else verdict.difference.low,
                "high": None if verdict.difference is None else verdict.difference.high,
                "p_adjusted": verdict.p_adjusted,
                "seeds": len(arms[verdict.arm].seeds),
            }
            for verdict in self.verdicts
        ]

    def to_frame(self) -> Any:
        """The `rows` as a pandas data frame; pandas must be installed."""
        try:
            import pandas
        except ImportError:
            raise UsageError("to_frame needs pandas: pip install pandas, or use rows()") from None
        return pandas.DataFrame(self.rows())

    def _repr_html_(self) -> str:
        """The table that notebooks show."""
        rows = self.rows()
        head = "".join(f"<th>{html.escape(name)}</th>" for name in (rows[0] if rows else ()))
        body = "".join(f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row.values())}</tr>" for row in rows)
        caption = f"against {html.escape(self.baseline)} on {html.escape(self.data)}"
        return f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else html.escape(str(value))
