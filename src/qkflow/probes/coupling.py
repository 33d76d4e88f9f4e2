"""How strongly a coupling makes queries and keys depend on each other, and how well it conserves energy.

All numbers are computed on the queries and keys that a layer projects from one text, with the reference operations of
`qkflow.ops.symplectic.naive`, in float64 on a copy of the coupling. They describe what a coupling does, not whether it
helps; `qkflow compare` measures that.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange, reduce, repeat
from jaxtyping import Float, Int
from torch import Tensor

from qkflow.errors import UsageError
from qkflow.mechanisms.base import Mechanism, Stream
from qkflow.mechanisms.coupling import Coupling, Potential, QKMechanism
from qkflow.models import Decoder
from qkflow.ops.sensitivity import Sensitivity, sensitivity
from qkflow.probes.attention import cpu_float64, mechanism_inputs
from qkflow.probes.diagnostics import Diagnostic, diagnostics
from qkflow.training import Callback, Result, Run

Keys = Float[Tensor, "b t g k"]

MAX_PAIRS = 64
"""Default number of pairs whose Jacobian is computed."""


@dataclass(frozen=True, kw_only=True)
class EnergyTrajectory:
    """Energy of the pairs before the first step and after each step."""

    mean: tuple[float, ...]
    low: tuple[float, ...]
    """10 % quantile over pairs."""
    median: tuple[float, ...]
    high: tuple[float, ...]
    """90 % quantile over pairs."""
    drift: float
    """Relative energy error of a pair, max |H_i - H_0| / |H_0|: the mean over pairs."""
    worst: float
    """The same, the maximum over pairs."""


@dataclass(frozen=True, kw_only=True)
class CouplingStats:
    """The coupling of one layer on one text."""

    dynamics: str
    control: bool
    """Whether it is a control, in which queries and keys do not interact."""
    dt: float | None
    """The learned step size; `None` for dynamics without one."""
    dt_start: float | None
    """The initial step size."""
    strength: Sensitivity
    """Norms of the blocks of the Jacobian."""
    energy: EnergyTrajectory | None
    """`None` if the force has no potential."""


def coupling_stats(model: Decoder, tokens: Sequence[int] | Int[Tensor, " t"]) -> list[CouplingStats | None]:
    """Return statistics of each layer's coupling on one text; `None` for a layer without a coupling.

    >>> from qkflow.models import DecoderConfig
    >>> specs = ("standard", "standard+hamiltonian:force=potential,integrator=leapfrog")
    >>> model = Decoder(DecoderConfig(width=32, layers=2, heads=4, hidden=64, mechanism=specs))
    >>> none, layer = coupling_stats(model, [72, 105, 33])
    >>> none, layer.dynamics, len(layer.energy.mean), layer.energy.drift < 0.01
    (None, 'hamiltonian', 2, True)
    """
    with torch.no_grad():
        return [_layer_stats(layer, x) for layer, x in mechanism_inputs(model, tokens)]


def _layer_stats(layer: Mechanism, x: Stream) -> CouplingStats | None:
    if not isinstance(layer, QKMechanism) or (coupling := layer.coupling) is None:
        return None
    q, k = layer.pairs(x)
    dt = step_size(coupling)
    return CouplingStats(
        dynamics=coupling.config.dynamics,
        control=not coupling.is_paired,
        dt=dt,
        dt_start=None if dt is None else coupling.config.dt,
        strength=coupling_sensitivity(coupling, q, k),
        energy=energy_trajectory(coupling, q, k),
    )


@dataclass(frozen=True, kw_only=True)
class CouplingSnapshot:
    """The couplings of a model at one training step."""

    step: int
    layers: tuple[CouplingStats | None, ...]
    """`None` for a layer without a coupling."""


class CouplingRecorder(Callback):
    """Training callback that records `coupling_stats` on fixed tokens; it does not affect training.

    `history` has one `CouplingSnapshot` per step: at the start of a session, at each evaluation, and at the end.

    >>> recorder = CouplingRecorder([72, 105, 33])  # then train(config, out, callbacks=[recorder])
    >>> recorder.history
    []
    """

    def __init__(self, tokens: Sequence[int] | Int[Tensor, " t"]) -> None:
        self.tokens = torch.as_tensor(tokens, dtype=torch.int64).clone()
        self.history: list[CouplingSnapshot] = []
        self._model: Decoder | None = None

    def on_start(self, run: Run) -> None:
        """Record the first step of the session."""
        if not isinstance(run.model, Decoder):
            raise UsageError(f"CouplingRecorder requires a Decoder, got {type(run.model).__name__}")
        self._model = run.model
        self._record(run.step)

    def on_evaluate(self, record: Mapping[str, Any]) -> None:
        """Record the step of an evaluation."""
        self._record(record["step"])

    def on_end(self, result: Result) -> None:
        """Record the last step."""
        self._record(result.step)
        self._model = None

    def _record(self, step: int) -> None:
        if self._model is None or (self.history and self.history[-1].step == step):
            return
        # Eager: a recompilation for this shape could change the bits of the training graph.
        with torch.compiler.set_stance("force_eager"):
            layers = tuple(coupling_stats(self._model, self.tokens))
        self.history.append(CouplingSnapshot(step=step, layers=layers))


def step_size(coupling: Coupling) -> float | None:
    """Return the learned step size; `None` if the dynamics has none."""
    dt = coupling._parameters.get("dt")
    return None if dt is None else float(dt.detach())


def coupling_path(coupling: Coupling, q: Keys, k: Keys) -> list[tuple[Keys, Keys]]:
    """Return the pairs before the first stage and after each stage: the mean query of each group, and its key.

    In a control every query moves alone; all queries of a group start at `q`, and their mean is returned.
    """
    if q.shape != k.shape or k.shape[2:] != (coupling.keys, coupling.width):
        raise UsageError(
            f"expected {coupling.keys} queries and as many keys of width {coupling.width},"
            f" got {list(q.shape[2:])} and {list(k.shape[2:])}"
        )
    group = 1 if coupling.is_paired else coupling.queries // coupling.keys
    states = [(repeat(q, "b t g k -> b t (g r) k", r=group), k)]
    for stage in coupling.stages():
        states.append(stage(*states[-1]))
    return [(reduce(q, "b t (g r) k -> b t g k", "mean", r=group), k) for q, k in states]


def coupling_sensitivity(coupling: Coupling, q: Keys, k: Keys, max_pairs: int = MAX_PAIRS) -> Sensitivity:
    """Return the norms of the Jacobian's blocks, on evenly spaced tokens with at most `max_pairs` pairs in all."""
    with torch.inference_mode(mode=False), torch.no_grad():
        double = _double(coupling)
        q, k = (rearrange(x, "b t g k -> (b t) g k") for x in (cpu_float64(q), cpu_float64(k)))
        n_tokens = min(len(q), max(1, max_pairs // q.shape[1]))
        index = torch.linspace(0, len(q) - 1, n_tokens, dtype=torch.float64).round().long()
        return sensitivity(lambda q, k: coupling_path(double, q, k)[-1], q[index], k[index])


def energy_trajectory(coupling: Coupling, q: Keys, k: Keys) -> EnergyTrajectory | None:
    """Return the energy of the pairs along the steps; `None` if the force has no potential."""
    with torch.inference_mode(mode=False), torch.no_grad():
        double = _double(coupling)
        force = getattr(double, "force", None)
        if not isinstance(force, Potential):
            return None
        path = coupling_path(double, cpu_float64(q), cpu_float64(k))
        energy = torch.stack([force.energy(*pair).flatten() for pair in path])
    error = (energy - energy[0]).abs().amax(0) / energy[0].abs()
    low, median, high = torch.quantile(energy, torch.tensor([0.1, 0.5, 0.9], dtype=energy.dtype), dim=1).tolist()
    return EnergyTrajectory(
        mean=tuple(energy.mean(1).tolist()),
        low=tuple(low),
        median=tuple(median),
        high=tuple(high),
        drift=float(error.mean()),
        worst=float(error.max()),
    )


def _double(coupling: Coupling) -> Coupling:
    """Return a copy in float64 on the CPU without gradients."""
    return copy.deepcopy(coupling).to("cpu", torch.float64).requires_grad_(False)


@diagnostics.register(QKMechanism)
def _diagnostics(mechanism: QKMechanism, x: Stream) -> tuple[Diagnostic, ...]:
    """Return the strength of the coupling, its step size, and its energy if it has one."""
    if (stats := _layer_stats(mechanism, x)) is None:
        return ()
    strength = Diagnostic(
        title="dependence between queries and keys",
        kind="bars",
        x=("strength",),
        series=("|dk'/dq|, key on query", "|dq'/dk|, query on key"),
        values=((stats.strength.key_on_query,), (stats.strength.query_on_key,)),
        y_label="norm of the Jacobian block",
        note="How strongly a moved key depends on its query, and a moved query on its key; the identity has norm 1, and"
        " 0 means no dependence. Drift alone gives |dq'/dk| = steps x dt, which a linear projection could learn.",
    )
    figures = [strength]
    if stats.dt is not None and stats.dt_start is not None:
        step = Diagnostic(
            title="dt, the step size",
            kind="bars",
            x=("dt",),
            series=("learned", "initial"),
            values=((stats.dt,), (stats.dt_start,)),
            y_label="dt",
            note="At 0, queries and keys do not move.",
        )
        figures.append(step)
    if (energy := stats.energy) is not None:
        trajectory = Diagnostic(
            title="energy along the steps",
            kind="lines",
            x=tuple(float(step) for step in range(len(energy.mean))),
            series=("mean", "10 % quantile", "90 % quantile"),
            values=(energy.mean, energy.low, energy.high),
            x_label="step",
            y_label="H = |k|²/2 + V(q)",
            note="The exact dynamics conserve the energy of every pair; the change is the integration error.",
        )
        figures.append(trajectory)
    return tuple(figures)
