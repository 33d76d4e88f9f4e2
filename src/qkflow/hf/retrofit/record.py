"""What a model's config says about its coupling, so that a saved folder can be read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qkflow.config import from_dict, to_dict
from qkflow.errors import UsageError, unknown
from qkflow.mechanisms.coupling import DYNAMICS, CouplingConfig

KEY = "qkflow_retrofit"
"""Where it stands in config.json."""


@dataclass(frozen=True, kw_only=True)
class Retrofit:
    """A coupling, and the layers that have it.

    >>> Retrofit(coupling=CouplingConfig(dynamics="affine"), layers=(0, 2)).layers
    (0, 2)
    """

    coupling: CouplingConfig
    """How queries and keys move."""
    layers: tuple[int, ...]
    """The layers of attention in which they do, counted from 0."""


def resting(coupling: CouplingConfig | str) -> CouplingConfig:
    """The coupling, if it moves nothing before it is trained and can be trained; else a `UsageError`.

    >>> resting("hamiltonian").dt
    0.0
    """
    if isinstance(coupling, str):
        if coupling not in DYNAMICS:
            raise unknown("coupling", coupling, DYNAMICS)
        drifts = coupling in ("hamiltonian", "euler")
        coupling = from_dict(CouplingConfig, {"dynamics": coupling, **({"dt": 0.0} if drifts else {})})
    if coupling.dynamics in ("hamiltonian", "euler") and coupling.dt != 0:
        raise UsageError(
            f"{coupling.dynamics} dynamics with dt={coupling.dt:g} would change the model before it is trained: give"
            " dt=0.0, from where it is learned, or affine dynamics"
        )
    if coupling.dynamics == "uncoupled" and coupling.dt == 0:
        raise UsageError("uncoupled dynamics with dt=0 has no gradient to leave it by: give another dt, such as 0.1")
    if coupling.sharing == "layers":
        raise UsageError("networks that all layers share are not saved with others' models: give sharing='heads'")
    return coupling


def read_record(data: Any) -> Retrofit:
    """The record of a config; anything that is not one is a `UsageError`."""
    if not isinstance(data, Mapping):
        raise UsageError(f"{KEY} in config.json is {data!r}: expected a table of a coupling and its layers")
    return from_dict(Retrofit, data, where=f" in {KEY!r}")


def write_record(record: Retrofit) -> dict[str, Any]:
    """The record as plain data.

    >>> read_record(write_record(Retrofit(coupling=CouplingConfig(), layers=(1,)))).layers
    (1,)
    """
    return to_dict(record)
