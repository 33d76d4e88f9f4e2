"""Whether a coupling is used at all: what passes between queries and keys in each layer, and what their energy does.

Figures are taken on the very queries and keys that a layer projects from one text; `qkflow.mechanisms.observed` says
what they are. They tell what a coupling does, not whether it helps: a comparison tells that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from qkflow.errors import UsageError
from qkflow.mechanisms.base import Mechanism, Stream
from qkflow.mechanisms.delta import DeltaMechanism
from qkflow.mechanisms.observed import EnergyPath
from qkflow.mechanisms.softmax import SoftmaxMechanism
from qkflow.models import Decoder
from qkflow.ops.sensitivity import Sensitivity
from qkflow.probes.maps import read_inputs
from qkflow.training import Callback, Result, Run


@dataclass(frozen=True, kw_only=True)
class CouplingLook:
    """The coupling of one layer on one text."""

    dynamics: str
    """Its name, as in a spec."""
    control: bool
    """Whether it is a control, in which queries and keys never meet."""
    dt: float | None
    """The step as learned so far; `None` for a dynamics without one."""
    dt_start: float | None
    """The step it began with."""
    strength: Sensitivity
    """How much of the moved pairs depends on the partner, and on themselves."""
    energy: EnergyPath | None
    """The energy along the steps; `None` where the force has no potential."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What was seen at one step of a training."""

    step: int
    """Steps made."""
    layers: tuple[CouplingLook | None, ...]
    """Each layer; `None` for one without a coupling."""


def energies(model: Decoder, tokens: Sequence[int] | Int[Tensor, " t"]) -> list[CouplingLook | None]:
    """The coupling of each layer on one text; `None` for a layer without one.

    >>> from qkflow.models import DecoderConfig
    >>> mixed = ("standard", "standard+hamiltonian:force=potential,integrator=leapfrog")
    >>> model = Decoder(DecoderConfig(width=32, layers=2, heads=4, hidden=64, mechanism=mixed))
    >>> none, layer = energies(model, [72, 105, 33])
    >>> none, layer.dynamics, len(layer.energy.mean), layer.energy.drift < 0.01
    (None, 'hamiltonian', 2, True)
    """
    with torch.no_grad():
        return [_look(layer, x) for layer, x in read_inputs(model, tokens)]


class EnergyWatch(Callback):
    """Looks at the couplings of a model in training on always the same tokens; training does not notice.

    `history` holds a `Moment` for the start of each session, every evaluation and the end, one a step.

    >>> watch = EnergyWatch([72, 105, 33])  # then train(config, out, callbacks=[watch])
    >>> watch.history
    []
    """

    def __init__(self, tokens: Sequence[int] | Int[Tensor, " t"]) -> None:
        self.tokens = torch.as_tensor(tokens, dtype=torch.int64).clone()
        self.history: list[Moment] = []
        self._model: Decoder | None = None

    def on_start(self, run: Run) -> None:
        """The start, or where training goes on."""
        if not isinstance(run.model, Decoder):
            raise UsageError(f"an EnergyWatch looks at a Decoder, got {type(run.model).__name__}")
        self._model = run.model
        self._note(run.step)

    def on_evaluate(self, record: Mapping[str, Any]) -> None:
        """As often as the model is evaluated."""
        self._note(record["step"])

    def on_end(self, result: Result) -> None:
        """The end."""
        self._note(result.step)
        self._model = None

    def _note(self, step: int) -> None:
        if self._model is None or (self.history and self.history[-1].step == step):
            return
        # Eagerly: these tokens have another shape than training, and compiling for them could change its bits.
        with torch.compiler.set_stance("force_eager"):
            self.history.append(Moment(step=step, layers=tuple(energies(self._model, self.tokens))))


def _look(layer: Mechanism, x: Stream) -> CouplingLook | None:
    if not isinstance(layer, SoftmaxMechanism | DeltaMechanism) or (coupling := layer.coupling) is None:
        return None
    q, k = layer.pairs(x)
    dt = coupling.step_size
    return CouplingLook(
        dynamics=coupling.config.dynamics,
        control=not coupling.pairs,
        dt=dt,
        dt_start=None if dt is None else coupling.config.dt,
        strength=coupling.sensitivity(q, k),
        energy=coupling.energy(q, k),
    )
