"""A published table as a study of ours: what was printed, and what to run to see whether it holds here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from qkflow.data import CorpusConfig
from qkflow.errors import UsageError
from qkflow.study.request import Request
from qkflow.study.verdict import Verdict

Scale = Literal["laptop", "paper"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One published table. A recipe is a function that returns one of these."""

    title: str
    """What the table shows."""
    source: str
    """Where it was published, with an address."""
    perplexity: Mapping[str, float]
    """Perplexity a token of each arm as published; the first is the baseline."""
    derived: str | None = None
    """How a figure was derived where the paper does not print it."""
    studies: Mapping[Scale, Callable[[CorpusConfig], Request]]
    """The study at the paper's size and at a laptop's, for a corpus."""
    corpora: Mapping[Scale, CorpusConfig]
    """The corpus of each, unless the user names another."""
    ours: str
    """What the paper leaves open and we chose."""

    def request(self, scale: Scale, corpus: CorpusConfig | None = None) -> Request:
        """The study to run."""
        return self.studies[scale](self.corpora[scale] if corpus is None else corpus)

    @property
    def baseline(self) -> str:
        """The arm that the others are held against."""
        return next(iter(self.perplexity))

    def published(self, arm: str) -> float:
        """The published change of the loss a token, as a part of the baseline's: -0.01 is one per cent less.

        Perplexities of different tokens do not compare; changes of the loss do, roughly.
        """
        if arm not in self.perplexity:
            raise UsageError(f"the table of {self.title!r} has no arm {arm!r}: it has {', '.join(self.perplexity)}")
        return math.log(self.perplexity[arm]) / math.log(self.perplexity[self.baseline]) - 1


def direction(published: float, verdict: Verdict) -> str:
    """Whether a verdict agrees with a published change.

    >>> direction(-0.01, Verdict(arm="a", kind="better", sentence="", advice=None))
    'same direction'
    >>> direction(-0.01, Verdict(arm="a", kind="equivalent", sentence="", advice=None))
    'undecided (equivalent within the margin)'
    """
    if verdict.kind == "undecided":
        return "undecided"
    if verdict.kind == "equivalent":
        return "undecided (equivalent within the margin)"
    return "same direction" if (verdict.kind == "better") == (published < 0) else "other direction"
