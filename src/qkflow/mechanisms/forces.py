"""The networks inside a coupling, one for all heads or one for each, and motion under them."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkflow.ops.csrc import build
from qkflow.ops.symplectic.cpu import Activation, MLPWeights
from qkflow.ops.symplectic.naive import drift_kick, energy, mlp_force, potential_force
from qkflow.ops.symplectic.reversible import drift_kick_reversible

Points = Float[Tensor, "b t h k"]


class MLP(nn.Module):
    """A perceptron with biases that begins at zero: the inner layer as N(0, 1 / inputs), the outer one at nothing."""

    activation: Activation = "silu"

    def __init__(self, width: int, hidden: int, heads: int | None = None, outputs: int | None = None) -> None:
        super().__init__()
        build.load()  # before someone compiles
        self.each = heads is not None
        each = () if heads is None else (heads,)
        outputs = width if outputs is None else outputs
        self.inner = nn.Parameter(torch.randn(*each, hidden, width) * width**-0.5)
        self.inner_bias = nn.Parameter(torch.zeros(*each, hidden))
        self.outer = nn.Parameter(torch.zeros(*each, outputs, hidden))
        self.outer_bias = nn.Parameter(torch.zeros(*each, outputs))

    def forward(self, q: Float[Tensor, "... k"]) -> Float[Tensor, "... m"]:
        """As in `mlp_force`."""
        return mlp_force(q, *(w.to(q.dtype) for w in self.perceptron()))

    def perceptron(self) -> MLPWeights:
        """Its two layers."""
        own: Any = self._parameters  # not through the module's slow attributes: decoding would feel it
        return own["inner"], own["inner_bias"], own["outer"], own["outer_bias"]

    def flops(self) -> int:
        """For one head of one token."""
        return 2 * (self.inner.shape[-2:].numel() + self.outer.shape[-2:].numel())


class Potential(nn.Module):
    """The slope of a potential that holds the query in. Amplitudes are positive, and begin at 1."""

    activation: Activation = "sigmoid"

    def __init__(self, width: int, hidden: int, heads: int | None = None) -> None:
        super().__init__()
        build.load()  # before someone compiles
        self.each = heads is not None
        each = () if heads is None else (heads,)
        self.rows = nn.Parameter(torch.randn(*each, hidden, width) * width**-0.5)
        self.bias = nn.Parameter(torch.zeros(*each, hidden))
        self.log_amplitude = nn.Parameter(torch.zeros(*each, hidden))

    def forward(self, q: Float[Tensor, "... k"]) -> Float[Tensor, "... k"]:
        """As in `potential_force`."""
        return potential_force(q, *self._terms(q))

    def energy(self, q: Float[Tensor, "... k"], k: Float[Tensor, "... k"]) -> Float[Tensor, "..."]:
        """As in `qkflow.ops.symplectic.naive.energy`."""
        return energy(q, k, *self._terms(q))

    def perceptron(self) -> MLPWeights:
        r"""The same slope as two layers: -U^\top (a \odot \sigma(U q + b)), where U has the rows w and -w."""
        w = torch.cat([self.rows, -self.rows])
        outer = -(w * self.log_amplitude.exp().repeat(2)[:, None]).mT
        return w, self.bias.repeat(2), outer, outer.new_zeros(len(outer))

    def flops(self) -> int:
        """For one head of one token; with weights that heads share, rows count twice (`perceptron`)."""
        return 2 * 2 * self.rows.shape[-2:].numel() * (2 if self.rows.ndim == 2 else 1)

    def _terms(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.rows.to(like.dtype), self.bias.to(like.dtype), self.log_amplitude.exp().to(like.dtype)


def kick(k: Points, q: Points, force: MLP | Potential, dt: Float[Tensor, ""]) -> Points:
    r"""The key afterwards, k + \delta f(q)."""
    return evolve(q, k, force, dt, (0.0, 0.0))[1]


def evolve(
    q: Points, k: Points, force: MLP | Potential, dt: Float[Tensor, ""], parts: tuple[float, ...]
) -> tuple[Points, Points]:
    """Drifts and kicks: fast with one network for all heads, which is then a matter of rows.

    Not in a short format over several steps: walking back would find a state that is rounded too far from the true one.
    """
    dt = dt if dt.dtype == q.dtype else dt.to(q.dtype)
    if force.each or (q.dtype.itemsize < 4 and len(parts) > 2):
        return drift_kick(q, k, force, dt, parts)
    w1, b1, w2, b2 = force.perceptron()
    if w1.dtype != q.dtype:
        w1, b1, w2, b2 = (w.to(q.dtype) for w in (w1, b1, w2, b2))
    return drift_kick_reversible(q, k, (w1, b1, w2, b2), dt, parts, force.activation)
