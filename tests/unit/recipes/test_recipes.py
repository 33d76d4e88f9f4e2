"""Recipes: published tables as studies that can be asked for, and a direction that follows from the verdict."""

import math
from typing import Literal

import pytest

from qkflow.data import CorpusConfig
from qkflow.errors import UsageError
from qkflow.models import SIZES
from qkflow.recipes import RECIPES, direction, recipe
from qkflow.study.verdict import Verdict


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("scale", ["laptop", "paper"])
def test_a_recipe_asks_for_the_arms_of_its_table_with_the_same_baseline(
    name: str, scale: Literal["laptop", "paper"]
) -> None:
    found = recipe(name)
    request = found.request(scale)
    assert request.arms == tuple(found.perplexity)
    assert request.baseline == found.baseline
    assert request.size is None or request.size in SIZES
    assert "://" in found.source


@pytest.mark.parametrize("name", RECIPES)
def test_at_laptop_scale_a_recipe_needs_no_data_but_what_is_built_in(name: str) -> None:
    assert recipe(name).request("laptop").corpus.source == "python-stdlib"


def test_another_corpus_takes_the_place_of_the_recipes_own() -> None:
    assert recipe("differential").request("laptop", CorpusConfig(source="my.txt")).corpus.source == "my.txt"


def test_the_published_change_is_that_of_the_loss_a_token() -> None:
    found = recipe("differential")
    assert found.published("differential") == pytest.approx((math.log(18.93) - math.log(19.55)) / math.log(19.55))
    assert found.published("standard") == 0
    with pytest.raises(UsageError, match="no arm 'coupled'"):
        found.published("coupled")


@pytest.mark.parametrize(
    ("published", "kind", "told"),
    [
        (-0.01, "better", "same direction"),
        (-0.01, "worse", "other direction"),
        (0.01, "better", "other direction"),
        (0.01, "worse", "same direction"),
        (-0.01, "undecided", "undecided"),
        (-0.01, "equivalent", "undecided (equivalent within the margin)"),
    ],
)
def test_the_direction_follows_from_the_verdict(
    published: float, kind: Literal["better", "worse", "equivalent", "undecided"], told: str
) -> None:
    assert direction(published, Verdict(arm="a", kind=kind, sentence="", advice=None)) == told


def test_an_unknown_recipe_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="differential"):
        recipe("diferential")
