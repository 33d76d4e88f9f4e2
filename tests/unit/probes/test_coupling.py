"""Statistics of couplings."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from qkflow.data import CorpusConfig
from qkflow.errors import UsageError
from qkflow.mechanisms import Coupling, CouplingConfig, DifferentialAttention, Mechanism, mechanism
from qkflow.mechanisms.softmax import SoftmaxMechanism
from qkflow.models import Decoder, DecoderConfig
from qkflow.models.blocks import Block
from qkflow.ops.sensitivity import Sensitivity
from qkflow.probes import CouplingRecorder, coupling_stats, diagnostics
from qkflow.probes.coupling import coupling_path, coupling_sensitivity, energy_trajectory, step_size
from qkflow.training import Run, TrainConfig, train

COUPLINGS = {
    "symplectic": CouplingConfig(steps=3),
    "symplectic, a network a head": CouplingConfig(steps=2, sharing="none"),
    "leapfrog": CouplingConfig(integrator="leapfrog", steps=4),
    "leapfrog down a potential": CouplingConfig(integrator="leapfrog", force="potential", steps=3),
    "a drift": CouplingConfig(force="none", steps=2),
    "euler": CouplingConfig(dynamics="euler", steps=3),
    "euler down a potential": CouplingConfig(dynamics="euler", force="potential", steps=3),
    "affine": CouplingConfig(dynamics="affine", alternations=2),
    "uncoupled": CouplingConfig(dynamics="uncoupled", steps=3),
    "uncoupled, a network a head": CouplingConfig(dynamics="uncoupled", steps=3, sharing="none"),
    "residual query": CouplingConfig(dynamics="residual-query"),
}
CONTROLS = [name for name in COUPLINGS if "uncoupled" in name or "nonlinear" in name]


def coupling(config: CouplingConfig, *, queries: int = 3, keys: int = 3, trained: bool = True) -> Coupling:
    decoder = config(queries, keys, 4).double()
    for parameter in decoder.parameters() if trained else ():
        torch.nn.init.normal_(parameter, std=0.3)
    return decoder


def pairs(heads: int = 3, t: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, t, heads, 4, dtype=torch.float64), torch.randn(2, t, heads, 4, dtype=torch.float64)


@pytest.mark.parametrize("name", COUPLINGS)
def test_path_starts_at_the_pairs_and_ends_at_the_output(name: str) -> None:
    config = COUPLINGS[name]
    decoder, (q, k) = coupling(config), pairs()
    path = coupling_path(decoder, q, k)
    assert len(path) == 1 + {"affine": config.alternations, "residual-query": 1}.get(config.dynamics, config.steps)
    assert_close(path[0], (q, k), rtol=0, atol=0)
    assert_close(path[-1], decoder(q, k), rtol=1e-12, atol=1e-12)


def test_path_states_equal_outputs_with_fewer_steps() -> None:
    long = coupling(CouplingConfig(integrator="leapfrog", force="potential", steps=3))
    q, k = pairs()
    for steps, state in enumerate(coupling_path(long, q, k)[1:], start=1):
        short = coupling(CouplingConfig(integrator="leapfrog", force="potential", steps=steps))
        short.load_state_dict(long.state_dict())
        assert_close(state, short(q, k), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", COUPLINGS)
def test_path_of_grouped_queries_is_the_path_of_their_mean(name: str) -> None:
    decoder, (q, k) = coupling(COUPLINGS[name], queries=6, keys=3), pairs()
    path = coupling_path(decoder, q, k)
    together = q.repeat_interleave(2, dim=2)
    moved, key = decoder(together, k)
    assert_close(path[0], (q, k), rtol=0, atol=1e-15)
    assert_close(path[-1], (moved.unflatten(2, (3, 2)).mean(3), key), rtol=1e-12, atol=1e-12)


def test_path_of_mismatched_heads_raises() -> None:
    q, k = pairs(2)
    with pytest.raises(UsageError, match="3 queries and as many keys of width 4"):
        coupling_path(coupling(CouplingConfig()), q, k)


@pytest.mark.parametrize("name", CONTROLS)
def test_controls_have_no_dependence(name: str) -> None:
    decoder = coupling(COUPLINGS[name], queries=6)
    result = coupling_sensitivity(decoder, *pairs())
    assert (result.query_on_key, result.key_on_query) == (0.0, 0.0)
    assert result.query_change > 0.01


@pytest.mark.parametrize("integrator", ["symplectic-euler", "leapfrog"])
def test_initial_hamiltonian_sensitivity_is_that_of_a_drift(integrator: str) -> None:
    for steps in (1, 3):
        decoder = coupling(CouplingConfig(integrator=integrator, steps=steps), trained=False)  # pyright: ignore
        result = coupling_sensitivity(decoder, *pairs())
        assert step_size(decoder) is not None
        assert result.query_on_key == pytest.approx(steps * step_size(decoder), rel=1e-14)
        assert result.key_on_query == result.query_change == result.key_change == 0.0


def test_initial_affine_sensitivity_is_that_of_the_identity() -> None:
    result = coupling_sensitivity(coupling(CouplingConfig(dynamics="affine"), trained=False), *pairs())
    assert result == Sensitivity(
        query_on_query=1.0, query_on_key=0.0, key_on_query=0.0, key_on_key=1.0, query_change=0.0, key_change=0.0
    )


@pytest.mark.parametrize("name", COUPLINGS)
def test_sensitivity_equals_the_jacobian_of_the_module(name: str) -> None:
    decoder, (q, k) = coupling(COUPLINGS[name]), pairs(t=1)
    result = coupling_sensitivity(decoder, q[:1], k[:1])

    def block(after: int, before: int) -> float:
        def move(x: torch.Tensor) -> torch.Tensor:
            rule_inputs = [q[:1], k[:1]]
            rule_inputs[before] = x
            return decoder(*rule_inputs)[after].view(3, 4)

        whole = torch.autograd.functional.jacobian(move, (q, k)[before][:1]).view(3, 4, 3, 4)  # pyright: ignore
        diagonal = torch.stack([whole[head, :, head] for head in range(3)])
        return float((diagonal.square().sum() / 3 / 4).sqrt())

    expected = [block(after, before) for after in (0, 1) for before in (0, 1)]
    actual = [getattr(result, field.name) for field in fields(result)][:4]
    assert actual == pytest.approx(expected, rel=1e-10, abs=1e-15)


def test_sensitivity_samples_tokens_evenly() -> None:
    decoder, (q, k) = coupling(COUPLINGS["euler"]), pairs(t=50)
    selected = torch.tensor([0, 33, 66, 99])
    subset = [x.flatten(0, 1)[selected][None] for x in (q, k)]
    assert (
        coupling_sensitivity(decoder, q, k, max_pairs=12)
        == coupling_sensitivity(decoder, q, k, max_pairs=14)
        == coupling_sensitivity(decoder, *subset)
    )
    assert coupling_sensitivity(decoder, q, k, max_pairs=1) == coupling_sensitivity(
        decoder, q[:1, :1], k[:1, :1]
    )  # at least one token


def test_stats_are_computed_in_float64_on_a_copy() -> None:
    decoder, (q, k) = coupling(COUPLINGS["leapfrog down a potential"]).float(), pairs()
    q, k = q.float(), k.float()
    before = {name: value.clone() for name, value in decoder.state_dict().items()}
    result, energy = coupling_sensitivity(decoder, q, k), energy_trajectory(decoder, q, k)
    wide = decoder.double()
    assert (coupling_sensitivity(wide, q.double(), k.double()), energy_trajectory(wide, q.double(), k.double())) == (
        result,
        energy,
    )
    assert all(torch.equal(value, before[name].double()) for name, value in decoder.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in decoder.parameters())


def test_leapfrog_conserves_energy_better_than_euler() -> None:
    q, k = pairs()
    leapfrog, euler = (coupling(COUPLINGS[f"{name} down a potential"]) for name in ("leapfrog", "euler"))
    for decoder in (leapfrog, euler):
        torch.nn.init.constant_(decoder.dt, 0.2)  # pyright: ignore
    euler.load_state_dict(leapfrog.state_dict())
    good, bad = energy_trajectory(leapfrog, q, k), energy_trajectory(euler, q, k)
    assert good is not None
    assert bad is not None
    assert 0 < 3 * good.drift < bad.drift <= bad.worst
    for decoder in (coupling(config) for config in COUPLINGS.values() if config.force != "potential"):
        assert energy_trajectory(decoder, q, k) is None


def test_energy_is_evaluated_along_the_path() -> None:
    decoder, (q, k) = coupling(COUPLINGS["leapfrog down a potential"]), pairs()
    result = energy_trajectory(decoder, q, k)
    assert result is not None
    along = torch.stack([decoder.force.energy(*state) for state in coupling_path(decoder, q, k)]).flatten(1).detach()  # pyright: ignore
    assert result.mean == pytest.approx(along.mean(1).tolist())
    assert result.median == pytest.approx(along.quantile(0.5, dim=1).tolist())
    assert (result.low, result.high) == (
        pytest.approx(along.quantile(0.1, dim=1).tolist()),
        pytest.approx(along.quantile(0.9, dim=1).tolist()),
    )
    strayed = ((along - along[0]) / along[0]).abs().amax(0)
    assert (result.drift, result.worst) == pytest.approx((float(strayed.mean()), float(strayed.max())))


def layer(spec: str, heads: int = 8) -> SoftmaxMechanism:
    decoder = mechanism(spec)(32, heads, layer=1, layers=2)
    assert isinstance(decoder, SoftmaxMechanism)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return decoder.double()


@pytest.mark.parametrize("options", ["", ",conv=3,key_shift=True,qk_norm=before"])
@pytest.mark.parametrize("spec", ["standard", "differential"])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_pairs_are_the_inputs_of_the_coupling(spec: str, key_heads: int, options: str) -> None:
    decoder = layer(f"{spec}+hamiltonian:key_heads={key_heads},steps=2{options}")
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    q, k = decoder.pairs(x)
    assert q.shape == k.shape == (2, 5, decoder.shape.keys, 4)
    assert decoder.coupling is not None
    recorded: list[torch.Tensor] = []
    move = decoder.coupling.move

    def spy(q: torch.Tensor, k: torch.Tensor, *, skip_first_drift: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        recorded.extend((q, k))
        return move(q, k, skip_first_drift=skip_first_drift)

    decoder.coupling.move = spy
    with torch.no_grad():  # no drift is folded into the projection
        decoder(x)
    assert_close((q, k), tuple(recorded), rtol=1e-12, atol=1e-12)


def test_pairs_without_a_coupling() -> None:
    decoder, x = layer("standard"), torch.randn(1, 3, 32, dtype=torch.float64)
    assert_close(decoder.pairs(x)[0].flatten(2), decoder.query(x))
    assert diagnostics(decoder, x) == ()


def titles(module: Mechanism) -> list[str]:
    with torch.no_grad():
        return [figure.title for figure in diagnostics(module, torch.randn(1, 6, 32, dtype=torch.float64))]


def test_coupling_diagnostics_are_added_to_those_of_the_mechanism() -> None:
    strength, step, energy = titles(layer("standard+hamiltonian:force=potential"))
    assert titles(layer("standard+hamiltonian")) == titles(layer("standard+uncoupled")) == [strength, step]
    assert titles(layer("standard+affine")) == titles(layer("standard+residual-query")) == [strength]
    (diagonal,) = titles(layer("differential"))
    assert titles(layer("differential+hamiltonian:force=potential")) == [strength, step, energy, diagonal]


def test_diagnostics_contain_the_stats() -> None:
    decoder = layer("differential+euler:force=potential,steps=2,dt=0.25")
    assert isinstance(decoder, DifferentialAttention)
    assert decoder.coupling is not None
    x = torch.randn(1, 6, 32, dtype=torch.float64)
    strength, step, energy, _ = diagnostics(decoder, x)
    result, along = (
        coupling_sensitivity(decoder.coupling, *decoder.pairs(x)),
        energy_trajectory(decoder.coupling, *decoder.pairs(x)),
    )
    assert along is not None
    assert strength.values == ((result.key_on_query,), (result.query_on_key,))
    assert step.values == ((step_size(decoder.coupling),), (0.25,))
    assert (energy.x, energy.values[0]) == ((0.0, 1.0, 2.0), along.mean)


POTENTIAL = "standard+hamiltonian:force=potential,integrator=leapfrog,steps=3,dt=0.2"
HYBRID = ("standard", POTENTIAL, "differential+affine", "standard+uncoupled")
TOKENS = [72, 101, 108, 108, 111, 256, 10]


def model(mechanism: str | tuple[str, ...] = HYBRID, *, dropout: float = 0.0) -> Decoder:
    decoder = Decoder(DecoderConfig(width=32, layers=4, heads=4, hidden=48, mechanism=mechanism, dropout=dropout))
    for parameter in decoder.parameters():  # blocks are zero at initialization
        torch.nn.init.normal_(parameter, std=0.2)
    return decoder


def test_stats_use_the_pairs_of_each_layer() -> None:
    decoder = model()
    x = decoder.embedding(torch.tensor([TOKENS]))
    for block, actual in zip(decoder.blocks, coupling_stats(decoder, TOKENS), strict=True):
        assert isinstance(block, Block)
        assert isinstance(block.mechanism, SoftmaxMechanism)
        if (coupling := block.mechanism.coupling) is None:
            assert actual is None
        else:
            pairs = block.mechanism.pairs(block.mechanism_norm(x))
            assert actual is not None
            assert actual.strength.key_on_query == pytest.approx(coupling_sensitivity(coupling, *pairs).key_on_query)
        x = block(x)[0]


def test_hybrid_stacks_have_stats_per_layer() -> None:
    standard, hamiltonian, affine, control = coupling_stats(model(), TOKENS)
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


def test_probing_leaves_the_model_unchanged() -> None:
    decoder = model(dropout=0.5).train()
    before = {name: value.clone() for name, value in decoder.state_dict().items()}
    state = torch.get_rng_state()
    assert coupling_stats(decoder, TOKENS) == coupling_stats(decoder, torch.tensor(TOKENS))  # no dropout in probes
    assert decoder.training
    assert torch.equal(torch.get_rng_state(), state)
    assert_close(dict(decoder.state_dict()), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in decoder.parameters())


@pytest.mark.parametrize("tokens", [[], [257], [-1]])
def test_invalid_tokens_raise(tokens: list[int]) -> None:
    with pytest.raises(UsageError, match="one token from 0 to 256"):
        coupling_stats(model(), tokens)


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


def test_recorder_follows_training_without_changing_it(config: TrainConfig, tmp_path: Path) -> None:
    watch = CouplingRecorder(TOKENS)
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


def test_recorder_preserves_gradients_and_training_mode(config: TrainConfig, tmp_path: Path) -> None:
    decoder = Decoder(config.model).train()
    for parameter in decoder.parameters():
        parameter.grad = torch.ones_like(parameter)
    run = Run(folder=tmp_path, config=config, model=decoder, step=3, data="")
    watch = CouplingRecorder(TOKENS)
    watch.on_start(run)
    assert [moment.step for moment in watch.history] == [3]
    assert decoder.training
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in decoder.parameters())  # pyright: ignore


def test_recorder_requires_a_decoder(config: TrainConfig, tmp_path: Path) -> None:
    run = Run(folder=tmp_path, config=config, model=torch.nn.Linear(1, 1), step=0, data="")
    with pytest.raises(UsageError, match="Decoder, got Linear"):
        CouplingRecorder(TOKENS).on_start(run)
