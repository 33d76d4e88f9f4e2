"""Parameter groups: r = 1 is the plain optimizer, any other r affects only queries and keys."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qkflow.circuits import circuit_groups
from qkflow.errors import UsageError
from qkflow.models import Decoder, DecoderConfig
from qkflow.models.one_layer import OneLayer, OneLayerConfig

TOKENS = torch.arange(12).view(2, 6) % 7
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
}


def decoder() -> nn.Module:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(width=8, layers=2, heads=2, hidden=12, vocabulary=7))


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 7, "n_positions": 6}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=None, eos_token_id=None)).eval()


def logits(model: nn.Module) -> Tensor:
    output = model(TOKENS)
    return output[0] if isinstance(output, tuple) else output.logits


def train(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        logits(model).log_softmax(-1)[..., 3].mean().backward()
        optimizer.step()


@pytest.mark.parametrize("make", [decoder, gpt2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ratio_of_one_is_bit_identical_to_the_plain_optimizer(make: Callable[[], nn.Module], name: str) -> None:
    plain, grouped = make(), make()
    train(plain, OPTIMIZERS[name](list(plain.parameters())), 5)
    train(grouped, OPTIMIZERS[name](circuit_groups(grouped, 1e-2)), 5)
    assert list(plain.state_dict()) == list(grouped.state_dict())
    for key, value in plain.state_dict().items():
        assert torch.equal(value, grouped.state_dict()[key]), key
    assert not torch.equal(logits(make()), logits(plain))


def test_only_queries_and_keys_move_r_times_as_far() -> None:
    start, plain, fast = decoder(), decoder(), decoder()
    for model, r in ((plain, 1.0), (fast, 16.0)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)  # branches initialized at zero have no gradient
        train(model, torch.optim.SGD(circuit_groups(model, 1e-2, r=r)), 1)
    for (name, before), plain_after, fast_after in zip(
        start.named_parameters(), plain.parameters(), fast.parameters(), strict=True
    ):
        ratio = 16.0 if ".query." in name or ".key." in name else 1.0
        torch.testing.assert_close(
            fast_after - before - 0.1, ratio * (plain_after - before - 0.1), rtol=1e-3, atol=1e-6
        )


def test_only_matrices_decay() -> None:
    model = decoder()
    groups = circuit_groups(model, 0.5, r=4.0, weight_decay=0.1)
    assert [(group["circuit"], group["lr"], group["weight_decay"]) for group in groups] == [
        ("qk", 2.0, 0.1),
        ("ov", 0.5, 0.1),
        ("rest", 0.5, 0.1),
        ("rest", 0.5, 0.0),
    ]
    for group in groups:
        assert {parameter.ndim >= 2 for parameter in group["params"]} == {group["weight_decay"] > 0}
    assert "weight_decay" not in circuit_groups(model, 0.5)[0]


def test_one_layer_theory_model() -> None:
    model = OneLayer(OneLayerConfig(vocabulary=5, form="FACO"))
    assert [(g["circuit"], len(g["params"])) for g in circuit_groups(model, 0.1, r=5.0)] == [("qk", 2), ("ov", 1)]


def test_frozen_parameters_are_in_no_group() -> None:
    model = decoder()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".value." in name)
    assert [(group["circuit"], len(group["params"])) for group in circuit_groups(model, 0.1)] == [("ov", 2)]
    with pytest.raises(UsageError, match="r = 20 has no effect: no QK parameter of Decoder"):
        circuit_groups(model, 0.1, r=20.0)


@pytest.mark.parametrize("r", [0.0, -1.0, float("inf"), float("nan")])
def test_invalid_ratio_raises_before_splitting(r: float) -> None:
    layer = nn.MultiheadAttention(4, 2)
    with pytest.raises(UsageError, match="r must be a finite number above 0, got"):
        circuit_groups(layer, 0.1, r=r)
    assert "in_proj_weight" in dict(layer.named_parameters())


def test_resuming_from_state_dicts_is_bit_identical() -> None:
    def optimizer(model: nn.Module) -> Any:
        return torch.optim.AdamW(circuit_groups(model, 1e-2, r=5.0))

    model = gpt2()
    model_optimizer = optimizer(model)
    train(model, model_optimizer, 2)
    resumed = gpt2()
    resumed.load_state_dict(model.state_dict())
    resumed_optimizer = optimizer(resumed)
    resumed_optimizer.load_state_dict(copy.deepcopy(model_optimizer.state_dict()))
    train(model, model_optimizer, 2)
    train(resumed, resumed_optimizer, 2)
    assert torch.equal(logits(model), logits(resumed))
