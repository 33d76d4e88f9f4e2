"""Muon: its update against the formula in float64, which parameters it takes, and its state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from qkflow.errors import UsageError
from qkflow.models import Decoder
from qkflow.training.muon import MOMENTUM, Muon, newton_schulz
from qkflow.training.optim import build_optimizer, load_optimizer, optimizer_tensors


def reference_step(weight: torch.Tensor, gradient: torch.Tensor, buffer: torch.Tensor, lr: float, decay: float) -> None:
    """One step of the module's equations, in float64, one matrix at a time."""
    buffer.mul_(MOMENTUM).add_(gradient, alpha=1 - MOMENTUM)
    x = MOMENTUM * buffer + (1 - MOMENTUM) * gradient
    x = x / x.norm()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
    weight.mul_(1 - lr * decay).sub_(x, alpha=0.2 * lr * math.sqrt(max(weight.shape)))


def test_steps_match_the_formula() -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(6, 10, bias=False), nn.Linear(6, 10, bias=False), nn.Linear(12, 4, bias=False)])
    weights = [layer.weight for layer in layers]
    expected = [weight.detach().double().clone() for weight in weights]
    buffers = [torch.zeros_like(weight) for weight in expected]
    optimizer = Muon([{"params": weights, "muon": True}], lr=0.1, weight_decay=0.3)
    for _ in range(3):
        for weight, reference, buffer in zip(weights, expected, buffers, strict=True):
            weight.grad = torch.randn_like(weight)
            reference_step(reference, weight.grad.double(), buffer, 0.1, 0.3)
        optimizer.step()
    for weight, reference in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.detach().double(), reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(8, 8), (5, 20), (20, 5), (3, 7, 4)])
def test_singular_values_become_close_to_one_and_vectors_stay(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    result = newton_schulz(matrices)
    assert result.shape == matrices.shape
    singular = torch.linalg.svdvals(result)
    assert 0.5 < singular.min() <= singular.max() < 1.3
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    inner = u.mT @ result @ vh.mT  # diagonal, because the singular vectors are the same
    torch.testing.assert_close(inner, torch.diag_embed(torch.diagonal(inner, dim1=-2, dim2=-1)), rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", [(3, 0), (0, 3, 2), (2, 0, 4)])
def test_no_elements_need_no_steps(shape: tuple[int, ...]) -> None:
    assert newton_schulz(torch.zeros(shape)).shape == shape


@pytest.mark.parametrize("mechanism", ["standard", "qdelta", "coupled", "kuramoto"])
def test_muon_takes_the_linear_layers_of_blocks_and_adamw_the_rest(configure: Any, mechanism: str) -> None:
    config = configure(optimizer="muon", model={"mechanism": mechanism})
    model = Decoder(config.model)
    groups = build_optimizer(model, config).param_groups
    matrices = {id(parameter) for group in groups if group["muon"] for parameter in group["params"]}
    linear = {id(m.weight) for block in model.blocks for m in block.modules() if isinstance(m, nn.Linear)}
    assert matrices == linear
    assert id(model.embedding.weight) not in matrices
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_a_restored_state_makes_the_same_steps(configure: Any) -> None:
    config = configure(optimizer="muon")
    model, twin = Decoder(config.model), Decoder(config.model)
    optimizer, other = build_optimizer(model, config), build_optimizer(twin, config)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        sum((parameter.square().sum() for parameter in model.parameters()), torch.zeros(())).backward()
        optimizer.step()

    step(model, optimizer)
    twin.load_state_dict(model.state_dict())
    state = optimizer_tensors(model, optimizer)
    assert "momentum_buffer.blocks.0.mechanism.query.weight" in state
    assert "exp_avg.embedding.weight" in state
    load_optimizer(twin, other, state)
    for _ in range(2):
        step(model, optimizer)
        step(twin, other)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_model_without_blocks_is_refused(configure: Any) -> None:
    with pytest.raises(UsageError, match="use adamw"):
        build_optimizer(nn.Linear(2, 2), configure(optimizer="muon"))
