"""All that a study has found, as plain data: what the page, the terminal, the CSV and the JSON show.

Derived from the study's folder alone, and can be made again at any time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qkflow.experiment.metrics.recall import RecallSummary
from qkflow.experiment.stats.curves import CostRatio, Curve
from qkflow.experiment.stats.paired import Difference, SpreadRatio
from qkflow.experiment.stats.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class CorpusNote:
    """Something measured on the corpus: context for a verdict, never a part of it."""

    name: str
    """What was measured, e.g. `vocabulary growth`."""
    value: str
    """The figure, with its unit."""
    meaning: str
    """How to read it, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class ArmSummary:
    """One arm: its shape, its cost, its runs."""

    name: str
    """As it was asked for, e.g. `differential:window=64`."""
    parameters: int
    parameters_off: float
    """Parameters over the baseline's, minus one: what matching left."""
    hidden: int
    """The feed-forward width that matching chose."""
    flops_per_token: int
    """Of one forward pass at the context's length; training costs three times as much."""
    steps: int
    tokens: int
    """Tokens of each run."""
    learning_rate: float | None
    """The rate of its runs; None while tuning has not chosen it."""
    tuning: tuple[tuple[float, float | None], ...]
    """Learning rates tried, each with the loss it came to (None: failed); empty where one rate was given."""
    seeds: tuple[int, ...]
    """Seeds whose runs are finished."""
    bits_per_byte: tuple[float, ...]
    """Their held-out loss, in the same order; bits per answer token, where the study is on a task."""
    mean: float | None
    spread: float | None
    """Standard deviation over seeds."""
    tokens_per_second: float | None
    """Median over runs, of training alone, with as many runs at a time as the study had."""
    peak_bytes: int | None
    """Memory that a run took at its peak, beyond what the process held before."""
    state_bytes: int
    """What the mechanism carries after a context's length of tokens, a sequence."""
    curves: tuple[Curve, ...]
    failures: tuple[str, ...]
    """A line for each run that failed: its seed and why."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One arm against the baseline."""

    arm: str
    difference: Difference | None
    """None where no seed has both runs."""
    p_holm: float | None
    """The p value after Holm's correction over the arms."""
    spread: SpreadRatio | None
    reach: CostRatio | None


@dataclass(frozen=True, kw_only=True)
class ExperimentResult:
    """The whole study."""

    folder: str
    corpus: str
    """Its name."""
    digest: str
    """Its hash."""
    baseline: str
    match: str
    """What the arms have in common besides parameters: tokens, flops or seconds."""
    size: str
    context: int
    margin: float
    """The equivalence margin, in bits as the losses."""
    error_rate: float
    """The rate of false `better` or `worse` over all arms that this look may have."""
    finished: int
    """Runs finished, tuning included."""
    runs: int
    """Runs planned, tuning included."""
    arms: tuple[ArmSummary, ...]
    """The baseline first."""
    comparisons: tuple[Comparison, ...]
    """Every arm but the baseline."""
    verdicts: tuple[Verdict, ...]
    """One for each comparison."""
    notes: tuple[CorpusNote, ...]
    """On the corpus."""
    remarks: tuple[str, ...]
    """What a reader must know: seeds missing, one seed only, a machine that changed."""
    design: dict[str, Any]
    """design.json, whole."""
    environment: dict[str, Any]
    """environment.json of the first run."""
    command: tuple[str, ...]
    """The command that began the study."""
    unit: str = "byte"
    """What losses are per: a byte of text, or an answer token of a task."""
    recall: RecallSummary | None = None
    """Accuracy on a task's test instances; None for text, and before a run is finished."""

    @property
    def bits(self) -> str:
        """What losses are counted in."""
        return f"bits per {self.unit}"

    @property
    def on_task(self) -> bool:
        """Whether the runs learn a task, and not a text."""
        return self.unit != "byte"
