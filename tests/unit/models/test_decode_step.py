"""The native step of a decoded token: the same outputs and states as the general path."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils import prune
from torch.testing import assert_close

from qkflow.models import Decoder, DecoderConfig
from qkflow.ops import few_rows
from qkflow.ops.csrc import build

build.load()
pytestmark = pytest.mark.skipif(not build.is_loaded(), reason="no C kernels")

MECHANISMS = [
    *("standard", "standard:window=5", "standard:key_heads=2", "standard:rotary_base=None", "coupled:window=7"),
    *("deltanet", "gated-deltanet", "qdelta", "qdelta:lam=0.5", "qdelta:decay=False,gate=False", "qdelta+hamiltonian"),
    *("kda", "kda+hamiltonian", "comba", "comba+hamiltonian", "eda", "eda:gate=False", "eda+hamiltonian"),
    *("qdelta:erase=own", "qdelta:erase=own,lam=0.5", "qdelta:erase=own,decay=False"),
    *("kuramoto", "kuramoto:window=6", "kuramoto:frustrated=True", "kuramoto:rotary_base=None"),
    *("differential", "differential:window=5", "differential+hamiltonian"),
]


def decoder(mechanism: str) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(width=48, layers=2, heads=4, hidden=70, mechanism=mechanism)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # blocks are zero at initialization
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("rows", [1, 3])
def test_step_equals_the_whole_sequence(mechanism: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = decoder(mechanism), torch.randint(0, 256, (rows, 40))
    assert all(layer._can_step for layer in model.mechanisms)  # pyright: ignore[reportAttributeAccessIssue]
    with torch.inference_mode():
        with monkeypatch.context() as patch:
            patch.setattr(few_rows, "MAX_ROWS", 0)
            expected, _ = model(tokens)
        _, state = model(tokens[:, :9])
        for i in range(9, 40):
            first, _ = model(tokens[:, i : i + 1], state)
            logits, new_state = model(tokens[:, i : i + 1], state)  # the state has been continued already
            assert torch.equal(first, logits)
            assert_close(logits[:, 0], expected[:, i], rtol=0, atol=1e-11)
            assert state.length.tolist() == [i] * rows
            state = new_state


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_step_and_general_path_continue_each_other(mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = decoder(mechanism), torch.randint(0, 256, (2, 30))
    with torch.no_grad():
        expected, state = model(tokens)[0], model(tokens[:, :3])[1]
        for i in range(3, 30):
            monkeypatch.setattr(few_rows, "MAX_ROWS", 8 * (i % 3 > 0))
            logits, state = model(tokens[:, i : i + 1], state)
            assert_close(logits[:, 0], expected[:, i], rtol=0, atol=1e-11)


@pytest.mark.parametrize("mechanism", ["standard", "qdelta"])
def test_hooks_of_a_projection_are_called(mechanism: str) -> None:
    model, tokens = decoder(mechanism), torch.randint(0, 256, (1, 4))
    calls: list[int] = []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda *_: calls.append(1))
    with torch.inference_mode():
        _, state = model(tokens)
        n_calls = len(calls)
        model(tokens[:, :1], state)
    assert len(calls) == 2 * n_calls


@pytest.mark.parametrize(
    ("mechanism", "names"),
    [
        ("gated-deltanet", ("query_conv", "head_norm", "decay.A_log")),
        ("kda", ("key_conv", "decay.dt_bias")),
        ("eda", ("own_conv",)),
        ("comba", ("feedback", "correction")),
    ],
)
def test_a_pruned_parameter_is_used(mechanism: str, names: tuple[str, ...]) -> None:
    """`torch.nn.utils.prune` replaces a parameter with an attribute that a hook computes."""
    model, tokens = decoder(mechanism), torch.randint(0, 256, (1, 6))
    for layer in model.mechanisms:
        for name in names:
            module, _, parameter = name.rpartition(".")
            prune.random_unstructured(layer.get_submodule(module), parameter, amount=2)
    with torch.no_grad():
        expected, state = model(tokens)[0], model(tokens[:, :5])[1]
        assert_close(model(tokens[:, 5:], state)[0][:, 0], expected[:, 5], rtol=0, atol=1e-11)


@pytest.mark.parametrize("mechanism", ["standard", "kuramoto", "qdelta"])
def test_a_state_of_another_shape_is_not_read(mechanism: str) -> None:
    torch.manual_seed(0)
    wide = Decoder(DecoderConfig(width=64, layers=2, heads=4, hidden=70, mechanism=mechanism)).double().eval()
    model, tokens = decoder(mechanism), torch.randint(0, 256, (1, 4))
    with torch.inference_mode():
        _, state = wide(tokens)
        _, state = wide(tokens[:, :1], state)
        with pytest.raises((ValueError, RuntimeError)):
            model(tokens[:, :1], state)


def test_nan_is_reported_by_the_delta_rule() -> None:
    model, tokens = decoder("qdelta"), torch.randint(0, 256, (1, 4))
    with torch.inference_mode():
        _, state = model(tokens)
        model.embedding.weight.fill_(torch.nan)
        with pytest.raises(ValueError, match="beta"):
            model(tokens[:, :1], state)
