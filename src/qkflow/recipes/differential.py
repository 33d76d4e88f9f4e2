"""Differential against standard attention, from the tables of the paper on coupled query-key dynamics."""

from __future__ import annotations

from qkflow.data import CorpusConfig
from qkflow.recipes.base import Recipe
from qkflow.study.request import Request

_ARMS = ("standard", "differential")


def differential() -> Recipe:
    """Perplexity of WikiText-103 at 350M parameters."""
    return Recipe(
        title="Differential against standard attention, 350M parameters, WikiText-103",
        source="Gahtan & Bronstein 2026, https://arxiv.org/abs/2604.01683",
        perplexity={"standard": 19.55, "differential": 18.93},
        derived="standard: coupled attention's 19.35 is printed as 1.0 % below it",
        studies={"laptop": _laptop, "paper": _paper},
        corpora={
            "laptop": CorpusConfig(),
            "paper": CorpusConfig(source="wikitext-103", tokens="gpt2"),
        },
        ours="tokens (one pass of 100M), seeds (3), learning rate and schedule are ours: the paper's are not published",
    )


def _laptop(corpus: CorpusConfig) -> Request:
    return Request(corpus=corpus, arms=_ARMS, budget=600.0)


def _paper(corpus: CorpusConfig) -> Request:
    return Request(
        corpus=corpus, arms=_ARMS, size="350m", tokens=100_000_000, seeds=3, context=512, learning_rates=(3e-4,)
    )
