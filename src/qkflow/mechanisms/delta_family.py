r"""The delta-rule mechanisms: how each chooses the erase direction x, the decay and the read-out of `delta_rule.py`.

| mechanism                                           | x                  | \alpha      |
|-----------------------------------------------------|--------------------|-------------|
| `DeltaNet`, https://arxiv.org/abs/2406.06484         | k                  | 1           |
| `GatedDeltaNet`, https://arxiv.org/abs/2412.06464    | k                  | per head    |
| `QDelta`, https://arxiv.org/abs/2606.08804           | k + \lambda q, (4) | per head    |

    \lambda_t = sigmoid(W_\lambda x_t - 0.9)                                                            (4)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from qkflow.errors import UsageError
from qkflow.mechanisms.base import Stream, projection
from qkflow.mechanisms.delta_rule import DeltaConfig, DeltaMechanism, Keys, at_least_float32
from qkflow.ops.delta_rule import DeltaInputs

_LAMBDA_BIAS = -0.9


@dataclass(frozen=True, kw_only=True)
class DeltaNetConfig(DeltaConfig):
    """Options of `DeltaNet`."""

    has_decay: ClassVar[bool] = False

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> DeltaNet:
        """Return the mechanism of one layer."""
        return DeltaNet(width, heads, layer, layers, config=self)


class DeltaNet(DeltaMechanism):
    """The delta rule without decay.

    >>> layer = DeltaNet(width=32, heads=4)
    >>> y, state = layer(torch.randn(2, 10, 32))
    >>> state.nbytes == layer(torch.randn(2, 1, 32), state)[1].nbytes
    True
    """

    config_type = DeltaNetConfig


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig(DeltaConfig):
    """Options of `GatedDeltaNet`."""

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> GatedDeltaNet:
        """Return the mechanism of one layer."""
        return GatedDeltaNet(width, heads, layer, layers, config=self)


class GatedDeltaNet(DeltaMechanism):
    """DeltaNet with a decay gate.

    >>> layer = GatedDeltaNet(width=32, heads=4)
    >>> layer.weights(torch.randn(1, 5, 32)).shape
    torch.Size([1, 4, 5, 5])
    """

    config_type = GatedDeltaNetConfig


@dataclass(frozen=True, kw_only=True)
class QDeltaConfig(DeltaConfig):
    """Options of `QDelta`."""

    decay: bool = True
    """Whether the memory has a decay gate."""
    lam: float | None = None
    """A constant lambda from 0 (the gated delta rule) to 1; `None` learns it per token."""
    lam_bias: float = _LAMBDA_BIAS
    """Bias before the sigmoid of (4)."""
    erase: Literal["query", "own"] = "query"
    """What lambda adds to the key: the query, or a direction with a projection of its own, as a control."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lam is not None and not 0 <= self.lam <= 1:
            raise UsageError(f"lam must be from 0 to 1, or None to be learned, got {self.lam}")
        if not math.isfinite(self.lam_bias):
            raise UsageError(f"lam_bias must be a finite number, got {self.lam_bias}")
        if self.lam is not None and self.lam_bias != _LAMBDA_BIAS:
            raise UsageError(f"lam_bias applies to a learned lam only, got lam {self.lam} and lam_bias {self.lam_bias}")
        if self.erase not in ("query", "own"):
            raise UsageError(f"erase must be 'query' or 'own', got {self.erase!r}")
        if self.erase == "own" and self.lam == 0:
            raise UsageError("erase='own' has no effect with lam=0: leave out one of them")

    @property
    def has_decay(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether there is a decay gate."""
        return self.decay

    @property
    def has_own_direction(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether there is a fourth projection."""
        return self.erase == "own"

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> QDelta:
        """Return the mechanism of one layer."""
        return QDelta(width, heads, layer, layers, config=self)


class QDelta(DeltaMechanism):
    """Gated DeltaNet that also corrects the memory in the direction of the query.

    >>> layer = QDelta(width=32, heads=4)
    >>> x = torch.randn(2, 10, 32)
    >>> y, state = layer(x[:, :9])
    >>> last, state = layer(x[:, 9:], state)  # decoding uses the same recurrence as training
    >>> torch.allclose(last, layer(x)[0][:, 9:], atol=1e-5), state.length.tolist()
    (True, [10, 10])
    """

    config_type = QDeltaConfig
    config: QDeltaConfig

    def __init__(self, width: int, *args: Any, **options: Any) -> None:
        super().__init__(width, *args, **options)
        self.lam = projection(width, self.heads) if self.config.lam is None else None

    def gates(self, x: Stream) -> dict[str, Tensor]:
        """Add lambda, unless it is zero."""
        gates = super().gates(x)
        if self.lam is not None:
            gates["lam"] = (at_least_float32(self.lam(x)) + self.config.lam_bias).sigmoid()  # (4)
        elif self.config.lam:
            gates["lam"] = x.new_full((*x.shape[:2], self.heads), self.config.lam)
        return gates

    def delta_inputs(self, q: Keys, k: Keys, v: Tensor, own: Keys | None, gates: dict[str, Tensor]) -> DeltaInputs:
        """Erase along k + lambda q, or k + lambda e."""
        inputs = super().delta_inputs(q, k, v, own, gates)
        if "lam" not in gates:
            return inputs
        return inputs._replace(erase=torch.addcmul(k, gates["lam"].unsqueeze(-1), q if own is None else own))
