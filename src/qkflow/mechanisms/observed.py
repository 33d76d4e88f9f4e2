r"""What can be seen of a coupling: where its pairs go, what passes between them, and what becomes of their energy.

All of it by the operations of `qkflow.ops.symplectic.naive`, which are written for reading. Figures are made in float64
on a copy of the coupling, so that looking changes nothing and does not depend on the precision of training.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange, reduce, repeat
from jaxtyping import Float
from torch import Tensor, nn

from qkflow.errors import UsageError
from qkflow.mechanisms.base import Diagnostic
from qkflow.mechanisms.forces import Potential
from qkflow.ops.sensitivity import Move, Sensitivity, sensitivity
from qkflow.ops.symplectic.naive import euler, leapfrog, symplectic_euler

Keys = Float[Tensor, "b t g k"]

SCHEMES: Mapping[str, Any] = {"euler": euler, "symplectic-euler": symplectic_euler, "leapfrog": leapfrog}
"""How a motion is cut into steps, as written for reading."""

MOST_PAIRS = 64
"""Pairs whose Jacobian is taken unless asked for more."""


@dataclass(frozen=True, kw_only=True)
class EnergyPath:
    """The energy of pairs along their motion: a number before it and after each step."""

    mean: tuple[float, ...]
    """Over all pairs."""
    low: tuple[float, ...]
    """A tenth of the pairs lie below."""
    median: tuple[float, ...]
    """Half of the pairs lie below."""
    high: tuple[float, ...]
    """Nine tenths of the pairs lie below."""
    drift: float
    """How far a pair strays from the energy it began with, max |H_i - H_0| / |H_0|: the mean over pairs."""
    worst: float
    """The same of the pair that strays the furthest."""


class Observed(nn.Module, ABC):
    """Anything that moves pairs of a query and a key in steps it can name."""

    queries: int
    keys: int
    width: int
    config: Any
    pairs: bool

    @abstractmethod
    def stages(self) -> list[Move]:
        """The steps of the motion, one after the other, as written for reading."""

    @property
    def step_size(self) -> float | None:
        """The step as learned so far; `None` for a motion that has none."""
        dt = self._parameters.get("dt")
        return None if dt is None else float(dt.detach())

    def path(self, q: Keys, k: Keys) -> list[tuple[Keys, Keys]]:
        """The pairs before the motion and after every step of it: a key, and the mean query of its group.

        Where nothing is paired each query moves by itself: there all of a group begin at `q`, and their mean is shown.
        """
        if q.shape != k.shape or k.shape[2:] != (self.keys, self.width):
            raise UsageError(
                f"a path is that of pairs: expected {self.keys} queries and as many keys of width {self.width},"
                f" got {list(q.shape[2:])} and {list(k.shape[2:])}"
            )
        group = 1 if self.pairs else self.queries // self.keys
        states = [(repeat(q, "b t g k -> b t (g r) k", r=group), k)]
        for stage in self.stages():
            states.append(stage(*states[-1]))
        return [(reduce(q, "b t (g r) k -> b t g k", "mean", r=group), k) for q, k in states]

    def sensitivity(self, q: Keys, k: Keys, most: int = MOST_PAIRS) -> Sensitivity:
        """How much of the moved pairs depends on the partner, and on themselves.

        Of all tokens, so many are taken, evenly spaced, that their heads make `most` pairs; at least one token.
        """
        with torch.inference_mode(mode=False), torch.no_grad():
            double = self._double()
            q, k = (rearrange(x, "b t g k -> (b t) g k") for x in (_precise(q), _precise(k)))
            count = min(len(q), max(1, most // q.shape[1]))
            taken = torch.linspace(0, len(q) - 1, count, dtype=torch.float64).round().long()
            return sensitivity(lambda q, k: double.path(q, k)[-1], q[taken], k[taken])

    def energy(self, q: Keys, k: Keys) -> EnergyPath | None:
        """The energy of the pairs along their motion; `None` where the force is the slope of nothing."""
        with torch.inference_mode(mode=False), torch.no_grad():
            double = self._double()
            force = getattr(double, "force", None)
            if not isinstance(force, Potential):
                return None
            path = torch.stack([force.energy(*state).flatten() for state in double.path(_precise(q), _precise(k))])
        strayed = (path - path[0]).abs().amax(0) / path[0].abs()
        low, median, high = torch.quantile(path, torch.tensor([0.1, 0.5, 0.9], dtype=path.dtype), dim=1).tolist()
        return EnergyPath(
            mean=tuple(path.mean(1).tolist()),
            low=tuple(low),
            median=tuple(median),
            high=tuple(high),
            drift=float(strayed.mean()),
            worst=float(strayed.max()),
        )

    def exhibits(self, q: Keys, k: Keys) -> tuple[Diagnostic, ...]:
        """What passes between queries and keys, the step beside its start, and the energy if there is one."""
        shown = [_strength(self.sensitivity(q, k))]
        if (dt := self.step_size) is not None:
            shown.append(_step(dt, self.config.dt))
        if (energy := self.energy(q, k)) is not None:
            shown.append(_energy(energy))
        return tuple(shown)

    def _double(self) -> Observed:
        """A copy in float64 on the CPU (not every device has float64) whose weights ask for no gradient."""
        return copy.deepcopy(self).to("cpu", torch.float64).requires_grad_(False)


def _precise(x: Tensor) -> Tensor:
    return x.detach().to("cpu", torch.float64)


def _strength(found: Sensitivity) -> Diagnostic:
    return Diagnostic(
        title="what passes between queries and keys",
        kind="bars",
        x=("strength",),
        series=("|dk'/dq|, key on query", "|dq'/dk|, query on key"),
        values=((found.key_on_query,), (found.query_on_key,)),
        y_label="size of the Jacobian's block",
        note="How much of a moved key depends on its query, and the other way round; 1 is the size of the identity,"
        " at 0 nothing passes. Drifts alone give |dq'/dk| = steps x dt, which a plain projection could do as well.",
    )


def _step(dt: float, start: float) -> Diagnostic:
    return Diagnostic(
        title="dt, the step of the motion",
        kind="bars",
        x=("dt",),
        series=("learned", "start"),
        values=((dt,), (start,)),
        y_label="dt",
        note="How far queries and keys move in a step; at zero they stay where they are.",
    )


def _energy(energy: EnergyPath) -> Diagnostic:
    return Diagnostic(
        title="energy along the motion",
        kind="lines",
        x=tuple(float(step) for step in range(len(energy.mean))),
        series=("mean", "a tenth below", "nine tenths below"),
        values=(energy.mean, energy.low, energy.high),
        x_label="steps made",
        y_label="H = |k|²/2 + V(q)",
        note="The exact motion would keep the energy of every pair; what changes is the error of the steps.",
    )
