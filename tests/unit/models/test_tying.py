"""Coupling networks that all layers share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from qkflow.models import Decoder, DecoderConfig
from qkflow.training.tensors import load_model_tensors, load_tensors, model_tensors, save_tensors


def model(mechanism: Any) -> Decoder:
    """A decoder with perturbed parameters, many of which are initialized to zero."""
    shape = DecoderConfig(width=16, layers=4, heads=4, hidden=24, vocabulary=13, mechanism=mechanism)
    decoder = Decoder(shape).double()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return decoder


def tokens(b: int, t: int) -> Tensor:
    return torch.randint(0, 13, (b, t))


def close(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual, expected, rtol=0, atol=1e-11)


TIED = [
    "standard+hamiltonian:sharing=layers",
    "standard+euler:sharing=layers,force=potential",
    "differential+affine:sharing=layers,alternations=2",
    "standard+uncoupled:sharing=layers",
    "standard+nonlinear-query:sharing=layers",
]


def couplings(decoder: Decoder) -> list[Any]:
    return [block.mechanism.coupling for block in decoder.blocks]  # type: ignore[union-attr]


def networks(coupling: Any) -> dict[str, Tensor]:
    return {name: weight for name, weight in coupling.named_parameters() if name != "dt"}


@pytest.mark.parametrize("mechanism", TIED)
def test_layers_share_one_network_but_not_the_step_size(mechanism: str) -> None:
    decoder, other = model(mechanism), model(mechanism.replace("sharing=layers", "sharing=heads"))
    first, *rest = couplings(decoder)
    for coupling in rest:
        assert networks(coupling).keys() == networks(first).keys()
        assert all(weight is networks(first)[name] for name, weight in networks(coupling).items())
        assert not hasattr(first, "dt") or coupling.dt is not first.dt
    shared = sum(weight.numel() for weight in networks(first).values())
    count, more = (sum(p.numel() for p in each.parameters()) for each in (decoder, other))
    assert count == more - 3 * shared
    assert decoder.cost(5).parameters == count
    difference = couplings(other)
    assert not any(a is b for a in networks(difference[0]).values() for b in networks(difference[1]).values())


@pytest.mark.parametrize("mechanism", TIED)
def test_shared_network_accumulates_gradients_of_all_layers(mechanism: str) -> None:
    decoder, x = model(mechanism), tokens(2, 6)
    difference = model(mechanism.replace("sharing=layers", "sharing=heads"))
    difference.load_state_dict(decoder.state_dict())
    for each in (decoder, difference):
        each(x)[0].square().sum().backward()
    for name, weight in networks(couplings(decoder)[0]).items():
        close(weight.grad, sum(networks(coupling)[name].grad for coupling in couplings(difference)))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(decoder.parameters(), lr=0.1)
    assert len({id(p) for group in optimizer.param_groups for p in group["params"]}) == len([*decoder.parameters()])
    first, *_, last = couplings(decoder)
    expected = {name: weight.detach() - 0.1 * weight.grad for name, weight in networks(last).items()}
    optimizer.step()
    for name, weight in networks(last).items():
        close(weight, expected[name])
    if hasattr(first, "dt"):
        assert first.dt.item() != last.dt.item()


@pytest.mark.parametrize("mechanism", TIED)
def test_checkpoint_stores_a_shared_network_once(mechanism: str, tmp_path: Path) -> None:
    decoder, other, x = model(mechanism), model(mechanism), tokens(2, 6)
    tensors = model_tensors(decoder)
    assert sum(w.numel() for w in tensors.values()) == sum(p.numel() for p in decoder.parameters())
    assert tensors.keys() == {name for name, _ in decoder.named_parameters()}
    save_tensors(tmp_path / "weights.safetensors", tensors)
    assert not torch.equal(other(x)[0], decoder(x)[0])
    load_model_tensors(other, load_tensors(tmp_path / "weights.safetensors"))
    assert torch.equal(other(x)[0], decoder(x)[0])
    first, *rest = couplings(other)
    assert all(weight is networks(first)[name] for each in rest for name, weight in networks(each).items())


def test_hybrid_stacks_share_between_equal_mechanisms_only() -> None:
    shared = "standard+hamiltonian:sharing=layers"
    decoder = model((shared, "differential+hamiltonian:sharing=layers", shared, "standard+hamiltonian"))
    one, two, three, four = (coupling.force.inner for coupling in couplings(decoder))
    assert one is three
    assert len({id(weight) for weight in (one, two, four)}) == 3


def test_sharing_does_not_depend_on_the_spelling_of_the_spec() -> None:
    one, two = "standard+hamiltonian:sharing=layers,steps=2", "standard+hamiltonian: steps=2, sharing=layers"
    assert len({id(coupling.force.inner) for coupling in couplings(model((one, two, two, one)))}) == 1


@pytest.mark.parametrize("mechanism", TIED)
def test_token_by_token_decoding_equals_the_full_sequence(mechanism: str) -> None:
    decoder, x = model(mechanism), tokens(2, 7)
    with torch.no_grad():
        state, steps = None, []
        for token in x.split(1, 1):
            logits, state = decoder(token, state)
            steps.append(logits)
        close(torch.cat(steps, 1), decoder(x)[0])
