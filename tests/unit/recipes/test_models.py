"""Named models: the arms of all recipes, with the parameter count of standard attention."""

import pytest
import torch

from qkflow.errors import UsageError
from qkflow.mechanisms import mechanism
from qkflow.models import Decoder, parameters
from qkflow.recipes import MODELS, RECIPES, named_model, recipe
from qkflow.recipes.models import ARMS

COUNTS = {"1m": 1e6, "5m": 5e6, "60m": 60e6, "150m": 150e6, "350m": 350e6, "455m": 455e6, "340m": 340e6, "1.3b": 1.3e9}
HEADS = {"340m": "heads=6,key_width=128", "1.3b": "heads=6,key_width=256"}


@pytest.mark.parametrize("size", COUNTS)
def test_arms_have_the_parameters_of_standard(size: str) -> None:
    target = parameters(named_model(f"{size}/standard"))
    assert target == pytest.approx(COUNTS[size], rel=0.02)
    vocabulary = 257 if size in ("1m", "5m") else 32000 if size in HEADS else 50257
    for name in MODELS:
        model_size, arm = name.split("/")
        if model_size != size or arm.startswith("hamiltonian-"):
            continue
        config = named_model(name)
        spec = ARMS[arm]
        if size in HEADS and arm != "standard":
            spec += ("," if ":" in spec else ":") + HEADS[size]
        assert (config.mechanism, config.vocabulary) == (spec, vocabulary)
        assert parameters(config) == pytest.approx(target, rel=0.005)


def test_steps_do_not_change_the_parameters() -> None:
    with torch.device("meta"):
        models = [Decoder(named_model(f"60m/{arm}")) for arm in ("hamiltonian", "hamiltonian-1", "hamiltonian-7")]
    assert len({sum(p.numel() for p in model.parameters()) for model in models}) == 1


def test_arm_specs_are_valid_and_distinct() -> None:
    mechanisms = {arm: mechanism(spec) for arm, spec in ARMS.items()}
    assert len(set(map(repr, mechanisms.values()))) == len(mechanisms)
    steps = [mechanism(f"standard+hamiltonian:steps={n}") for n in range(1, 8)]
    assert [mechanisms[f"hamiltonian-{n}"] for n in range(1, 8)] == steps


@pytest.mark.parametrize("name", RECIPES)
def test_every_arm_of_a_recipe_has_a_named_model(name: str) -> None:
    short = {spec: arm for arm, spec in ARMS.items()}
    assert {f"{recipe(name).size}/{short[arm]}" for arm in recipe(name).table} <= set(MODELS)


def test_number_of_models() -> None:
    n_coupled, n_delta, n_ablation, n_kuramoto = 14, 3, 5, 2
    assert len(MODELS) == len(set(MODELS)) == 3 * n_coupled + 4 + 4 * (1 + n_delta) + n_ablation + 2 * n_kuramoto


def test_unknown_model_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="did you mean '60m/hamiltonian'"):
        named_model("60m/hamiltonien")
