"""A published table as a study of ours: what was printed, and what to run to see whether it holds here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from qkflow.data import CorpusConfig
from qkflow.errors import UsageError
from qkflow.experiment.spec import ExperimentSpec
from qkflow.experiment.stats.verdict import Verdict
from qkflow.recipes.claims import Bounds, Claim, Finding, Perplexity, finding, loss_change
from qkflow.recipes.ratios import PublishedRatio

Scale = Literal["laptop", "paper"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One published table. A recipe is a function that returns one of these."""

    title: str
    """What the table shows."""
    source: str
    """Where it was published, with an address."""
    text: str
    """The text that its figures are of, as the paper calls it."""
    table: Mapping[str, Claim | None]
    """What was published of each arm; the first is the baseline, of which there may be nothing."""
    derived: str | None = None
    """How a figure was derived where the paper does not print it."""
    unclear: str | None = None
    """What the paper leaves unclear about its own figures."""
    ratios: tuple[PublishedRatio, ...] = ()
    """What was published of the arms besides their loss."""
    studies: Mapping[Scale, Callable[[CorpusConfig], ExperimentSpec]]
    """The study at the paper's size and at a laptop's, for a corpus."""
    corpora: Mapping[Scale, CorpusConfig]
    """The corpus of each, unless the user names another."""
    bring: bool = False
    """Whether the paper's scale needs a text of the user's, because the paper's own has no name here."""
    ours: str
    """What the paper leaves open and we chose."""

    def __post_init__(self) -> None:
        first = self.table[self.baseline]
        if first is not None and (not isinstance(first, Perplexity) or first.high is not None):
            raise ValueError(f"the baseline has one perplexity or nothing, got {first.words}")
        for arm in list(self.table)[1:]:
            self.finding(arm)
        for ratio in self.ratios:
            if not {ratio.arm, ratio.against} <= self.table.keys():
                raise ValueError(f"a ratio is of arms in the table, got {ratio.arm!r} over {ratio.against!r}")

    def corpus(self, scale: Scale, source: str | None = None) -> CorpusConfig:
        """The corpus of a scale, or another text in its place, with the same tokens."""
        if source is None and self.bring and scale == "paper":
            raise UsageError(
                f"the paper's text ({self.text}) has no name here: give one of yours as CORPUS for --scale paper"
            )
        return self.corpora[scale] if source is None else replace(self.corpora[scale], source=source)

    def spec(self, scale: Scale, corpus: CorpusConfig | None = None) -> ExperimentSpec:
        """The study to run."""
        return self.studies[scale](self.corpus(scale) if corpus is None else corpus)

    @property
    def baseline(self) -> str:
        """The arm that the others are held against."""
        return next(iter(self.table))

    def finding(self, arm: str) -> Finding:
        """Which way an arm went against the baseline, as published."""
        return finding(self._claim(arm), self._reference())

    def loss_change(self, arm: str) -> Bounds | None:
        """The published change of the loss in nats a token: the lower and the upper end, alike but for ranges."""
        return loss_change(self._claim(arm), self._reference())

    def published(self, arm: str) -> Bounds | None:
        """The published change of the loss, as a part of the baseline's: -0.01 is one per cent less.

        Perplexities of different tokens do not compare; changes of the loss in parts of it do, roughly. None where
        the baseline's perplexity was not published, or nothing but which way the arm went.
        """
        change, reference = self.loss_change(arm), self._reference()
        if change is None or reference is None:
            return None
        return change[0] / math.log(reference.low), change[1] / math.log(reference.low)

    def _claim(self, arm: str) -> Claim:
        if (claim := self.table.get(arm)) is not None:
            return claim
        known = ", ".join(name for name, claim in self.table.items() if claim is not None)
        raise UsageError(f"nothing was published of {arm!r} in {self.title!r}: it has {known}")

    def _reference(self) -> Perplexity | None:
        first = self.table[self.baseline]
        return first if isinstance(first, Perplexity) else None


def direction(claimed: Finding, verdict: Verdict) -> str:
    """Whether a verdict agrees with what was published.

    >>> direction("better", Verdict(arm="a", kind="better", sentence="", advice=None))
    'same direction'
    >>> direction("better", Verdict(arm="a", kind="equivalent", sentence="", advice=None))
    'undecided (equivalent within the margin)'
    >>> direction("equivalent", Verdict(arm="a", kind="equivalent", sentence="", advice=None))
    'equivalent too'
    >>> direction("unclear", Verdict(arm="a", kind="better", sentence="", advice=None))
    'here better'
    """
    if verdict.kind == "undecided":
        return "undecided"
    if claimed == "unclear":
        return f"here {verdict.kind}"
    if claimed == "equivalent":
        return "equivalent too" if verdict.kind == "equivalent" else f"not equivalent: {verdict.kind}"
    if verdict.kind == "equivalent":
        return "undecided (equivalent within the margin)"
    return "same direction" if verdict.kind == claimed else "other direction"
