"""A published table, and the study that tests whether it holds here.

Papers report perplexities p = exp(loss), bits b = loss / ln 2, or a relative change c of the perplexity. All are
converted to the change of the loss in nats per token:

    ln(p_arm / p_baseline)        ln(1 + c)        (b_arm - b_baseline) ln 2
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from qkflow.data import CorpusConfig
from qkflow.errors import UsageError
from qkflow.experiment.result import ExperimentResult
from qkflow.experiment.spec import ExperimentSpec
from qkflow.experiment.stats.paired import spread_ratio
from qkflow.experiment.stats.verdict import Verdict
from qkflow.models import SIZES
from qkflow.recipes.models import match_layer, standard_config

Scale = Literal["laptop", "paper"]
Finding = Literal["better", "worse", "equivalent", "unclear"]
"""Unclear: the figures of the paper disagree."""
Bounds = tuple[float, float]
"""Lower and upper end; equal for a single figure."""

LAPTOP_CORPUS = CorpusConfig()
LAPTOP_SECONDS = 300.0
"""Budget per arm at laptop scale."""


@dataclass(frozen=True, kw_only=True)
class PublishedFigure:
    """What a paper reports for one arm.

    >>> PublishedFigure.perplexity(22.55, 22.62).text
    'perplexity 22.55 to 22.62'
    """

    text: str
    """The figures as the paper prints them."""
    loss: Bounds | None = None
    """The loss in nats per token."""
    change: Bounds | None = None
    """The change of the loss against the baseline, in nats per token, if the paper does not report the losses."""
    finding: Finding | None = None
    """The direction, if the paper reports no losses; otherwise it follows from them."""

    @classmethod
    def perplexity(cls, low: float, high: float | None = None, *, note: str = "") -> PublishedFigure:
        """A perplexity per token, or a range."""
        text = f"perplexity {low:.2f}" + (f" to {high:.2f}" if high else "") + note
        return cls(text=text, loss=(math.log(low), math.log(high or low)))

    @classmethod
    def perplexity_change(cls, change: float) -> PublishedFigure:
        """A relative change of the perplexity: -0.067 is 6.7 % less.

        >>> PublishedFigure.perplexity_change(-0.067).text
        'perplexity -6.7 %'
        """
        return cls(text=f"perplexity {100 * change:+.1f} %", change=(math.log1p(change), math.log1p(change)))

    @classmethod
    def bits_per_character(cls, bits: str, spread: str | None = None) -> PublishedFigure:
        """A loss in bits, with the digits of the paper.

        >>> PublishedFigure.bits_per_character("1.637", spread="0.010").text
        '1.637 +- 0.010 bits per character'
        """
        loss = float(bits) * math.log(2)
        return cls(text=f"{bits}{f' +- {spread}' if spread else ''} bits per character", loss=(loss, loss))

    @classmethod
    def bits_change(cls, low: float, high: float) -> PublishedFigure:
        """A range of changes of the loss, in bits per byte.

        >>> PublishedFigure.bits_change(-0.012, -0.010).text
        '-0.012 to -0.010 bits per byte'
        """
        text = f"{low:+.3f} to {high:+.3f} bits per byte"
        return cls(text=text, change=(low * math.log(2), high * math.log(2)))


@dataclass(frozen=True, kw_only=True)
class PublishedRatio:
    """A published ratio of two arms."""

    quantity: Literal["variance over seeds", "seconds per token"]
    """The variance is that of the held-out loss."""
    arm: str
    """The numerator."""
    against: str
    """The denominator."""
    published: float


@dataclass(frozen=True, kw_only=True)
class MeasuredRatio:
    """The same ratio in a study, with an interval if there is one."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One published table, and the study behind it."""

    title: str
    source: str
    """Where it was published, with an address."""
    text: str
    """The text of the published figures, as the paper calls it."""
    table: Mapping[str, PublishedFigure | None]
    """The figure for each arm; the first is the baseline, for which there may be none."""
    derived: str | None = None
    """How a figure was derived that the paper does not print."""
    unclear: str | None = None
    """What the paper leaves unclear about its figures."""
    ratios: tuple[PublishedRatio, ...] = ()
    """What was published besides the loss."""
    our_choices: str
    """What the paper leaves open at its scale and we chose, as a phrase of `ours`, such as "shape, context (512)"."""
    laptop_corpus: CorpusConfig = LAPTOP_CORPUS
    paper_corpus: CorpusConfig
    needs_corpus: bool = False
    """Whether the paper's text is not available here, so that the user must give one at paper scale."""
    size: str
    """Parameters at paper scale."""
    heads: int | None = None
    """Heads of every arm at paper scale; None: those of the size."""
    seeds: int = 3
    has_published_seeds: bool = False
    """Whether the number of seeds is the paper's, not our choice."""
    context: int = 512
    batch: int | None = None
    tokens: int = 100_000_000
    """Training tokens per run at paper scale; the default is about one pass over WikiText-103."""
    passes: float = ExperimentSpec.passes
    learning_rate: float = 3e-4

    def __post_init__(self) -> None:
        for arm in list(self.table)[1:]:  # report a contradiction before the study, not after it
            self.finding(arm)

    @property
    def baseline(self) -> str:
        """The arm that the others are compared with."""
        return next(iter(self.table))

    @property
    def ours(self) -> str:
        """A note on what is not the paper's at each scale."""
        choices = self.our_choices if self.has_published_seeds else f"{self.our_choices}, seeds ({self.seeds})"
        return (
            f"at --scale laptop everything except the arms; at --scale paper {choices}, "
            f"{self.tokens // 10**6:,}M tokens per run, schedule, learning rate ({self.learning_rate:g})"
        )

    def corpus(self, scale: Scale, source: str | None = None) -> CorpusConfig:
        """Return the corpus of a scale, or another text with the same tokens."""
        if source is None and self.needs_corpus and scale == "paper":
            raise UsageError(f"the paper's text ({self.text}) is not available: give your own copy as CORPUS")
        corpus = self.laptop_corpus if scale == "laptop" else self.paper_corpus
        return corpus if source is None else replace(corpus, source=source)

    def spec(self, scale: Scale, corpus: CorpusConfig | None = None) -> ExperimentSpec:
        """Return the study: at laptop scale whatever fits into five minutes per arm."""
        arms, corpus = tuple(self.table), corpus or self.corpus(scale)
        if scale == "laptop":
            return ExperimentSpec(data=corpus, arms=arms, budget=LAPTOP_SECONDS * len(arms))
        size, model = self.size, None
        if self.heads is not None:
            size, model = None, match_layer(standard_config(self.size), self.baseline, self.heads)
        elif self.size not in SIZES:
            size, model = None, standard_config(self.size)
        return ExperimentSpec(
            data=corpus,
            arms=arms,
            size=size,
            model=model,
            tokens=self.tokens,
            seeds=self.seeds,
            context=self.context,
            batch=self.batch,
            learning_rates=(self.learning_rate,),
            passes=self.passes,
        )

    def finding(self, arm: str) -> Finding:
        """Return the published direction of an arm against the baseline."""
        if (figure := self._figure(arm)).finding is not None:
            return figure.finding
        low, high = self.loss_change(arm) or (0.0, 0.0)
        if low <= 0 <= high:
            raise ValueError(f"{figure.text} ({arm}) has no direction against {self.baseline}: set `finding`")
        return "better" if high < 0 else "worse"

    def loss_change(self, arm: str) -> Bounds | None:
        """Return the published change of the loss in nats per token; None if there are no figures."""
        figure, baseline = self._figure(arm), self.table[self.baseline]
        if figure.loss is None or baseline is None or baseline.loss is None:
            return figure.change
        return figure.loss[0] - baseline.loss[1], figure.loss[1] - baseline.loss[0]

    def relative_change(self, arm: str) -> Bounds | None:
        """Return the published change of the loss relative to the baseline's loss: -0.01 is one percent less.

        Perplexities with different tokenizers cannot be compared; relative changes can, roughly. None if the loss of
        the baseline was not published.
        """
        change, baseline = self.loss_change(arm), self.table[self.baseline]
        if change is None or baseline is None or baseline.loss is None:
            return None
        return change[0] / baseline.loss[0], change[1] / baseline.loss[0]

    def _figure(self, arm: str) -> PublishedFigure:
        if (figure := self.table.get(arm)) is None:
            arms = ", ".join(name for name, figure in self.table.items() if figure is not None)
            raise UsageError(f"{self.title!r} has no published figure for {arm!r}: choose one of {arms}")
        return figure


def direction(claimed: Finding, verdict: Verdict) -> str:
    """Return whether a verdict agrees with what was published.

    >>> direction("better", Verdict(arm="a", kind="better", sentence="", advice=None))
    'same direction'
    >>> direction("unclear", Verdict(arm="a", kind="better", sentence="", advice=None))
    'measured: better'
    """
    if verdict.kind == "undecided":
        return "undecided"
    if claimed == "unclear":
        return f"measured: {verdict.kind}"
    if claimed == "equivalent":
        return "also equivalent" if verdict.kind == "equivalent" else f"not equivalent: {verdict.kind}"
    if verdict.kind == "equivalent":
        return "undecided (equivalent within the margin)"
    return "same direction" if verdict.kind == claimed else "other direction"


def measure_ratio(ratio: PublishedRatio, result: ExperimentResult) -> MeasuredRatio | None:
    """Return a published ratio as measured in a study; None if the runs are too few or were not timed.

    A ratio of variances has an interval from three seeds on, at the level of the study. A ratio of times has none: it
    holds for one machine.
    """
    arms = {arm.name: arm for arm in result.arms}
    arm, against = arms[ratio.arm], arms[ratio.against]
    if ratio.quantity == "seconds per token":
        if not arm.tokens_per_second or not against.tokens_per_second:
            return None
        return MeasuredRatio(value=against.tokens_per_second / arm.tokens_per_second)
    arm_losses, against_losses = (dict(zip(a.seeds, a.losses, strict=True)) for a in (arm, against))
    seeds = sorted(arm_losses.keys() & against_losses.keys())
    spread = spread_ratio(
        [arm_losses[seed] for seed in seeds], [against_losses[seed] for seed in seeds], level=1 - result.error_rate
    )
    if spread is None:
        return None
    low, high = (None if end is None else end**2 for end in (spread.low, spread.high))
    return MeasuredRatio(value=spread.ratio**2, low=low, high=high)
