r"""Three memories that tokens correct, alike in everything but the rule: DeltaNet, Gated DeltaNet and Q-Delta.

| mechanism       | S_t                                                                                  |
|-----------------|--------------------------------------------------------------------------------------|
| `DeltaNet`      | S_{t-1} (I - \beta_t k_t k_t^\top) + \beta_t v_t k_t^\top                            |
| `GatedDeltaNet` | \alpha_t S_{t-1} (I - \beta_t k_t k_t^\top) + \beta_t v_t k_t^\top                   |
| `QDelta`        | \alpha_t S_{t-1} (I - \beta_t (k_t + \lambda_t q_t) k_t^\top) + \beta_t v_t k_t^\top |

and o_t = S_t q_t / \sqrt{k} in all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qkflow.errors import UsageError
from qkflow.mechanisms.base import Stream, projection
from qkflow.mechanisms.decay import precise
from qkflow.mechanisms.delta_base import DeltaConfig, DeltaInputs, DeltaMechanism, Gates

__all__ = [
    "DeltaConfig",
    "DeltaInputs",
    "DeltaMechanism",
    "DeltaNet",
    "DeltaNetConfig",
    "GatedDeltaNet",
    "GatedDeltaNetConfig",
    "QDelta",
    "QDeltaConfig",
]


@dataclass(frozen=True, kw_only=True)
class DeltaNetConfig(DeltaConfig):
    """Options of `DeltaNet`; called with a width and heads, it makes one."""

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> DeltaNet:
        """The mechanism of one layer; they are all alike."""
        return DeltaNet(width, heads, layer, layers, config=self)


class DeltaNet(DeltaMechanism):
    """The delta rule (https://arxiv.org/abs/2406.06484): a memory that corrects its errors and never fades.

    >>> import torch
    >>> layer = DeltaNet(width=32, heads=4)
    >>> y, state = layer(torch.randn(2, 10, 32))
    >>> state.nbytes == layer(torch.randn(2, 1, 32), state)[1].nbytes
    True
    """

    def __init__(
        self, width: int, heads: int, layer: int = 0, layers: int = 1, *, config: DeltaNetConfig = DeltaNetConfig()
    ) -> None:
        super().__init__(width, heads, config, decay=False)


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig(DeltaConfig):
    """Options of `GatedDeltaNet`; called with a width and heads, it makes one."""

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> GatedDeltaNet:
        """The mechanism of one layer; they are all alike."""
        return GatedDeltaNet(width, heads, layer, layers, config=self)


class GatedDeltaNet(DeltaMechanism):
    """The gated delta rule (https://arxiv.org/abs/2412.06464): a memory that corrects its errors and fades.

    >>> import torch
    >>> layer = GatedDeltaNet(width=32, heads=4)
    >>> layer.weights(torch.randn(1, 5, 32)).shape
    torch.Size([1, 4, 5, 5])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        layer: int = 0,
        layers: int = 1,
        *,
        config: GatedDeltaNetConfig = GatedDeltaNetConfig(),
    ) -> None:
        super().__init__(width, heads, config, decay=True)


@dataclass(frozen=True, kw_only=True)
class QDeltaConfig(DeltaConfig):
    """Options of `QDelta`; called with a width and heads, it makes one."""

    decay: bool = True
    """Whether the memory fades."""
    lam: float | None = None
    """Lambda, the same for all tokens, from 0 (the gated delta rule) to 1; `None` reads it off each token."""
    lam_bias: float = -0.9
    """Added before the sigmoid that a token's lambda is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lam is not None and not 0 <= self.lam <= 1:
            raise UsageError(f"lam must be from 0 to 1, or None to be learned, got {self.lam}")
        if not math.isfinite(self.lam_bias):
            raise UsageError(f"lam_bias must be a finite number, got {self.lam_bias}")
        if self.lam is not None and self.lam_bias != -0.9:
            raise UsageError(f"a fixed lam has no use for lam_bias, got lam {self.lam} and lam_bias {self.lam_bias}")

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> QDelta:
        """The mechanism of one layer; they are all alike."""
        return QDelta(width, heads, layer, layers, config=self)


class QDelta(DeltaMechanism):
    """Q-Delta (https://arxiv.org/abs/2606.08804): a memory that fades, and corrects its errors for the query as well.

    >>> import torch
    >>> layer = QDelta(width=32, heads=4)
    >>> x = torch.randn(2, 10, 32)
    >>> y, state = layer(x[:, :9])
    >>> last, state = layer(x[:, 9:], state)  # decoding is the same rule as training
    >>> torch.allclose(last, layer(x)[0][:, 9:], atol=1e-5), state.length.tolist()
    (True, [10, 10])
    """

    def __init__(
        self, width: int, heads: int, layer: int = 0, layers: int = 1, *, config: QDeltaConfig = QDeltaConfig()
    ) -> None:
        super().__init__(width, heads, config, decay=config.decay)
        self.lam = projection(width, self.heads) if config.lam is None else None
        self._fixed, self._bias = config.lam, config.lam_bias

    def lam_of(self, x: Stream) -> Gates | None:
        """Read off the token, or the same for all."""
        if self.lam is not None:
            return (precise(self.lam(x)) + self._bias).sigmoid()
        return x.new_full((*x.shape[:2], self.heads), self._fixed) if self._fixed else None
