r"""Differential attention (Ye et al., https://arxiv.org/abs/2410.05258): the difference of two softmax maps per head.

    A   = softmax(Q_1 K_1^\top / \sqrt{k}) - \lambda softmax(Q_2 K_2^\top / \sqrt{k})                           (1)
    z   = (1 - \lambda_{init}) norm(A V)                                                                       (2)
    \lambda = \exp(\lambda_{q1} \cdot \lambda_{k1}) - \exp(\lambda_{q2} \cdot \lambda_{k2}) + \lambda_{init}   (3)

`heads` counts the standard heads that it replaces: it has half as many heads, each with two maps of the same width and
values of twice the width, so the projections have as many parameters.

| symbol                     | variable                     | shape                             |
|----------------------------|------------------------------|-----------------------------------|
| Q_1, Q_2; K_1, K_2         | `q`; `k`                     | `[b t h k]`; `[b s g k]`, alternating |
| V                          | `v`                          | `[b s g/2 2k]`                    |
| \lambda_{q1}, \lambda_{k1}, ... | `lambda_q1`, `lambda_k1`, ... | `[k]`                        |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from qkflow.errors import UsageError
from qkflow.mechanisms.base import Circuits, Stream
from qkflow.mechanisms.masking import AttentionInputs
from qkflow.mechanisms.softmax import HeadShape, Keys, Queries, SoftmaxConfig, SoftmaxMechanism
from qkflow.ops.attention import cpu
from qkflow.ops.differential import differential_attention, differential_lambda, differential_map, lambda_init
from qkflow.ops.norm import rms_norm


@dataclass(frozen=True, kw_only=True)
class DifferentialConfig(SoftmaxConfig):
    """Options of `DifferentialAttention`."""

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> DifferentialAttention:
        """Return the mechanism of one layer; the initial lambda grows with depth."""
        return DifferentialAttention(width, heads, layer, layers, config=self)


class DifferentialAttention(SoftmaxMechanism):
    """The difference of two softmax maps; `heads` must be even.

    >>> layer = DifferentialAttention(width=32, heads=4)
    >>> layer.weights(torch.randn(1, 5, 32)).shape
    torch.Size([1, 2, 5, 5])
    """

    has_decode_step = True

    def __init__(
        self,
        width: int,
        heads: int,
        layer: int = 0,
        layers: int = 1,
        *,
        config: DifferentialConfig = DifferentialConfig(),
    ) -> None:
        if heads < 2 or heads % 2 or (config.head_width is None and width % heads):
            raise UsageError(f"differential attention needs an even number of heads that divides {width}, got {heads}")
        half, k = heads // 2, config.width_of_head(width, heads)
        keys = half if config.key_heads is None else config.key_heads
        if keys < 1 or half % keys:
            raise UsageError(f"key_heads must divide the {half} differential heads, got {keys}")
        super().__init__(width, HeadShape(heads, 2 * keys, k, keys, 2 * k, half), config)
        self.lambda_init = lambda_init(layer)
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(0.1 * torch.randn(k)) for _ in range(4)
        )
        self.head_norm = nn.Parameter(torch.ones(2 * k))

    @property
    def lam(self) -> Float[Tensor, ""]:
        """Equation (3)."""
        return differential_lambda(self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2, self.lambda_init)

    def _difference(self) -> cpu.MapDifference | None:
        return cpu.MapDifference(self.lam.item(), 1 - self.lambda_init, self.head_norm)

    def attend(self, inputs: AttentionInputs) -> Float[Tensor, "n t h v"]:
        """Equation (1) times the values, without the maps in memory."""
        visible: Any = {"causal": inputs.causal, "window": inputs.window, "mask": inputs.mask}
        return differential_attention(inputs.q, inputs.k, inputs.v, self.lam, **visible, dropout=self._dropout())

    def map(self, inputs: AttentionInputs) -> Float[Tensor, "n h t s"]:
        """Equation (1)."""
        return differential_map(
            inputs.q, inputs.k, self.lam, causal=inputs.causal, window=inputs.window, mask=inputs.mask
        )

    def couple(self, q: Queries, k: Keys, *, skip_first_drift: bool = False) -> tuple[Queries, Keys]:
        """Pair the queries of each map with the keys of the same map."""
        groups = self.shape.values
        q = rearrange(q, "b t (g r two) k -> b t (g two r) k", g=groups, two=2)
        q, k = super().couple(q, k, skip_first_drift=skip_first_drift)
        return rearrange(q, "b t (g two r) k -> b t (g r two) k", g=groups, two=2), k

    def read(self, z: Float[Tensor, "b t h v"], x: Stream) -> Stream:
        """Equation (2), then the output projection."""
        return super().read(rms_norm(z, self.head_norm) * (1 - self.lambda_init), x)

    def circuits(self) -> Circuits:
        """Lambda weighs the maps and belongs to QK; the head norm belongs to OV."""
        base = super().circuits()
        lambdas = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
        return Circuits(qk=(*base.qk, *lambdas), ov=(*base.ov, "head_norm"))

    def _products_per_pair(self) -> int:
        shape = self.shape  # both maps of an output weigh its values
        return shape.queries * shape.key_width + 2 * shape.outputs * shape.value_width
