"""Named models: every arm of every recipe, with as many parameters as standard attention."""

from dataclasses import replace

import pytest
import torch

from qkflow.mechanisms import mechanism
from qkflow.models import Decoder, parameters
from qkflow.recipes import RECIPES, models, recipe
from qkflow.recipes.named import ARMS

MEMORIES = ("deltanet", "gated-deltanet", "qdelta")
PHASES = ("kuramoto", "kuramoto-frustrated")
ABLATION = ("qdelta-0.2", "qdelta-0.5", "qdelta-0.8", "qdelta-1", "qdelta-undecayed")


@pytest.mark.parametrize("size", ["60m", "150m", "350m", "455m"])
def test_the_arms_of_a_size_can_be_built_and_have_the_parameters_of_standard(size: str) -> None:
    target = parameters(models()[f"{size}/standard"])
    assert target == pytest.approx(float(size[:-1]) * 1e6, rel=0.02)
    arms = [name.partition("/")[2] for name in models() if name.startswith(f"{size}/")]
    assert len(arms) == (4 if size == "455m" else len(ARMS) - len(MEMORIES) - len(ABLATION) - len(PHASES))
    for arm in arms:
        found = models()[f"{size}/{arm}"]
        assert (found.mechanism, found.vocabulary) == (ARMS[arm], 50257)
        if arm.startswith("hamiltonian-") and size != "60m":  # steps have no parameters, as 60m shows
            assert replace(found, mechanism=ARMS["hamiltonian"]) == models()[f"{size}/hamiltonian"]
            continue
        with torch.device("meta"):
            model = Decoder(found)
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(target, rel=0.005)


@pytest.mark.parametrize(
    ("size", "count", "vocabulary", "heads"),
    [
        ("1m", 1e6, 257, ""),
        ("5m", 5e6, 257, ""),
        ("340m", 340e6, 32000, ":heads=6,key_width=128"),
        ("1.3b", 1.3e9, 32000, ":heads=6,key_width=256"),
    ],
)
def test_memories_have_the_heads_of_the_paper_and_the_parameters_of_standard(
    size: str, count: float, vocabulary: int, heads: str
) -> None:
    target = parameters(models()[f"{size}/standard"])
    assert target == pytest.approx(count, rel=0.02)
    for arm in MEMORIES:
        found = models()[f"{size}/{arm}"]
        assert (found.mechanism, found.vocabulary) == (arm + heads, vocabulary)
        assert parameters(found) == pytest.approx(target, rel=0.005)


def test_the_ablation_has_the_heads_of_the_paper_too() -> None:
    target = parameters(models()["340m/standard"])
    found = [models()[f"340m/{arm}"] for arm in ("qdelta-0.2", "qdelta-undecayed")]
    assert [model.mechanism for model in found] == [
        "qdelta:lam=0.2,heads=6,key_width=128",
        "qdelta:decay=False,heads=6,key_width=128",
    ]
    assert all(parameters(model) == pytest.approx(target, rel=0.005) for model in found)


def test_every_spec_of_a_named_model_is_one_that_can_be_parsed() -> None:
    made = {arm: mechanism(spec) for arm, spec in ARMS.items()}
    assert len(set(map(repr, made.values()))) == len(made)  # no two names of one spec
    steps = [mechanism(f"standard+hamiltonian:steps={n}") for n in range(1, 8)]
    assert [made[f"hamiltonian-{n}"] for n in range(1, 8)] == steps


@pytest.mark.parametrize("name", RECIPES)
def test_the_arms_of_every_recipe_have_named_models_at_its_size(name: str) -> None:
    found = recipe(name)
    spec = found.spec("paper", found.corpus("paper", "my.txt"))
    size = spec.size or ("455m" if name == "coupled-affine" else name.rpartition("-")[2])
    for arm in found.table:
        short = next(name for name, spec in ARMS.items() if spec == arm)
        assert f"{size}/{short}" in models()


def test_the_models_are_an_ordinary_mapping() -> None:
    found = models()
    first, memories = len(ARMS) - len(MEMORIES) - len(ABLATION) - len(PHASES), 1 + len(MEMORIES)
    assert len(list(found)) == len(found) == 3 * first + 4 + 4 * memories + len(ABLATION) + 2 * len(PHASES)
    assert found.get("60m/nothing") is None
    assert "60m/nothing" not in found
    with pytest.raises(KeyError, match="did you mean '60m/hamiltonian'"):
        found["60m/hamiltonien"]
