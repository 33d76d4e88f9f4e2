"""Named models: every arm of every recipe, with as many parameters as standard attention."""

import pytest
import torch

from qkflow.mechanisms import mechanism
from qkflow.models import Decoder, parameters
from qkflow.recipes import RECIPES, models, recipe
from qkflow.recipes.named import ARMS


@pytest.mark.parametrize("size", ["60m", "150m", "350m", "455m"])
def test_the_arms_of_a_size_can_be_built_and_have_the_parameters_of_standard(size: str) -> None:
    target = parameters(models()[f"{size}/standard"])
    assert target == pytest.approx(float(size[:-1]) * 1e6, rel=0.02)
    arms = [name.partition("/")[2] for name in models() if name.startswith(f"{size}/")]
    assert len(arms) == (4 if size == "455m" else len(ARMS))
    for arm in arms:
        with torch.device("meta"):
            model = Decoder(models()[f"{size}/{arm}"])
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(target, rel=0.005)
        assert (model.config.mechanism, model.config.vocabulary) == (ARMS[arm], 50257)


def test_every_spec_of_a_named_model_is_one_that_can_be_parsed() -> None:
    made = {arm: mechanism(spec) for arm, spec in ARMS.items()}
    assert len(set(map(repr, made.values()))) == len(made)  # no two names of one spec
    steps = [mechanism(f"standard+hamiltonian:steps={n}") for n in range(1, 8)]
    assert [made[f"hamiltonian-{n}"] for n in range(1, 8)] == steps


@pytest.mark.parametrize("name", RECIPES)
def test_the_arms_of_every_recipe_have_named_models_at_its_size(name: str) -> None:
    found = recipe(name)
    request = found.request("paper", found.corpus("paper", "my.txt"))
    size = request.size or "455m"
    for arm in found.table:
        short = next(name for name, spec in ARMS.items() if spec == arm)
        assert f"{size}/{short}" in models()


def test_the_models_are_an_ordinary_mapping() -> None:
    found = models()
    assert len(list(found)) == len(found) == 3 * len(ARMS) + 4
    assert found.get("60m/nothing") is None
    assert "60m/nothing" not in found
    with pytest.raises(KeyError, match="did you mean '60m/hamiltonian'"):
        found["60m/hamiltonien"]
