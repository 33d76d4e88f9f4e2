"""Published tables as studies, one function each."""

from __future__ import annotations

from collections.abc import Callable

from qkflow.errors import unknown
from qkflow.recipes.base import Recipe, Scale, direction
from qkflow.recipes.differential import differential

__all__ = ["RECIPES", "Recipe", "Scale", "direction", "recipe"]

RECIPES: dict[str, Callable[[], Recipe]] = {"differential": differential}
"""Every recipe by the name that `qkflow reproduce` takes."""


def recipe(name: str) -> Recipe:
    """A recipe by name.

    >>> round(recipe("differential").published("differential"), 4)
    -0.0108
    """
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]()
