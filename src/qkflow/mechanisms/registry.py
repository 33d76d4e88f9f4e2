"""Mechanisms by name, and the spec that selects one with its options: `mechanism[+coupling][:key=value,...]`.

    standard:window=128            differential+affine            standard+hamiltonian:steps=3,window=128

A coupling is named by its dynamics. Options of the mechanism and of the coupling follow the colon, in any order.

Other packages add mechanisms with the entry point group `qkflow.mechanisms`, whose entries are config classes: frozen
dataclasses that build a mechanism when called with (width, heads, layer, layers).

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
from qkflow.mechanisms.delta_family import (
    CombaConfig,
    DeltaNetConfig,
    EDAConfig,
    GatedDeltaNetConfig,
    KDAConfig,
    QDeltaConfig,
)
from qkflow.mechanisms.differential import DifferentialConfig
from qkflow.mechanisms.kuramoto import GroupConfig, KuramotoConfig
from qkflow.mechanisms.nonlinear_query import NonlinearQueryConfig
from qkflow.mechanisms.softmax import StandardConfig

_REGISTERED: dict[str, type[Any]] = {
    "standard": StandardConfig,
    "differential": DifferentialConfig,
    "coupled": CoupledConfig,
    "nonlinear-query": NonlinearQueryConfig,
    "deltanet": DeltaNetConfig,
    "gated-deltanet": GatedDeltaNetConfig,
    "qdelta": QDeltaConfig,
    "kda": KDAConfig,
    "eda": EDAConfig,
    "comba": CombaConfig,
    "kuramoto": KuramotoConfig,
    "group": GroupConfig,
}
_COUPLING_OPTIONS = {field.name for field in dataclasses.fields(CouplingConfig)}
_ENTRY_POINTS = "qkflow.mechanisms"


def register(name: str, config: type[Any]) -> None:
    """Register a mechanism in this process; an installed package uses the entry point instead."""
    _check(name, config)
    if name in _REGISTERED and _REGISTERED[name] is not config:
        raise UsageError(f"a mechanism named {name!r} is registered already: choose another name")
    _REGISTERED[name] = config


def mechanisms() -> Mapping[str, type[Any]]:
    """Return the config class of every mechanism, including those of installed packages.

    >>> mechanisms()["standard"].__name__
    'StandardConfig'
    """
    configs = dict(_REGISTERED)
    for name, entry in _installed().items():
        try:
            configs[name] = _load(entry)
        except UsageError as error:
            warnings.warn(str(error), stacklevel=2)
    return configs


def mechanism(spec: str) -> Factory:
    """Return the factory that a spec describes.

    >>> mechanism("standard:window=128,key_heads=2").window
    128
    >>> mechanism("differential+affine:window=128,alternations=2").coupling.alternations
    2
    """
    full_name, _, options = spec.partition(":")
    name, plus, dynamics = full_name.partition("+")
    installed = {} if name in _REGISTERED else _installed()
    if name not in _REGISTERED and name not in installed:
        raise unknown("mechanism", name, {*_REGISTERED, *installed})
    config = _load(installed[name]) if name in installed else _REGISTERED[name]
    values = _parse(options, spec)
    default = _default_coupling(config)
    if plus or default is not None:
        coupling = {"dynamics": dynamics} if default is None or plus else to_dict(default)
        values = _with_coupling(config, coupling, values, spec)
    return cast(Factory, from_dict(config, values, where=f" of {name!r}"))


def _default_coupling(config: type[Any]) -> CouplingConfig | None:
    for field in dataclasses.fields(config):
        if field.name == "coupling" and field.default_factory is not dataclasses.MISSING:
            return cast(CouplingConfig, field.default_factory())
    return None


def _with_coupling(config: type[Any], coupling: dict[str, Any], values: dict[str, Any], spec: str) -> dict[str, Any]:
    """Move the coupling's options from `values` into a `CouplingConfig` with the defaults `coupling`."""
    dynamics = coupling["dynamics"]
    fields = {field.name for field in dataclasses.fields(config)}
    full_name = spec.partition(":")[0]
    name = full_name.partition("+")[0]
    if "coupling" not in fields:
        raise UsageError(f"{spec!r}: {name!r} takes no coupling")
    if dynamics not in DYNAMICS:
        raise unknown("coupling", dynamics, DYNAMICS)
    if "coupling" in values or "dynamics" in values:
        raise UsageError(f"{spec!r}: name the dynamics before the colon, as in {name}+{dynamics}")
    options = (fields | _COUPLING_OPTIONS) - {"coupling", "dynamics"}
    for key in values:
        if key not in options:
            raise unknown(f"config key of {full_name!r}", key, options)
    coupling = coupling | {key: value for key, value in values.items() if key in _COUPLING_OPTIONS}
    others = {key: value for key, value in values.items() if key not in _COUPLING_OPTIONS}
    return others | {"coupling": from_dict(CouplingConfig, coupling)}


def _installed() -> dict[str, EntryPoint]:
    """Entry points of other packages, not imported yet, so that a broken package affects its own names only."""
    return {entry.name: entry for entry in entry_points(group=_ENTRY_POINTS) if entry.name not in _REGISTERED}


def _load(entry: EntryPoint) -> type[Any]:
    try:
        config = entry.load()
    except Exception as error:  # importing another package may raise anything
        raise UsageError(f"mechanism {entry.name!r} ({entry.value}) cannot be imported: {error}") from error
    _check(entry.name, config)
    return config


def _check(name: str, config: type[Any]) -> None:
    if not dataclasses.is_dataclass(config) or not any("__call__" in vars(kind) for kind in type.mro(config)):
        raise UsageError(f"{name!r} must be a dataclass with __call__(width, heads, layer, layers), got {config!r}")


def _parse(options: str, spec: str) -> dict[str, Any]:
    """Parse `key=value,...`; values that are not Python literals are strings."""
    values: dict[str, Any] = {}
    for item in filter(None, options.split(",")):
        key, equals, text = item.partition("=")
        if not equals:
            raise UsageError(f"{spec!r}: expected key=value after the colon, got {item!r}")
        if (key := key.strip()) in values:
            raise UsageError(f"{spec!r} sets {key} twice: set it once")
        try:
            values[key] = ast.literal_eval(text.strip())
        except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError):
            values[key] = text.strip()
    return values
