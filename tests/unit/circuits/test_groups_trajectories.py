"""Training with a split fused matrix follows the same trajectory as training separate matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from qkflow.circuits import circuit_groups

R, STEPS, WIDTH, HEADS = 20.0, 20, 8, 2
Optimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, weight_decay=0.1)


def momentum(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, momentum=0.9, weight_decay=0.01)


class SeparateAttention(nn.Module):
    """Attention written out, with one matrix per projection."""

    def __init__(self, fused: Tensor, bias: Tensor, output: Tensor, output_bias: Tensor) -> None:
        super().__init__()
        for name, weight, offset in zip("qkv", fused.chunk(3), bias.chunk(3), strict=True):
            self.register_parameter(name, nn.Parameter(weight.clone()))
            self.register_parameter(f"{name}_bias", nn.Parameter(offset.clone()))
        self.o, self.o_bias = nn.Parameter(output.clone()), nn.Parameter(output_bias.clone())

    def forward(self, x: Tensor, causal: bool) -> Tensor:
        q, k, v = (
            F.linear(x, self.get_parameter(name), self.get_parameter(f"{name}_bias")).unflatten(-1, (HEADS, -1)).mT
            for name in "qkv"
        )
        scores = torch.einsum("bthk,bshk->bhts", q.mT, k.mT) * (WIDTH // HEADS) ** -0.5
        if causal:
            scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -torch.inf)
        mixed = torch.einsum("bhts,bshv->bthv", scores.softmax(-1), v.mT).flatten(-2)
        return F.linear(mixed, self.o, self.o_bias)

    def groups(self, lr: float) -> list[dict[str, Any]]:
        named = dict(self.named_parameters())
        fast = [named.pop(name) for name in ("q", "k", "q_bias", "k_bias")]
        return [{"params": fast, "lr": lr * R}, {"params": list(named.values()), "lr": lr}]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, call: Callable[[Tensor], Tensor], dtype: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        x, y = (torch.randn(2, 5, WIDTH, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
        optimizer.zero_grad()
        F.mse_loss(call(x), y).backward()
        optimizer.step()


def torch_attention(dtype: torch.dtype) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def self_attention(layer: nn.MultiheadAttention) -> Callable[[Tensor], Tensor]:
    return lambda x: layer(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("make", "lr"), [(adamw, 1e-3), (momentum, 1e-2)])
def test_multihead_attention_matches_separate_matrices(make: Optimizer, lr: float, dtype: Any) -> None:
    fused = torch_attention(dtype)
    separate = SeparateAttention(fused.in_proj_weight, fused.in_proj_bias, fused.out_proj.weight, fused.out_proj.bias)
    start = fused.in_proj_weight.detach().clone()
    train(fused, make(circuit_groups(fused, lr, r=R)), self_attention(fused), dtype)
    train(separate, make(separate.groups(lr)), lambda x: separate(x, causal=False), dtype)
    assert (fused.in_proj_weight - start).abs().max() > 0.05
    tolerance = 1e-10 if dtype == torch.float64 else 1e-6
    for name, weight in zip("qkv", fused.in_proj_weight.chunk(3), strict=True):
        assert_close(weight, separate.get_parameter(name), rtol=0, atol=tolerance)
    for name, bias in zip("qv", fused.in_proj_bias.chunk(3)[::2], strict=True):  # softmax is invariant to key biases
        assert_close(bias, separate.get_parameter(f"{name}_bias"), rtol=0, atol=tolerance)


@pytest.mark.parametrize(("make", "lr"), [(adamw, 1e-3), (momentum, 1e-2)])
def test_gpt2_attention_matches_separate_matrices(make: Optimizer, lr: float) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=WIDTH, n_head=HEADS, n_layer=1, attn_pdrop=0.0, resid_pdrop=0.0, attn_implementation="eager"
    )
    torch.manual_seed(0)
    fused = transformers.models.gpt2.modeling_gpt2.GPT2Attention(config, layer_idx=0).double()
    with torch.no_grad():
        for parameter in fused.parameters():
            parameter.normal_(std=0.4)
    separate = SeparateAttention(fused.c_attn.weight.T, fused.c_attn.bias, fused.c_proj.weight.T, fused.c_proj.bias)
    mask = torch.full((5, 5), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    groups = circuit_groups(fused, lr, r=R)
    train(fused, make(groups), lambda x: fused(x, attention_mask=mask)[0], torch.float64)
    train(separate, make(separate.groups(lr)), lambda x: separate(x, causal=True), torch.float64)
    for name, weight in zip("qkv", fused.c_attn.weight.chunk(3, 1), strict=True):
        assert_close(weight.T, separate.get_parameter(name), rtol=0, atol=1e-6)
    assert_close(fused.c_proj.weight.T, separate.o, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("make", "lr", "same"), [(momentum, 1e-2, True), (adamw, 1e-3, False)])
def test_scaling_the_gradient_is_not_a_learning_rate_under_adam(make: Optimizer, lr: float, same: bool) -> None:
    def scaled(gradient: Tensor) -> Tensor:
        return torch.cat([R * gradient[: 2 * WIDTH], gradient[2 * WIDTH :]])

    split, hooked = torch_attention(torch.float64), torch_attention(torch.float64)
    hooked.in_proj_weight.register_hook(scaled)
    hooked.in_proj_bias.register_hook(scaled)
    for layer, groups in (
        (split, circuit_groups(split, lr, r=R)),
        (hooked, [{"params": hooked.parameters(), "lr": lr}]),
    ):
        for group in groups:
            group["weight_decay"] = 0.0  # not part of the gradient
        train(layer, make(groups), self_attention(layer), torch.float64)
    distance = (split.in_proj_weight - hooked.in_proj_weight).abs().max()
    assert (distance < 1e-6) if same else (distance > 0.05)
