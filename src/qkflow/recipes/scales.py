"""The two scales of a recipe: what a laptop does in minutes, and the paper's size. All figures here are ours."""

from __future__ import annotations

from collections.abc import Callable

from qkflow.data import CorpusConfig
from qkflow.experiment.spec import ExperimentSpec
from qkflow.models import SIZES, DecoderConfig
from qkflow.recipes.named import like_one_layer, shape

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


def laptop(arms: tuple[str, ...]) -> Callable[[CorpusConfig], ExperimentSpec]:
    """Five minutes an arm; size, tokens and seeds are what fits.

    >>> laptop(("standard", "differential"))(CorpusConfig()).budget
    600.0
    """
    return lambda corpus: ExperimentSpec(data=corpus, arms=arms, budget=SECONDS_AN_ARM * len(arms))


def paper(
    arms: tuple[str, ...],
    size: str,
    *,
    seeds: int = 3,
    context: int = CONTEXT,
    batch: int | None = None,
    heads: int | None = None,
    tokens: int = TOKENS,
    rate: float = RATE,
    passes: float = ExperimentSpec.passes,
) -> Callable[[CorpusConfig], ExperimentSpec]:
    """A named size, or one that only recipes have, with the tokens and the learning rate above unless others are given.

    With `heads` the arms have so many in place of the size's own, and the first has the size's parameters.

    >>> paper(("standard", "coupled"), "60m")(WIKITEXT).size
    '60m'
    """

    def request(corpus: CorpusConfig) -> ExperimentSpec:
        named = size in SIZES and heads is None
        return ExperimentSpec(
            data=corpus,
            arms=arms,
            size=size if named else None,
            model=None if named else _model(arms[0], size, heads),
            tokens=tokens,
            seeds=seeds,
            context=context,
            batch=batch,
            learning_rates=(rate,),
            passes=passes,
        )

    return request


def _model(baseline: str, size: str, heads: int | None) -> DecoderConfig:
    return shape(size) if heads is None else like_one_layer(shape(size), baseline, heads)


def ours(
    *others: str,
    details: str = "shape and details of the arms",
    tokens: str = "GPT-2's",
    context: bool = True,
    seeds: int | None = 3,
    count: int = TOKENS,
    rate: float = RATE,
) -> str:
    """What we chose, in words: context and seeds unless they are the paper's, and `others` where those are not known.

    >>> ours(seeds=None)[52:]
    " shape and details of the arms, tokens (GPT-2's, 100M a run), context (512), schedule, learning rate (0.0003)"
    """
    chosen = [*others, details, f"tokens ({tokens}, {count // 10**6:,}M a run)"]
    chosen += [f"context ({CONTEXT})"] if context else []
    chosen += [] if seeds is None else [f"seeds ({seeds})"]
    chosen += ["schedule", f"learning rate ({rate:g})"]
    return f"at --scale laptop all but the arms; at --scale paper {', '.join(chosen)}"
