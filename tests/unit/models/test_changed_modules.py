"""Hooks, replaced layers, patched `forward` methods and parametrized weights act in training, evaluation and decoding.

Fused operators and native decoding steps read the weights of several modules, and must not do so if a module was
changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.testing import assert_close

from qkflow.mechanisms import mechanisms
from qkflow.models import Classifier, ClassifierConfig, Decoder, DecoderConfig

MECHANISMS = [
    *sorted(mechanisms()),
    *("standard:qk_norm=True,conv=3", "coupled:force=potential", "standard+affine", "standard+uncoupled"),
    *("standard+residual-query", "qdelta+hamiltonian", "differential+hamiltonian"),
    *("kuramoto:gate=content,values=projected", "kuramoto:frustrated=True"),
]
TOKENS = torch.arange(80).reshape(4, 20) * 7 % 31
PROMPT = 17


def decoder(mechanism: str) -> Decoder:
    """A model with a head of its own, in float64, whose branches are not zero."""
    torch.manual_seed(0)
    config = DecoderConfig(width=32, layers=1, heads=4, hidden=24, vocabulary=31, mechanism=mechanism, tied=False)
    model = Decoder(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def train(model: nn.Module) -> Tensor:
    return model.train()(TOKENS)[0]


@torch.no_grad()
def evaluate(model: nn.Module) -> Tensor:
    return model.eval()(TOKENS)[0]


@torch.inference_mode()
def decode(model: nn.Module) -> Tensor:
    logits, state = model.eval()(TOKENS[:, :PROMPT])
    steps = [logits]
    for i in range(PROMPT, TOKENS.shape[1]):
        logits, state = model(TOKENS[:, i : i + 1], state)
        steps.append(logits)
    return torch.cat(steps, 1)


class LowRank(nn.Module):
    """A linear layer with a low-rank update, as an adapter library would insert it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.weight = base, base.weight
        self.down = nn.Parameter(0.3 * torch.randn(2, base.in_features, dtype=torch.float64))
        self.up = nn.Parameter(0.3 * torch.randn(base.out_features, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class Scale(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 1.3 * weight


def submodules(model: nn.Module) -> list[str]:
    """The names of the modules inside the model that are called."""
    return [name for name, module in model.named_modules() if name and not isinstance(module, nn.ModuleList)]


def assert_same(name: str, model: nn.Module, reference: nn.Module) -> None:
    expected = evaluate(reference)
    for run in (train, evaluate, decode):
        text = f"{run.__name__} with a changed {name}"
        assert_close(run(model), expected, rtol=0, atol=1e-10, msg=lambda mismatch, text=text: f"{text}: {mismatch}")


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_replaced_linear_layer_is_called_and_trained(mechanism: str) -> None:
    plain = decoder(mechanism)
    for name in submodules(plain):
        if not isinstance(plain.get_submodule(name), nn.Linear):
            continue
        model, merged = copy.deepcopy(plain), copy.deepcopy(plain)
        adapter = LowRank(cast(nn.Linear, model.get_submodule(name)))
        model.set_submodule(name, adapter)
        merged.get_parameter(f"{name}.weight").data += (adapter.up @ adapter.down).detach()
        assert_same(name, model, merged)
        train(model).square().sum().backward()
        assert adapter.up.grad is not None
        assert adapter.up.grad.any()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_parametrized_weight_is_used(mechanism: str) -> None:
    plain = decoder(mechanism)
    for name, _ in plain.named_parameters():
        model, scaled = copy.deepcopy(plain), copy.deepcopy(plain)
        owner, _, attribute = name.rpartition(".")
        parametrize.register_parametrization(model.get_submodule(owner), attribute, Scale())
        scaled.get_parameter(name).data *= 1.3
        assert_same(name, model, scaled)


def hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, output: changed(output))


def patch(module: nn.Module) -> None:
    original = module.forward
    module.forward = lambda *args, **options: changed(original(*args, **options))


def changed(output: Any) -> Any:
    if isinstance(output, tuple):
        return changed(output[0]), *output[1:]
    return output - torch.linspace(0.1, 0.5, output.shape[-1], dtype=output.dtype)  # a decay stays negative


@pytest.mark.parametrize("change", [hook, patch])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_hooks_and_patched_methods_of_every_module_act(mechanism: str, change: Callable[[nn.Module], None]) -> None:
    plain = decoder(mechanism)
    before = evaluate(plain)
    for name in submodules(plain):
        model = copy.deepcopy(plain)
        change(model.get_submodule(name))
        assert not torch.allclose(evaluate(model), before, rtol=0, atol=1e-6), name
        assert_same(name, model, model)


def test_a_global_hook_is_called_for_every_module() -> None:
    model, called = decoder("coupled"), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: called.append(module))
    try:
        decode(model)
        n_calls = len(called)
        train(model)
    finally:
        handle.remove()
    assert set(called[:n_calls]) == set(called[n_calls:]) == {model, *map(model.get_submodule, submodules(model))}


def test_a_hook_reads_the_queries_before_the_coupling() -> None:
    inputs: list[Tensor] = []
    model = decoder("coupled")
    model.blocks[0].mechanism.coupling.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    train(model)
    evaluate(model)
    assert_close(*inputs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("run", [train, evaluate])
def test_a_replaced_norm_is_called(run: Callable[[nn.Module], Tensor]) -> None:
    model = decoder("standard")
    before = run(model)

    class Doubled(type(model.norm)):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model.blocks[0].feed_forward_norm = Doubled(32).double()
    assert not torch.allclose(run(model), before)


def test_a_hook_of_an_identity_acts_when_decoding() -> None:
    config = ClassifierConfig(width=16, layers=1, heads=2, hidden=8, vocabulary=31, classes=2)
    model = Classifier(config).eval()
    called: list[int] = []
    model.blocks[0].feed_forward_norm.register_forward_hook(lambda *_: called.append(1))
    with torch.inference_mode():
        model.read(TOKENS[:, :1])
    assert called
