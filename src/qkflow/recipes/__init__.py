"""Published claims and tables as studies, and the papers' arms as named models."""

from qkflow.recipes.base import MeasuredRatio, PublishedFigure, PublishedRatio, Recipe, Scale, direction, measure_ratio
from qkflow.recipes.claims import CLAIMS, Claim, claim, is_claim
from qkflow.recipes.criteria import ClaimVerdict, Criterion, Reading
from qkflow.recipes.models import MODELS, named_model
from qkflow.recipes.tables import RECIPES, recipe

__all__ = [
    "CLAIMS",
    "MODELS",
    "RECIPES",
    "Claim",
    "ClaimVerdict",
    "Criterion",
    "MeasuredRatio",
    "PublishedFigure",
    "PublishedRatio",
    "Reading",
    "Recipe",
    "Scale",
    "claim",
    "direction",
    "is_claim",
    "measure_ratio",
    "named_model",
    "recipe",
]
