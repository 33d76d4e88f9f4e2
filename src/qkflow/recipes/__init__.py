"""Published tables as studies, and the papers' arms as named models."""

from qkflow.recipes.base import Claim, MeasuredRatio, PublishedRatio, Recipe, Scale, direction, measure_ratio
from qkflow.recipes.models import MODELS, named_model
from qkflow.recipes.tables import RECIPES, recipe

__all__ = [
    "MODELS",
    "RECIPES",
    "Claim",
    "MeasuredRatio",
    "PublishedRatio",
    "Recipe",
    "Scale",
    "direction",
    "measure_ratio",
    "named_model",
    "recipe",
]
