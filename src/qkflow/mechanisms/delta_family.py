r"""The delta-rule mechanisms: how each chooses the erase direction x, the decay and the read-out of `delta_rule.py`.

| mechanism                                           | x                  | \alpha      |
|-----------------------------------------------------|--------------------|-------------|
| `DeltaNet`, https://arxiv.org/abs/2406.06484         | k                  | 1           |
| `GatedDeltaNet`, https://arxiv.org/abs/2412.06464    | k                  | per head    |
| `QDelta`, https://arxiv.org/abs/2606.08804           | k + \lambda q, (4) | per head    |
| `KimiDeltaAttention`, https://arxiv.org/abs/2510.26692 | k                | per channel, (5) |
| `EraseThenDelta`, https://arxiv.org/abs/2606.26560   | e, then k; (6)     | per head    |
| `Comba`, https://arxiv.org/abs/2506.02475            | sigmoid(b) k, (7)  | per head    |

    \lambda_t = sigmoid(W_\lambda u_t - 0.9)                                                            (4)
    \log \alpha_t = -A softplus(W_u W_d u_t + b),   A per head, b per channel                            (5)
    S_t = \alpha_t S_{t-1} (I - \gamma_t e_t e_t^\top) (I - \beta_t k_t k_t^\top) + \beta_t v_t k_t^\top,
    \gamma_t = sigmoid(W_\gamma u_t)                                                                    (6)
    o_t = S_t (q_t - d x_t) / \sqrt{k},   b and d per head                                               (7)

u_t is the input of the layer, as in `delta_rule.py`.

(5) has the form and the initial values of flash-linear-attention's layer: A uniform in [1, 16], softplus(b) log-uniform
in [0.001, 0.1], and an inner width of one head's keys. That layer also has a low-rank output gate with a sigmoid and
values as wide as its keys; ours has the gate and the widths of the other mechanisms.

Of (6) we know the abstract only: an erase step along a learned direction, then the delta rule. That e is a projection
with a convolution and unit length like k, that gamma is a sigmoid of the token, and that the decay is that of Gated
DeltaNet and comes first, are our choices.

(7) starts with b = 1 and d = 1, as flash-linear-attention's layer does. In that layer (0.6.0) q is corrected before its
L2 norm, and x is normalised as well, which undoes its factor sigmoid(b) in the erasure; ours normalises q and k first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from qkflow.errors import UsageError
from qkflow.mechanisms.base import Stream, projection
from qkflow.mechanisms.delta_rule import DeltaConfig, DeltaMechanism, Keys, at_least_float32, dt_bias, softplus
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
    has_decode_step = True


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
    has_decode_step = True


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
    has_decode_step = True
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

    def constant_lambda(self) -> tuple[float, float]:
        """Return the config's."""
        return self.config.lam or 0.0, self.config.lam_bias

    def delta_inputs(self, q: Keys, k: Keys, v: Tensor, own: Keys | None, gates: dict[str, Tensor]) -> DeltaInputs:
        """Erase along k + lambda q, or k + lambda e."""
        lam = gates.get("lam")
        erase = lam if lam is None or own is None else torch.addcmul(k, lam.unsqueeze(-1), own)
        return super().delta_inputs(q, k, v, own, gates)._replace(erase=erase)


@dataclass(frozen=True, kw_only=True)
class KDAConfig(DeltaConfig):
    """Options of `KimiDeltaAttention`."""

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> KimiDeltaAttention:
        """Return the mechanism of one layer."""
        return KimiDeltaAttention(width, heads, layer, layers, config=self)


class KDADecay(nn.Module):
    """Equation (5).

    >>> KDADecay(width=32, heads=4, key_width=8)(torch.randn(2, 10, 32)).shape
    torch.Size([2, 10, 4, 8])
    """

    def __init__(self, width: int, heads: int, key_width: int) -> None:
        super().__init__()
        self.down, self.up = projection(width, key_width), projection(key_width, heads * key_width)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.dt_bias = dt_bias(heads * key_width)

    def maps(self) -> tuple[nn.Module, nn.Module | None]:
        """Return W_d and W_u of (5)."""
        return self.down, self.up

    def forward(self, x: Stream) -> Keys:
        """Return log alpha, at least in float32."""
        rate = softplus(at_least_float32(self.up(self.down(x))) + at_least_float32(self.dt_bias))
        return -at_least_float32(self.A_log).exp().unsqueeze(-1) * rate.unflatten(-1, (len(self.A_log), -1))


class KimiDeltaAttention(DeltaMechanism):
    """Gated DeltaNet in which every key channel has its own decay.

    >>> layer = KimiDeltaAttention(width=32, heads=4)
    >>> layer.gates(torch.randn(1, 5, 32))["log_alpha"].shape
    torch.Size([1, 5, 4, 8])
    """

    config_type, decay_type = KDAConfig, KDADecay
    has_channel_decay = has_decode_step = True

    def make_decay(self) -> nn.Module:
        """Return the decay (5)."""
        return KDADecay(self.width, self.heads, self.key_width)


@dataclass(frozen=True, kw_only=True)
class EDAConfig(DeltaConfig):
    """Options of `EraseThenDelta`."""

    has_own_direction: ClassVar[bool] = True

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> EraseThenDelta:
        """Return the mechanism of one layer."""
        return EraseThenDelta(width, heads, layer, layers, config=self)


class EraseThenDelta(DeltaMechanism):
    """Gated DeltaNet that first erases along a direction of its own: two steps of the delta rule per token.

    >>> layer = EraseThenDelta(width=32, heads=4)
    >>> layer(torch.randn(1, 5, 32))[0].shape, layer.inputs(torch.randn(1, 5, 32)).k.shape
    (torch.Size([1, 5, 32]), torch.Size([1, 10, 4, 8]))
    """

    config_type = EDAConfig
    has_decode_step = True
    steps = 2

    def __init__(self, width: int, *args: Any, **options: Any) -> None:
        super().__init__(width, *args, **options)
        self.gamma = projection(width, self.heads)

    def gates(self, x: Stream) -> dict[str, Tensor]:
        """Add gamma."""
        return {**super().gates(x), "gamma": self.gamma(x).sigmoid()}

    def delta_inputs(self, q: Keys, k: Keys, v: Tensor, own: Keys | None, gates: dict[str, Tensor]) -> DeltaInputs:
        """Decay and erase along e (a write of zero), then write along k (6)."""
        log_alpha = gates["log_alpha"]
        first = (torch.zeros_like(q), cast(Tensor, own), torch.zeros_like(v), gates["gamma"], log_alpha)
        second = (q, k, v, gates["beta"], torch.zeros_like(log_alpha))
        pairs = zip(first, second, strict=True)
        q, k, v, beta, log_alpha = (torch.stack(pair, 2).flatten(1, 2) for pair in pairs)
        return DeltaInputs(q, k, v, beta, log_alpha, None)


@dataclass(frozen=True, kw_only=True)
class CombaConfig(DeltaConfig):
    """Options of `Comba`."""

    correction: float = 1.0
    """The initial d; flash-linear-attention suggests to try 0.02 as well, for small models."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not math.isfinite(self.correction):
            raise UsageError(f"correction must be a finite number, got {self.correction}")

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> Comba:
        """Return the mechanism of one layer."""
        return Comba(width, heads, layer, layers, config=self)


class Comba(DeltaMechanism):
    """Gated DeltaNet that corrects less than it writes, and reads with a corrected query (7).

    >>> layer = Comba(width=32, heads=4)
    >>> layer(torch.randn(1, 5, 32))[0].shape
    torch.Size([1, 5, 32])
    """

    config_type = CombaConfig
    has_decode_step = True
    config: CombaConfig

    def __init__(self, width: int, *args: Any, **options: Any) -> None:
        super().__init__(width, *args, **options)
        self.feedback = nn.Parameter(torch.ones(self.heads))  # b
        self.correction = nn.Parameter(torch.full((self.heads,), self.config.correction))  # d

    def key_feedback(self) -> tuple[Tensor, Tensor]:
        """Return b and d."""
        return self.feedback, self.correction

    def delta_inputs(self, q: Keys, k: Keys, v: Tensor, own: Keys | None, gates: dict[str, Tensor]) -> DeltaInputs:
        """Erase along x = sigmoid(b) k and read with q - d x (7)."""
        x = k * self.feedback.sigmoid().unsqueeze(-1)
        read = torch.addcmul(q, self.correction.unsqueeze(-1), x, value=-1)
        return super().delta_inputs(read, k, v, own, gates)._replace(erase=x)
