"""The two scales of a recipe: what a laptop does in minutes, and the paper's size. All figures here are ours."""

from __future__ import annotations

from collections.abc import Callable

from qkflow.data import CorpusConfig
from qkflow.models import SIZES
from qkflow.recipes.named import shape
from qkflow.study.request import Request

TOKENS = 100_000_000
"""Training tokens of a run at the paper's scale: about one pass of WikiText-103."""
RATE = 3e-4
"""Learning rate at the paper's scale."""
CONTEXT = 512
"""Tokens a window at the paper's scale."""
SECONDS_AN_ARM = 300.0
"""Budget at a laptop's scale."""

LAPTOP_TEXT = CorpusConfig()
WIKITEXT = CorpusConfig(source="wikitext-103", tokens="gpt2")


def laptop(arms: tuple[str, ...]) -> Callable[[CorpusConfig], Request]:
    """Five minutes an arm; size, tokens and seeds are what fits.

    >>> laptop(("standard", "differential"))(CorpusConfig()).budget
    600.0
    """
    return lambda corpus: Request(corpus=corpus, arms=arms, budget=SECONDS_AN_ARM * len(arms))


def paper(arms: tuple[str, ...], size: str, *, seeds: int = 3) -> Callable[[CorpusConfig], Request]:
    """A named size, or one that only recipes have, with the tokens and the learning rate above.

    >>> paper(("standard", "coupled"), "60m")(WIKITEXT).size
    '60m'
    """

    def request(corpus: CorpusConfig) -> Request:
        return Request(
            corpus=corpus,
            arms=arms,
            size=size if size in SIZES else None,
            model=None if size in SIZES else shape(size),
            tokens=TOKENS,
            seeds=seeds,
            context=CONTEXT,
            learning_rates=(RATE,),
        )

    return request


def ours(*others: str, context: bool = True, seeds: int | None = 3) -> str:
    """What we chose, in words: context and seeds unless they are the paper's, and `others` where those are not known.

    >>> ours(seeds=None)[52:]
    " shape and details of the arms, tokens (GPT-2's, 100M a run), context (512), schedule, learning rate (0.0003)"
    """
    chosen = [*others, "shape and details of the arms", f"tokens (GPT-2's, {TOKENS // 10**6}M a run)"]
    chosen += [f"context ({CONTEXT})"] if context else []
    chosen += [] if seeds is None else [f"seeds ({seeds})"]
    chosen += ["schedule", f"learning rate ({RATE:g})"]
    return f"at --scale laptop all but the arms; at --scale paper {', '.join(chosen)}"
