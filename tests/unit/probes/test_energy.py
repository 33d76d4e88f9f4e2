"""Looking at couplings: what is seen, in which layers, and that training does not notice."""

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from qkflow.data import CorpusConfig
from qkflow.errors import UsageError
from qkflow.mechanisms.softmax import SoftmaxMechanism
from qkflow.models import Decoder, DecoderConfig
from qkflow.models.blocks import Block
from qkflow.probes import EnergyWatch, energies
from qkflow.training import Run, TrainConfig, train

POTENTIAL = "standard+hamiltonian:force=potential,integrator=leapfrog,steps=3,dt=0.2"
HYBRID = ("standard", POTENTIAL, "differential+affine", "standard+uncoupled")
TOKENS = [72, 101, 108, 108, 111, 256, 10]


def model(mechanism: str | tuple[str, ...] = HYBRID, *, dropout: float = 0.0) -> Decoder:
    made = Decoder(DecoderConfig(width=32, layers=4, heads=4, hidden=48, mechanism=mechanism, dropout=dropout))
    for parameter in made.parameters():  # blocks begin at zero: let every layer matter
        torch.nn.init.normal_(parameter, std=0.2)
    return made


def test_each_layer_is_looked_at_on_the_pairs_that_it_projects_itself() -> None:
    made = model()
    x = made.embedding(torch.tensor([TOKENS]))
    for block, got in zip(made.blocks, energies(made, TOKENS), strict=True):
        assert isinstance(block, Block)
        assert isinstance(block.mechanism, SoftmaxMechanism)
        if (coupling := block.mechanism.coupling) is None:
            assert got is None
        else:
            pairs = block.mechanism.pairs(block.mechanism_norm(x))
            assert got is not None
            assert got.strength.key_on_query == pytest.approx(coupling.sensitivity(*pairs).key_on_query)
        x = block(x)[0]


def test_a_hybrid_stack_shows_what_each_layer_has() -> None:
    standard, hamiltonian, affine, control = energies(model(), TOKENS)
    assert standard is None
    assert hamiltonian is not None
    assert affine is not None
    assert control is not None
    assert (hamiltonian.dynamics, affine.dynamics, control.dynamics) == ("hamiltonian", "affine", "uncoupled")
    assert (hamiltonian.control, affine.control, control.control) == (False, False, True)
    assert (hamiltonian.dt_start, affine.dt, affine.dt_start) == (0.2, None, None)
    assert hamiltonian.energy is not None
    assert len(hamiltonian.energy.mean) == 4
    assert affine.energy is control.energy is None
    assert affine.strength.key_on_query > 0
    assert control.strength.key_on_query == control.strength.query_on_key == 0


def test_the_model_is_left_as_it_was() -> None:
    made = model(dropout=0.5).train()
    before = {name: value.clone() for name, value in made.state_dict().items()}
    state = torch.get_rng_state()
    assert energies(made, TOKENS) == energies(made, torch.tensor(TOKENS))  # no dropout while looking
    assert made.training
    assert torch.equal(torch.get_rng_state(), state)
    assert_close(dict(made.state_dict()), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in made.parameters())


@pytest.mark.parametrize("tokens", [[], [257], [-1]])
def test_tokens_that_are_none_are_refused(tokens: list[int]) -> None:
    with pytest.raises(UsageError, match="one token from 0 to 256"):
        energies(model(), tokens)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    monkeypatch.setenv("QKFLOW_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i}: the quick brown fox number {i * i}\n" for i in range(400)))
    return TrainConfig(
        data=CorpusConfig(source=str(text)),
        model=DecoderConfig(width=16, layers=2, heads=2, hidden=16, mechanism=("standard", POTENTIAL), dropout=0.3),
        steps=5,
        context=16,
        batch=4,
        evaluate_every=2,
        evaluate_tokens=300,
        device="cpu",
    )


def test_a_watch_follows_training_and_training_does_not_notice(config: TrainConfig, tmp_path: Path) -> None:
    watch = EnergyWatch(TOKENS)
    train(config, tmp_path / "watched", callbacks=[watch])
    train(config, tmp_path / "alone")
    watched, alone = ((tmp_path / name / "weights.safetensors").read_bytes() for name in ("watched", "alone"))
    assert watched == alone
    assert [moment.step for moment in watch.history] == [0, 2, 4, 5]
    assert all(moment.layers[0] is None for moment in watch.history)
    first, last = watch.history[0].layers[1], watch.history[-1].layers[1]
    assert first is not None
    assert last is not None
    assert first.dt == pytest.approx(0.2)
    assert last.dt != first.dt
    assert last.dt_start == 0.2


def test_a_watch_leaves_gradients_and_mode_alone(config: TrainConfig, tmp_path: Path) -> None:
    made = Decoder(config.model).train()
    for parameter in made.parameters():
        parameter.grad = torch.ones_like(parameter)
    run = Run(folder=tmp_path, config=config, model=made, step=3, corpus="")
    watch = EnergyWatch(TOKENS)
    watch.on_start(run)
    assert [moment.step for moment in watch.history] == [3]
    assert made.training
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in made.parameters())  # pyright: ignore


def test_a_watch_of_something_else_is_refused(config: TrainConfig, tmp_path: Path) -> None:
    run = Run(folder=tmp_path, config=config, model=torch.nn.Linear(1, 1), step=0, corpus="")
    with pytest.raises(UsageError, match="Decoder, got Linear"):
        EnergyWatch(TOKENS).on_start(run)
