"""Locating the first non-finite value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qkflow.models import Decoder
from qkflow.training.divergence import first_bad_gradient, first_bad_module, first_bad_parameter


def test_the_first_layer_with_a_non_finite_output_is_found(configure: Any) -> None:
    names = [name for name, _ in Decoder(configure().model).named_parameters()]
    for number, name in enumerate(names):
        bad = float("inf" if number % 2 else "nan")
        model = Decoder(configure().model)
        with torch.no_grad():
            model.get_parameter(name).fill_(bad)
        assert first_bad_module(model, lambda: model(torch.arange(6)[None])) == name.removesuffix(".weight")  # noqa: B023
        assert first_bad_parameter(model) == name


def test_a_finite_model_has_no_bad_module(configure: Any) -> None:
    model = Decoder(configure().model)
    model(torch.arange(6)[None])[0].sum().backward()
    assert first_bad_module(model, lambda: model(torch.arange(6)[None])) is None
    assert first_bad_gradient(model) is None
    assert first_bad_parameter(model) is None
    assert not any(module._forward_hooks for module in model.modules())


def test_hooks_are_removed_when_the_forward_pass_fails() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError):
        first_bad_module(model, lambda: model(torch.ones(1, 5)))
    assert not model._forward_hooks


class Explodes(torch.autograd.Function):
    """A finite forward pass with an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / 0


def test_the_first_non_finite_gradient_of_the_backward_pass_is_found() -> None:
    first, second, third = (nn.Linear(3, 3) for _ in range(3))
    model = nn.ModuleList([first, second, third])
    third(Explodes.apply(second(first(torch.ones(2, 3))))).sum().backward()
    assert first_bad_gradient(model) in ("1.weight", "1.bias")
