"""Recipes: published tables as studies that can be asked for, and a direction that follows from the verdict."""

import math
from dataclasses import replace
from typing import Literal

import pytest
import torch

from qkflow.data import CorpusConfig, is_recall_task
from qkflow.data.recall import parse_recall_spec
from qkflow.errors import UsageError
from qkflow.experiment.matching import match_arms
from qkflow.experiment.stats.verdict import Verdict
from qkflow.models import SIZES, Decoder, parameters
from qkflow.recipes import (
    RECIPES,
    BitsChange,
    BitsPerCharacter,
    Finding,
    Outcome,
    Perplexity,
    PerplexityChange,
    PublishedRatio,
    direction,
    recipe,
)

BROUGHT = {
    "coupled-corpora-pubmed": "gpt2",
    "coupled-corpora-web": "gpt2",
    "kuramoto-code-1m": "bytes",
    "kuramoto-code-5m": "bytes",
}
"""Recipes whose text has no name, and the tokens that it is read as."""

PUBLISHED = {24.22, 22.55, 22.62, 23.81, 19.35, 18.93, -0.067, -0.045, 0.103}
PUBLISHED |= {26.89, 26.96, 26.86, 26.61, 26.55, 26.52}
PUBLISHED |= {1.616, 0.004, 1.637, 0.010, 1.611, 1.5953, 0.0014, -0.012, -0.010, 0.013, 0.015}
"""Every figure of a loss that is known from the papers."""


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("scale", ["laptop", "paper"])
def test_a_recipe_asks_for_the_arms_of_its_table_with_the_same_baseline(
    name: str, scale: Literal["laptop", "paper"]
) -> None:
    found = recipe(name)
    spec = found.spec(scale, found.corpus(scale, "my.txt"))
    assert spec.arms == tuple(found.table)
    assert spec.baseline == found.baseline
    assert spec.size is None or spec.size in SIZES
    assert "://" in found.source


@pytest.mark.parametrize("name", RECIPES)
def test_at_laptop_scale_a_recipe_needs_no_data_but_what_is_built_in(name: str) -> None:
    spec = recipe(name).spec("laptop")
    assert spec.data.tokens == "bytes"
    assert spec.data.source == "python-stdlib" or is_recall_task(spec.data.source)
    assert match_arms(spec, "100k", 257).parameters > 0  # every arm can be matched at the smallest size


@pytest.mark.parametrize("name", RECIPES)
def test_at_the_papers_scale_the_text_is_the_papers_or_the_users(name: str) -> None:
    found = recipe(name)
    if name in BROUGHT:
        with pytest.raises(UsageError, match="give one of yours as CORPUS"):
            found.spec("paper")
        assert found.corpus("paper", "mine.txt") == replace(CorpusConfig(source="mine.txt"), tokens=BROUGHT[name])
    elif "needles" in name:
        spec = found.spec("paper")
        assert parse_recall_spec(spec.data.source).length == spec.context
        assert spec.model == recipe("qdelta-1.3b").spec("paper").model
    elif name.startswith("qdelta-"):
        assert found.spec("paper").data == CorpusConfig(source="wikitext-103", tokens="bpe", vocabulary=32000)
    elif name.startswith(("kuramoto-", "frustrated-")):
        assert found.spec("paper").data == CorpusConfig(source="enwik8", tokens="bytes")
    else:
        assert found.spec("paper").data == CorpusConfig(source="wikitext-103", tokens="gpt2")


@pytest.mark.parametrize("name", RECIPES)
def test_only_figures_of_the_paper_are_shown_as_published(name: str) -> None:
    found = recipe(name)
    for claim in found.table.values():
        if isinstance(claim, Perplexity) and claim.derived:
            assert found.derived is not None
            assert f"{claim.low}" in found.derived
            assert "derived" in claim.words
        elif isinstance(claim, BitsPerCharacter):
            assert {round(math.log2(claim.low), 9), claim.spread} - {None} <= PUBLISHED
        elif isinstance(claim, Perplexity | BitsChange):
            assert set(claim.bounds) <= PUBLISHED
        elif isinstance(claim, PerplexityChange):
            assert claim.part in PUBLISHED
    assert {(ratio.quantity, ratio.published) for ratio in found.ratios} <= {
        ("variance over seeds", 8.0),
        ("seconds a token", 2.4),
    }


def test_another_corpus_takes_the_place_of_the_recipes_own() -> None:
    assert recipe("differential").spec("laptop", CorpusConfig(source="my.txt")).data.source == "my.txt"


def test_the_published_change_is_that_of_the_loss_a_token() -> None:
    found = recipe("differential")
    change = pytest.approx((math.log(18.93) - math.log(19.55)) / math.log(19.55))
    assert found.published("differential") == (change, change)
    with pytest.raises(UsageError, match="nothing was published of 'coupled'"):
        found.published("coupled")


def test_a_range_of_perplexities_stays_a_range() -> None:
    low, high = recipe("coupled-60m").published("standard+euler") or (0.0, 0.0)
    assert low == pytest.approx(math.log(22.55) / math.log(24.22) - 1)
    assert high == pytest.approx(math.log(22.62) / math.log(24.22) - 1)


@pytest.mark.parametrize(
    ("name", "part", "went"),
    [
        ("coupled-150m", -0.067, "better"),
        ("coupled-corpora-pubmed", -0.045, "better"),
        ("coupled-corpora-web", 0.103, "worse"),
    ],
)
def test_a_change_of_perplexity_is_one_of_nats_and_of_no_known_part_of_the_loss(
    name: str, part: float, went: Finding
) -> None:
    found = recipe(name)
    nats = pytest.approx(math.log(1 + part))
    assert found.loss_change("coupled") == (nats, nats)
    assert found.published("coupled") is None
    assert found.finding("coupled") == went


def test_the_steps_are_claimed_to_be_equivalent_to_one_step() -> None:
    found = recipe("coupled-steps")
    assert found.baseline == "standard+hamiltonian:steps=1"
    assert [found.finding(f"standard+hamiltonian:steps={steps}") for steps in range(2, 8)] == ["equivalent"] * 6
    assert found.loss_change("standard+hamiltonian:steps=2") is None


def test_the_affine_coupling_is_asked_for_as_the_paper_has_it() -> None:
    spec = recipe("coupled-affine").spec("paper")
    assert (spec.arms, spec.seeds, spec.context) == (("differential", "differential+affine"), 6, 512)
    assert recipe("coupled-affine").published("differential+affine") is None
    assert match_arms(spec, "own", 50257).parameters == pytest.approx(455e6, rel=0.005)


@pytest.mark.parametrize(
    ("name", "size", "keys"),
    [("qdelta-ablation-340m", 340e6, 128), ("qdelta-340m", 340e6, 128), ("qdelta-1.3b", 1.3e9, 256)],
)
def test_q_delta_is_asked_for_with_the_papers_heads_and_length(name: str, size: float, keys: int) -> None:
    spec = recipe(name).spec("paper")
    assert (spec.context, spec.size) == (4096, None)
    assert spec.model is not None
    assert parameters(spec.model) == pytest.approx(size, rel=0.02)
    made = match_arms(replace(spec, model=replace(spec.model, layers=1)), "own", 32000)
    assert [arm.name for arm in made.arms] == list(recipe(name).table)
    with torch.device("meta"):
        layers = [Decoder(arm.model).blocks[0].mechanism for arm in made.arms]
    assert {(layer.heads, layer.key_width, layer.value_width) for layer in layers} == {(6, keys, 2 * keys)}


def test_a_lower_perplexity_in_the_ablation_is_told_to_be_of_a_lower_accuracy() -> None:
    found = recipe("qdelta-ablation-340m")
    went = {arm: found.finding(arm) for arm in list(found.table)[1:]}
    assert [arm for arm, finding in went.items() if finding == "worse"] == ["qdelta:lam=0.2"]
    assert found.unclear is not None
    assert "lower perplexity comes with lower accuracy" in found.unclear


@pytest.mark.parametrize("name", ["qdelta-340m", "qdelta-1.3b", "qdelta-needles-1.3b"])
def test_accuracies_are_told_to_be_no_losses(name: str) -> None:
    found = recipe(name)
    assert {arm: found.finding(arm) for arm in ("deltanet", "qdelta")} == {"deltanet": "worse", "qdelta": "better"}
    assert found.published("qdelta") is None
    assert found.unclear is not None
    assert found.unclear.startswith("accuracy on tasks is not loss") or "accuracies do not compare" in found.unclear
    assert "reported by others" in found.source


def test_a_table_that_contradicts_itself_is_refused() -> None:
    found = recipe("coupled-60m")
    with pytest.raises(ValueError, match="one perplexity or nothing"):
        replace(found, table={"a": PerplexityChange(-0.1), "b": Perplexity(3.0)}, ratios=())
    with pytest.raises(ValueError, match="without the baseline's perplexity"):
        replace(found, table={"a": None, "b": Perplexity(3.0)}, ratios=())
    with pytest.raises(ValueError, match="neither way"):
        replace(found, table={"a": Perplexity(3.0), "b": Perplexity(2.9, 3.1)}, ratios=())
    with pytest.raises(ValueError, match="nothing was published of 'b'"):
        replace(found, table={"a": None, "b": None}, ratios=())
    elsewhere = PublishedRatio(quantity="seconds a token", arm="a", against="c", published=2.0)
    with pytest.raises(ValueError, match="arms in the table"):
        replace(found, table={"a": None, "b": Outcome("worse", "")}, ratios=(elsewhere,))


@pytest.mark.parametrize("bounds", [(1.0, None), (3.0, 2.0), (math.nan, None), (2.0, math.inf)])
def test_what_is_no_perplexity_is_refused(bounds: tuple[float, float | None]) -> None:
    with pytest.raises(ValueError, match="perplexity is above 1"):
        Perplexity(*bounds)


@pytest.mark.parametrize("part", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_change_is_refused(part: float) -> None:
    with pytest.raises(ValueError, match="perplexity changes by"):
        PerplexityChange(part)


@pytest.mark.parametrize(
    ("claimed", "kind", "told"),
    [
        ("better", "better", "same direction"),
        ("better", "worse", "other direction"),
        ("worse", "better", "other direction"),
        ("worse", "worse", "same direction"),
        ("better", "undecided", "undecided"),
        ("better", "equivalent", "undecided (equivalent within the margin)"),
        ("equivalent", "equivalent", "equivalent too"),
        ("equivalent", "better", "not equivalent: better"),
        ("equivalent", "worse", "not equivalent: worse"),
        ("equivalent", "undecided", "undecided"),
    ],
)
def test_the_direction_follows_from_the_verdict(
    claimed: Finding, kind: Literal["better", "worse", "equivalent", "undecided"], told: str
) -> None:
    assert direction(claimed, Verdict(arm="a", kind=kind, sentence="", advice=None)) == told


def test_an_unknown_recipe_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="differential"):
        recipe("diferential")
