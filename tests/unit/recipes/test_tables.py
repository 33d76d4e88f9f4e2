"""Recipes: the published figures, the studies they request, and the comparison with a verdict."""

import math
import re
from dataclasses import replace
from typing import Literal

import pytest
import torch

from qkflow.data import CorpusConfig, is_recall_task
from qkflow.data.recall import parse_recall_spec
from qkflow.errors import UsageError
from qkflow.experiment.budget import match_arms
from qkflow.experiment.stats.verdict import Verdict
from qkflow.models import SIZES, Decoder, parameters
from qkflow.recipes import RECIPES, PublishedFigure, direction, recipe
from qkflow.recipes.base import Finding

KURAMOTO = ("kuramoto-1m", "kuramoto-5m", "kuramoto-code-1m", "kuramoto-code-5m", "frustrated-1m")
TOKENS_OF_USER_TEXT = {
    "coupled-corpora-pubmed": "gpt2",
    "coupled-corpora-web": "gpt2",
    "kuramoto-code-1m": "bytes",
    "kuramoto-code-5m": "bytes",
}
"""The tokens of recipes whose text the user must provide."""

PUBLISHED = """
    24.22 22.55 22.62 23.81 19.35 18.93 -6.7 -4.5 +10.3 26.89 26.96 26.86 26.61 26.55 26.52 1.616 0.004 1.637 0.010
    1.611 1.5953 0.0014 -0.012 -0.010 +0.013 +0.015
"""
"""All published figures of a loss."""


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("scale", ["laptop", "paper"])
def test_recipe_requests_the_arms_of_its_table(name: str, scale: Literal["laptop", "paper"]) -> None:
    chosen = recipe(name)
    spec = chosen.spec(scale, chosen.corpus(scale, "my.txt"))
    assert spec.arms == tuple(chosen.table)
    assert spec.baseline == chosen.baseline
    assert spec.data.source == "my.txt"
    assert spec.size is None or spec.size in SIZES
    assert "://" in chosen.source


@pytest.mark.parametrize("name", RECIPES)
def test_laptop_scale_needs_only_built_in_data(name: str) -> None:
    spec = recipe(name).spec("laptop")
    assert spec.data.tokens == "bytes"
    assert spec.data.source == "python-stdlib" or is_recall_task(spec.data.source)
    matched = match_arms(spec, "100k", 257)  # all arms can be matched at the smallest size
    assert [arm.parameters for arm in matched.arms] == pytest.approx([matched.parameters] * len(spec.arms), rel=0.005)


@pytest.mark.parametrize("name", RECIPES)
def test_paper_scale_uses_the_text_of_the_paper_or_of_the_user(name: str) -> None:
    chosen = recipe(name)
    if name in TOKENS_OF_USER_TEXT:
        with pytest.raises(UsageError, match=re.escape(f"({chosen.text}) is not available: give your own copy")):
            chosen.spec("paper")
        assert chosen.corpus("paper", "mine.txt") == CorpusConfig(source="mine.txt", tokens=TOKENS_OF_USER_TEXT[name])
    elif "needles" in name:
        spec = chosen.spec("paper")
        assert parse_recall_spec(spec.data.source).length == spec.context
        assert spec.model == recipe("qdelta-1.3b").spec("paper").model
    elif name.startswith("qdelta-"):
        assert chosen.spec("paper").data == CorpusConfig(source="wikitext-103", tokens="bpe", vocabulary=32000)
    elif name.startswith(("kuramoto-", "frustrated-")):
        assert chosen.spec("paper").data == CorpusConfig(source="enwik8", tokens="bytes")
    else:
        assert chosen.spec("paper").data == CorpusConfig(source="wikitext-103", tokens="gpt2")


@pytest.mark.parametrize("name", RECIPES)
def test_figures_are_published_or_marked_as_derived(name: str) -> None:
    chosen = recipe(name)
    for claim in filter(None, chosen.table.values()):
        figures = re.findall(r"[+-]?\d+\.\d+", claim.text)
        if "(derived)" in claim.text:
            assert chosen.derived is not None
            assert figures[0] in chosen.derived
        elif claim.finding is None:
            assert figures
            assert set(figures) <= set(PUBLISHED.split())
    ratios = {(ratio.quantity, ratio.published) for ratio in chosen.ratios}
    assert ratios <= {("variance over seeds", 8.0), ("seconds per token", 2.4)}


@pytest.mark.parametrize(
    ("name", "arm", "ends", "reference"),
    [
        ("differential", "differential", (math.log(18.93), math.log(18.93)), math.log(19.55)),
        ("coupled-60m", "standard+euler", (math.log(22.55), math.log(22.62)), math.log(24.22)),
        ("kuramoto-1m", "kuramoto", (1.637 * math.log(2), 1.637 * math.log(2)), 1.616 * math.log(2)),
        ("frustrated-1m", "kuramoto:frustrated=True", (1.5953 * math.log(2),) * 2, 1.611 * math.log(2)),
    ],
)
def test_two_losses_give_a_relative_change(name: str, arm: str, ends: tuple[float, float], reference: float) -> None:
    chosen = recipe(name)
    assert chosen.loss_change(arm) == pytest.approx([end - reference for end in ends])
    assert chosen.relative_change(arm) == pytest.approx([end / reference - 1 for end in ends])


@pytest.mark.parametrize(
    ("name", "arm", "ends", "finding"),
    [
        ("coupled-150m", "coupled", (math.log(1 - 0.067),) * 2, "better"),
        ("coupled-corpora-pubmed", "coupled", (math.log(1 - 0.045),) * 2, "better"),
        ("coupled-corpora-web", "coupled", (math.log(1 + 0.103),) * 2, "worse"),
        ("kuramoto-code-1m", "kuramoto", (0.013 * math.log(2), 0.015 * math.log(2)), "worse"),
        ("kuramoto-code-5m", "kuramoto", (-0.012 * math.log(2), -0.010 * math.log(2)), "better"),
    ],
)
def test_a_change_alone_gives_nats_and_no_relative_change(
    name: str, arm: str, ends: tuple[float, float], finding: Finding
) -> None:
    chosen = recipe(name)
    assert chosen.loss_change(arm) == pytest.approx(ends)
    assert chosen.relative_change(arm) is None
    assert chosen.finding(arm) == finding


def test_an_arm_without_a_claim_is_refused() -> None:
    with pytest.raises(UsageError, match="no published figure for 'coupled'"):
        recipe("differential").relative_change("coupled")


@pytest.mark.parametrize(
    ("name", "finding"), [*zip(KURAMOTO, ("worse", "unclear", "worse", "better", "better"), strict=True)]
)
def test_findings_of_kuramoto_attention(name: str, finding: Finding) -> None:
    chosen = recipe(name)
    assert [chosen.finding(arm) for arm in list(chosen.table)[1:]] == [finding]
    assert ("reported by others" in chosen.source) == ("code" in name)


def test_at_5m_median_and_mean_disagree() -> None:
    chosen = recipe("kuramoto-5m")
    assert chosen.loss_change("kuramoto") is None
    assert chosen.unclear is not None
    assert "better by the median" in chosen.unclear
    assert "worse by the mean" in chosen.unclear


def test_steps_are_claimed_to_be_equivalent_to_one_step() -> None:
    chosen = recipe("coupled-steps")
    assert chosen.baseline == "standard+hamiltonian:steps=1"
    assert [chosen.finding(f"standard+hamiltonian:steps={steps}") for steps in range(2, 8)] == ["equivalent"] * 6
    assert chosen.loss_change("standard+hamiltonian:steps=2") is None


def test_affine_coupling_has_the_settings_of_the_paper() -> None:
    spec = recipe("coupled-affine").spec("paper")
    assert (spec.arms, spec.seeds, spec.context) == (("differential", "differential+affine"), 6, 512)
    assert recipe("coupled-affine").relative_change("differential+affine") is None
    assert match_arms(spec, "own", 50257).parameters == pytest.approx(455e6, rel=0.005)


@pytest.mark.parametrize(
    ("name", "size", "keys"),
    [("qdelta-ablation-340m", 340e6, 128), ("qdelta-340m", 340e6, 128), ("qdelta-1.3b", 1.3e9, 256)],
)
def test_q_delta_has_the_heads_and_length_of_the_paper(name: str, size: float, keys: int) -> None:
    spec = recipe(name).spec("paper")
    assert (spec.context, spec.size) == (4096, None)
    assert spec.model is not None
    assert parameters(spec.model) == pytest.approx(size, rel=0.02)
    matched = match_arms(replace(spec, model=replace(spec.model, layers=1)), "own", 32000)
    assert [arm.name for arm in matched.arms] == list(recipe(name).table)
    with torch.device("meta"):
        layers = [Decoder(arm.model).blocks[0].mechanism for arm in matched.arms]
    assert {(layer.heads, layer.key_width, layer.value_width) for layer in layers} == {(6, keys, 2 * keys)}


def test_lower_perplexity_in_the_ablation_comes_with_lower_accuracy() -> None:
    chosen = recipe("qdelta-ablation-340m")
    worse = [arm for arm in list(chosen.table)[1:] if chosen.finding(arm) == "worse"]
    assert worse == ["qdelta:lam=0.2"]
    assert chosen.unclear is not None
    assert "lower perplexity comes with lower accuracy" in chosen.unclear


@pytest.mark.parametrize("name", ["qdelta-340m", "qdelta-1.3b", "qdelta-needles-1.3b"])
def test_accuracies_are_not_losses(name: str) -> None:
    chosen = recipe(name)
    assert {arm: chosen.finding(arm) for arm in ("deltanet", "qdelta")} == {"deltanet": "worse", "qdelta": "better"}
    assert chosen.relative_change("qdelta") is None
    assert chosen.unclear is not None
    assert chosen.unclear.startswith("accuracy on tasks is not loss") or "accuracies do not" in chosen.unclear
    assert "reported by others" in chosen.source


@pytest.mark.parametrize("name", KURAMOTO)
def test_kuramoto_attention_is_trained_to_convergence_with_five_seeds(name: str) -> None:
    chosen = recipe(name)
    spec = chosen.spec("paper", chosen.corpus("paper", "my.txt"))
    assert (spec.size, spec.seeds, spec.tokens) == (name.rpartition("-")[2], 5, 10**9)
    assert chosen.tokens <= spec.passes * 90_000_000  # the train split of enwik8
    settings = ("1,000M tokens per run", f"learning rate ({spec.learning_rates[0]:g})", f"batch size ({spec.batch})")
    assert all(setting in chosen.ours for setting in (*settings, f"context ({spec.context})"))
    assert ("seeds (5)" in chosen.ours) == (name not in ("kuramoto-1m", "kuramoto-5m"))


def test_a_claim_without_a_direction_is_refused() -> None:
    chosen = recipe("coupled-60m")
    overlapping = {"a": PublishedFigure.perplexity(3.0), "b": PublishedFigure.perplexity(2.9, 3.1)}
    for table in (overlapping, {"a": None, "b": PublishedFigure.perplexity(3.0)}):
        with pytest.raises(ValueError, match="no direction"):
            replace(chosen, table=table)
    with pytest.raises(ValueError, match="no published figure for 'b'"):
        replace(chosen, table={"a": None, "b": None})


@pytest.mark.parametrize(
    ("claimed", "kind", "expected"),
    [
        ("better", "better", "same direction"),
        ("better", "worse", "other direction"),
        ("worse", "better", "other direction"),
        ("worse", "worse", "same direction"),
        ("better", "undecided", "undecided"),
        ("better", "equivalent", "undecided (equivalent within the margin)"),
        ("equivalent", "equivalent", "also equivalent"),
        ("equivalent", "better", "not equivalent: better"),
        ("equivalent", "worse", "not equivalent: worse"),
        ("equivalent", "undecided", "undecided"),
        ("unclear", "better", "measured: better"),
        ("unclear", "equivalent", "measured: equivalent"),
        ("unclear", "undecided", "undecided"),
    ],
)
def test_direction_follows_from_the_verdict(
    claimed: Finding, kind: Literal["better", "worse", "equivalent", "undecided"], expected: str
) -> None:
    assert direction(claimed, Verdict(arm="a", kind=kind, sentence="", advice=None)) == expected


def test_unknown_recipe_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="differential"):
        recipe("diferential")
