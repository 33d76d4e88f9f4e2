"""Mechanisms by name, and the short way to write one down: `mechanism[+coupling][:key=value,...]`.

    standard:window=128            differential+affine            standard+hamiltonian:steps=3,window=128

A coupling is named by its dynamics; the options after the colon are the mechanism's and the coupling's, in any order.

Other packages join through the entry point group `qkflow.mechanisms`, whose entries are config classes: frozen
dataclasses that make a mechanism when called with (width, heads, layer, layers).

    [project.entry-points."qkflow.mechanisms"]
    mine = "mypackage.attention:MyConfig"
"""

from __future__ import annotations

import ast
import dataclasses
import warnings
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from qkflow.config import from_dict, to_dict
from qkflow.errors import UsageError, unknown
from qkflow.mechanisms.base import Factory
from qkflow.mechanisms.coupled import CoupledConfig
from qkflow.mechanisms.coupling import DYNAMICS, CouplingConfig
from qkflow.mechanisms.delta import DeltaNetConfig, GatedDeltaNetConfig, QDeltaConfig
from qkflow.mechanisms.differential import DifferentialConfig
from qkflow.mechanisms.kuramoto import GroupConfig, KuramotoConfig
from qkflow.mechanisms.standard import StandardConfig

_BUILT_IN: dict[str, type[Any]] = {
    "standard": StandardConfig,
    "differential": DifferentialConfig,
    "coupled": CoupledConfig,
    "deltanet": DeltaNetConfig,
    "gated-deltanet": GatedDeltaNetConfig,
    "qdelta": QDeltaConfig,
    "kuramoto": KuramotoConfig,
    "group": GroupConfig,
}
_COUPLING = {field.name for field in dataclasses.fields(CouplingConfig)}
_GROUP = "qkflow.mechanisms"


def register(name: str, config: type[Any]) -> None:
    """Make a mechanism known in this process; a package does it for good through the entry point."""
    _check(name, config)
    if name in _BUILT_IN and _BUILT_IN[name] is not config:
        raise UsageError(f"a mechanism named {name!r} exists already: choose another name")
    _BUILT_IN[name] = config


def mechanisms() -> Mapping[str, type[Any]]:
    """The config class of every known mechanism, ours and those that installed packages add.

    >>> sorted(mechanisms())
    ['coupled', 'deltanet', 'differential', 'gated-deltanet', 'group', 'kuramoto', 'qdelta', 'standard']
    """
    known = dict(_BUILT_IN)
    for name, entry in _installed().items():
        try:
            known[name] = _load(entry)
        except UsageError as error:
            warnings.warn(str(error), stacklevel=2)
    return known


def mechanism(spec: str) -> Factory:
    """The factory that a spec names.

    >>> mechanism("standard:window=128,key_heads=2")
    StandardConfig(key_heads=2, rotary_base=10000.0, qk_norm=False, window=128, coupling=None)
    >>> mechanism("differential+affine:window=128,alternations=2").coupling.alternations
    2
    """
    before, _, options = spec.partition(":")
    name, plus, dynamics = before.partition("+")
    installed = {} if name in _BUILT_IN else _installed()
    if name not in _BUILT_IN and name not in installed:
        raise unknown("mechanism", name, {*_BUILT_IN, *installed})
    config = _load(installed[name]) if name in installed else _BUILT_IN[name]
    values = _parse(options, spec)
    usual = _usual_coupling(config)
    if plus or usual is not None:
        values = _with_coupling(
            config, {"dynamics": dynamics} if usual is None or plus else to_dict(usual), values, spec
        )
    return cast(Factory, from_dict(config, values, where=f" of {name!r}"))


def _usual_coupling(config: type[Any]) -> CouplingConfig | None:
    """The coupling that a mechanism has without being asked."""
    for field in dataclasses.fields(config):
        if field.name == "coupling" and field.default_factory is not dataclasses.MISSING:
            return cast(CouplingConfig, field.default_factory())
    return None


def _with_coupling(config: type[Any], coupling: dict[str, Any], values: dict[str, Any], spec: str) -> dict[str, Any]:
    """The options of a mechanism, with those of its coupling gathered into one that begins as `coupling`."""
    dynamics = coupling["dynamics"]
    own = {field.name for field in dataclasses.fields(config)}
    name = spec.partition(":")[0]
    if "coupling" not in own:
        raise UsageError(f"{spec!r}: {name.partition('+')[0]!r} takes no coupling")
    if dynamics not in DYNAMICS:
        raise unknown("coupling", dynamics, DYNAMICS)
    if "coupling" in values or "dynamics" in values:
        raise UsageError(f"{spec!r}: name the dynamics before the colon, as in {name.partition('+')[0]}+{dynamics}")
    options = (own | _COUPLING) - {"coupling", "dynamics"}
    for key in values:
        if key not in options:
            raise unknown(f"config key of {name!r}", key, options)
    moving = {key: value for key, value in values.items() if key in _COUPLING}
    rest = {key: value for key, value in values.items() if key not in _COUPLING}
    return rest | {"coupling": from_dict(CouplingConfig, {**coupling, **moving})}


def _installed() -> dict[str, EntryPoint]:
    """What other packages offer, not yet imported: a broken one takes away its own names alone."""
    return {entry.name: entry for entry in entry_points(group=_GROUP) if entry.name not in _BUILT_IN}


def _load(entry: EntryPoint) -> type[Any]:
    try:
        config = entry.load()
    except Exception as error:  # whatever another package throws while it is imported
        raise UsageError(f"mechanism {entry.name!r} ({entry.value}) cannot be imported: {error}") from error
    _check(entry.name, config)
    return config


def _check(name: str, config: type[Any]) -> None:
    if not dataclasses.is_dataclass(config) or not any("__call__" in vars(kind) for kind in type.mro(config)):
        raise UsageError(f"{name!r} must be a dataclass with __call__(width, heads, layer, layers), got {config!r}")


def _parse(options: str, spec: str) -> dict[str, Any]:
    """`key=value,...` as plain data; a value that is no Python literal is a string."""
    values: dict[str, Any] = {}
    for item in filter(None, options.split(",")):
        key, equals, text = item.partition("=")
        if not equals:
            raise UsageError(f"{spec!r}: expected key=value after the colon, got {item!r}")
        try:
            values[key.strip()] = ast.literal_eval(text.strip())
        except (SyntaxError, TypeError, ValueError):
            values[key.strip()] = text.strip()
    return values
