from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest

import qkflow
from qkflow.errors import UsageError
from qkflow.laws import check
from qkflow.mechanisms import (
    CoupledConfig,
    CouplingConfig,
    DifferentialAttention,
    DifferentialConfig,
    StandardAttention,
    StandardConfig,
    mechanism,
    mechanisms,
    register,
    registry,
)
from qkflow.models import Decoder, DecoderConfig


@dataclass(frozen=True, kw_only=True)
class ThirdParty:
    """A config of another package."""

    window: int | None = None

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> StandardAttention:
        return StandardAttention(width, heads, layer, layers, config=StandardConfig(window=self.window))


@dataclass(frozen=True)
class NotCallable:
    window: int = 1


@dataclass(frozen=True, kw_only=True)
class ThirdPartyWithCoupling:
    """A config of another package that takes a coupling."""

    window: int | None = None
    coupling: CouplingConfig | None = None

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> StandardAttention:
        config = StandardConfig(window=self.window, coupling=self.coupling)
        return StandardAttention(width, heads, layer, layers, config=config)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {"standard": StandardConfig, "differential": DifferentialConfig})


@pytest.fixture
def coupled() -> None:
    register("coupled", CoupledConfig)


def install(monkeypatch: pytest.MonkeyPatch, **entries: str) -> None:
    """Install a fake distribution with these entry points."""

    def entry_points(*, group: str) -> list[EntryPoint]:
        assert group == "qkflow.mechanisms"
        return [EntryPoint(name, value, group) for name, value in entries.items()]

    monkeypatch.setattr(registry, "entry_points", entry_points)


def test_name_builds_the_mechanism_with_defaults() -> None:
    assert isinstance(mechanism("standard")(8, 2, layer=0, layers=1), StandardAttention)
    assert isinstance(mechanism("differential")(8, 2, layer=0, layers=1), DifferentialAttention)
    assert mechanism("standard:") == StandardConfig()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("standard:window=128", StandardConfig(window=128)),
        ("standard: window = 128 , key_heads=2", StandardConfig(window=128, key_heads=2)),
        ("standard:rotary_base=None,qk_norm=True", StandardConfig(rotary_base=None, qk_norm=True)),
        ("standard:rotary_base=500", StandardConfig(rotary_base=500.0)),
        ("differential:rotary_base=5e5", DifferentialConfig(rotary_base=5e5)),
    ],
)
def test_options_after_the_colon_are_parsed(spec: str, expected: object) -> None:
    assert mechanism(spec) == expected


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("standart", r"unknown mechanism 'standart': did you mean 'standard'\? Known: differential, standard"),
        ("", "unknown mechanism '': Known: differential, standard"),
        ("standard:windw=3", r"unknown config key 'windw' of 'standard': did you mean 'window'\?"),
        ("standard:window=wide", r"config key 'window' .*got 'wide': expected int \| None"),
        ("standard:window=1.5", r"config key 'window' .*got 1\.5: expected int \| None"),
        ("standard:qk_norm=1", r"config key 'qk_norm' .*got 1: expected bool"),
        ("standard:window=", r"config key 'window' .*got '': expected int"),
        ("standard:window={[]:1}", "config key 'window'"),
        ("standard:window", "'standard:window': expected key=value after the colon, got 'window'"),
    ],
)
def test_invalid_specs_raise_in_one_line(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        mechanism(spec)
    assert "\n" not in str(caught.value)


def test_registered_mechanism_is_found_by_name() -> None:
    register("mine", ThirdParty)
    assert mechanisms()["mine"] is ThirdParty
    assert mechanism("mine:window=3") == ThirdParty(window=3)
    assert Decoder(DecoderConfig(width=8, layers=1, heads=2, hidden=8, mechanism="mine")) is not None


def test_only_the_same_config_can_be_registered_twice() -> None:
    register("mine", ThirdParty)
    register("mine", ThirdParty)
    with pytest.raises(UsageError, match="a mechanism named 'standard' is registered already"):
        register("standard", ThirdParty)


@pytest.mark.parametrize("config", [int, NotCallable, StandardAttention], ids=lambda c: c.__name__)
def test_invalid_config_classes_cannot_be_registered(config: Any) -> None:
    with pytest.raises(UsageError, match=r"must be a dataclass with __call__"):
        register("mine", config)
    assert "mine" not in mechanisms()


def test_entry_points_of_installed_packages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "their_package", SimpleNamespace(ThirdParty=ThirdParty))
    install(monkeypatch, mine="their_package:ThirdParty")
    assert set(mechanisms()) == {"standard", "differential", "mine"}
    factory = mechanism("mine:window=3")
    assert dataclasses.asdict(factory) == {"window": 3}  # type: ignore[call-overload]
    assert {verdict.outcome for verdict in check(factory, only=["causality", "decoding"])} == {"passed"}


def test_entry_points_cannot_replace_built_in_names(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, standard="json:JSONDecoder")
    assert mechanisms()["standard"] is StandardConfig


def test_broken_entry_point_does_not_affect_other_mechanisms(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, broken="no_such_package_at_all:Config")
    assert mechanism("standard") == StandardConfig()
    register("mine", ThirdParty)
    assert mechanism("mine") == ThirdParty()


def test_broken_entry_point_raises_when_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, broken="no_such_package_at_all:Config")
    with pytest.raises(UsageError, match="no_such_package_at_all"):
        mechanism("broken")
    with pytest.raises(UsageError, match="did you mean 'broken'"):
        mechanism("brokn")


LEAPFROG = CouplingConfig(steps=3, integrator="leapfrog")


@pytest.mark.usefixtures("coupled")
@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("standard+hamiltonian", StandardConfig(coupling=CouplingConfig())),
        ("standard+hamiltonian:", StandardConfig(coupling=CouplingConfig())),
        ("differential+affine", DifferentialConfig(coupling=CouplingConfig(dynamics="affine"))),
        ("standard+residual-query", StandardConfig(coupling=CouplingConfig(dynamics="residual-query"))),
        ("standard+hamiltonian:steps=3,integrator=leapfrog,window=4", StandardConfig(window=4, coupling=LEAPFROG)),
        ("standard+hamiltonian:window=4,integrator=leapfrog,steps=3", StandardConfig(window=4, coupling=LEAPFROG)),
        ("standard+hamiltonian:steps=3,window=4,integrator=leapfrog", StandardConfig(window=4, coupling=LEAPFROG)),
        ("standard+hamiltonian: dt = 1 ", StandardConfig(coupling=CouplingConfig(dt=1.0))),
        ("coupled", CoupledConfig()),
        ("coupled:", CoupledConfig()),
        ("coupled:steps=3", CoupledConfig(coupling=CouplingConfig(steps=3))),
        ("coupled:key_heads=2,steps=3", CoupledConfig(key_heads=2, coupling=CouplingConfig(steps=3))),
        ("coupled+affine", CoupledConfig(coupling=CouplingConfig(dynamics="affine"))),
        (
            "coupled+affine:alternations=2",
            CoupledConfig(coupling=CouplingConfig(dynamics="affine", alternations=2)),
        ),
    ],
)
def test_coupling_spec_accepts_options_in_any_order(spec: str, expected: object) -> None:
    assert mechanism(spec) == expected
    assert mechanism(spec)(16, 4, layer=0, layers=1).coupling.config == expected.coupling  # type: ignore[attr-defined]


@pytest.mark.usefixtures("coupled")
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "standard+nonsense",
            "unknown coupling 'nonsense': Known: affine, euler, hamiltonian, residual-query, uncoupled",
        ),
        ("standard+hamiltonan", r"unknown coupling 'hamiltonan': did you mean 'hamiltonian'\?"),
        ("standard+", "unknown coupling '': Known: affine"),
        ("standard+affine+euler", r"unknown coupling 'affine\+euler'"),
        ("+affine", "unknown mechanism ''"),
        ("standart+affine", "did you mean 'standard'"),
        ("standard+affine:steps=3", "affine dynamics has no option steps: expected alternations, hidden, sharing"),
        ("coupled+affine:steps=3", "affine dynamics has no option steps"),
        ("coupled:alternations=2", "hamiltonian dynamics has no option alternations"),
        ("standard+hamiltonian:steps=0", "steps must be from 1 to 7, got 0"),
        ("standard+hamiltonian:steps=8", "steps must be from 1 to 7, got 8"),
        ("coupled:steps=-1", "steps must be from 1 to 7, got -1"),
        ("standard+hamiltonian:steps=2.5", r"config key 'steps' .*got 2\.5: expected int"),
        ("standard+hamiltonian:dt=nan", "'?dt'?.* got '?nan"),
        ("standard+hamiltonian:dt=1e999", "dt must be a finite number, got inf"),
        ("standard+hamiltonian:integrator=leapfrogg", "did you mean 'leapfrog'"),
        ("standard+hamiltonian:sharing=layer", "did you mean 'layers'"),
        ("standard+hamiltonian:step=3", "unknown config key .*'step': did you mean 'steps'"),
        ("standard+hamiltonian:windw=3", "unknown config key .*'windw': did you mean 'window'"),
        ("coupled:step=3", "unknown config key .*'step': did you mean 'steps'"),
        ("standard:steps=3", r"unknown config key .*'steps'"),
        ("standard+affine:dynamics=euler", "dynamics"),
    ],
)
def test_invalid_coupling_specs_raise_in_one_line(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        mechanism(spec)
    assert "\n" not in str(caught.value)


def test_mechanisms_of_other_packages_accept_a_coupling_if_they_have_the_field() -> None:
    register("mine", ThirdParty)
    with pytest.raises(UsageError, match=r"'mine\+affine': 'mine' takes no coupling"):
        mechanism("mine+affine")
    register("theirs", ThirdPartyWithCoupling)
    actual = mechanism("theirs+affine:window=3,alternations=2")
    assert actual == ThirdPartyWithCoupling(window=3, coupling=CouplingConfig(dynamics="affine", alternations=2))
    assert mechanism("theirs") == ThirdPartyWithCoupling()


def test_the_config_and_the_class_of_every_mechanism_are_public_names() -> None:
    for name, config in registry._REGISTERED.items():
        built = {config.__name__, type(config()(width=32, heads=2, layer=0, layers=1)).__name__}
        assert built <= {*qkflow.__all__}, name
