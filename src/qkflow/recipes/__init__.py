"""Published tables as studies, one function each, and the papers' arms as models by name."""

from __future__ import annotations

from collections.abc import Callable

from qkflow.errors import unknown
from qkflow.recipes import coupled, kuramoto, qdelta
from qkflow.recipes.base import Recipe, Scale, direction
from qkflow.recipes.claims import BitsChange, BitsPerCharacter, Claim, Finding, Outcome, Perplexity, PerplexityChange
from qkflow.recipes.differential import differential
from qkflow.recipes.named import models
from qkflow.recipes.ratios import MeasuredRatio, PublishedRatio, measured

__all__ = [
    "RECIPES",
    "BitsChange",
    "BitsPerCharacter",
    "Claim",
    "Finding",
    "MeasuredRatio",
    "Outcome",
    "Perplexity",
    "PerplexityChange",
    "PublishedRatio",
    "Recipe",
    "Scale",
    "direction",
    "measured",
    "models",
    "recipe",
]

RECIPES: dict[str, Callable[[], Recipe]] = {
    "coupled-60m": coupled.coupled_60m,
    "coupled-150m": coupled.coupled_150m,
    "coupled-350m": coupled.coupled_350m,
    "coupled-control": coupled.coupled_control,
    "coupled-integrators": coupled.coupled_integrators,
    "coupled-steps": coupled.coupled_steps,
    "coupled-corpora-pubmed": coupled.coupled_corpora_pubmed,
    "coupled-corpora-web": coupled.coupled_corpora_web,
    "coupled-affine": coupled.coupled_affine,
    "differential": differential,
    "qdelta-ablation-340m": qdelta.qdelta_ablation_340m,
    "qdelta-340m": qdelta.qdelta_340m,
    "qdelta-1.3b": qdelta.qdelta_1_3b,
    "qdelta-needles-1.3b": qdelta.qdelta_needles_1_3b,
    "kuramoto-1m": kuramoto.kuramoto_1m,
    "kuramoto-5m": kuramoto.kuramoto_5m,
    "kuramoto-code-1m": kuramoto.kuramoto_code_1m,
    "kuramoto-code-5m": kuramoto.kuramoto_code_5m,
    "frustrated-1m": kuramoto.frustrated_1m,
}
"""Every recipe by the name that `qkflow reproduce` takes."""


def recipe(name: str) -> Recipe:
    """A recipe by name.

    >>> [round(end, 4) for end in recipe("coupled-60m").published("coupled")]
    [-0.0224, -0.0214]
    """
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]()
