"""Differential against standard attention, from the tables of the paper on coupled query-key dynamics."""

from __future__ import annotations

from qkflow.recipes.base import Recipe
from qkflow.recipes.claims import Perplexity
from qkflow.recipes.scales import LAPTOP_TEXT, WIKITEXT, laptop, ours, paper

_ARMS = ("standard", "differential")


def differential() -> Recipe:
    """Perplexity of WikiText-103 at 350M parameters."""
    return Recipe(
        title="Differential against standard attention, 350M parameters, WikiText-103",
        source="Gahtan & Bronstein 2026, https://arxiv.org/abs/2604.01683",
        text="WikiText-103",
        table={"standard": Perplexity(19.55, derived=True), "differential": Perplexity(18.93)},
        derived="standard's 19.55: coupled attention's 19.35 is printed as 1.0 % below it",
        studies={"laptop": laptop(_ARMS), "paper": paper(_ARMS, "350m")},
        corpora={"laptop": LAPTOP_TEXT, "paper": WIKITEXT},
        ours=ours(),
    )
