"""Published tables as studies, and the papers' arms as named models."""

from qkflow.recipes.base import MeasuredRatio, PublishedFigure, PublishedRatio, Recipe, Scale, direction, measure_ratio
from qkflow.recipes.models import MODELS, named_model
from qkflow.recipes.tables import RECIPES, recipe

__all__ = [
    "MODELS",
    "RECIPES",
    "MeasuredRatio",
    "PublishedFigure",
    "PublishedRatio",
    "Recipe",
    "Scale",
    "direction",
    "measure_ratio",
    "named_model",
    "recipe",
]
