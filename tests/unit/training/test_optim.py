"""AdamW, and its memory by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from qkflow.errors import CheckpointError
from qkflow.models import Decoder
from qkflow.training.optim import build_optimizer, load_optimizer, optimizer_tensors


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_are_decayed_and_vectors_are_not_each_parameter_once(configure: Any, tied: bool) -> None:
    config = configure(model={"tied": tied})
    model = Decoder(config.model)
    optimizer = build_optimizer(model, config)
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(map(id, listed)) == sorted(map(id, model.parameters()))
    for group in optimizer.param_groups:
        assert {parameter.ndim >= 2 for parameter in group["params"]} == {group["weight_decay"] > 0}
    assert all(group["fused"] for group in optimizer.param_groups)


def test_vectors_per_head_are_not_decayed(configure: Any) -> None:
    config = configure(model={"mechanism": "standard+hamiltonian:sharing=none"})
    model = Decoder(config.model)
    decayed, *_ = build_optimizer(model, config).param_groups
    names = {name for name, parameter in model.named_parameters() if any(parameter is one for one in decayed["params"])}
    assert "blocks.0.mechanism.coupling.force.inner" in names
    assert not any(name.endswith("bias") for name in names)


def test_tied_parameters_are_optimized_once(configure: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    assert [len(group["params"]) for group in build_optimizer(model, configure()).param_groups] == [1]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    sum((parameter.square().sum() for parameter in model.parameters()), torch.zeros(())).backward()
    optimizer.step()


def test_a_restored_optimizer_makes_the_same_step(configure: Any) -> None:
    config = configure()
    model = Decoder(config.model)
    optimizer = build_optimizer(model, config)
    assert optimizer_tensors(model, optimizer) == {}
    step(model, optimizer)
    twin = Decoder(config.model)
    twin.load_state_dict(model.state_dict())
    other = build_optimizer(twin, config)
    load_optimizer(twin, other, optimizer_tensors(model, optimizer))
    for _ in range(2):
        step(model, optimizer)
        step(twin, other)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_the_optimizer_state_of_another_model_is_refused(configure: Any) -> None:
    config = configure()
    model, wider = Decoder(config.model), Decoder(configure(model={"hidden": 48}).model)
    optimizer = build_optimizer(model, config)
    step(model, optimizer)
    tensors = optimizer_tensors(model, optimizer)
    with pytest.raises(CheckpointError, match="has shape"):
        load_optimizer(wider, build_optimizer(wider, config), tensors)
    tensors.pop("step.norm.weight")
    with pytest.raises(CheckpointError, match=r"'step.norm.weight' is in only one of them"):
        load_optimizer(model, optimizer, tensors)
