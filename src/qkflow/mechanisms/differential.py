r"""Differential attention (Ye et al., https://arxiv.org/abs/2410.05258): two softmax maps a head, one taken from the
other.

Of `heads` heads of the standard mechanism it makes half as many, each with two maps of the same width and values of
twice the width, so that the projections have the same parameters. Each head's output is normalised and scaled by (1 -
\lambda_{init}).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from qkflow.errors import UsageError
from qkflow.mechanisms.base import Circuits, Diagnostic, Stream
from qkflow.mechanisms.masking import Rows
from qkflow.mechanisms.softmax import HeadShape, SoftmaxConfig, SoftmaxMechanism
from qkflow.ops.differential import differential_attention, differential_lambda, differential_map, lambda_init
from qkflow.ops.norm import rms_norm


@dataclass(frozen=True, kw_only=True)
class DifferentialConfig(SoftmaxConfig):
    """Options of `DifferentialAttention`; called with a width and heads, it makes one."""

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> DifferentialAttention:
        """The mechanism of one layer; its lambda starts larger the deeper it lies."""
        return DifferentialAttention(width, heads, layer, layers, config=self)


class DifferentialAttention(SoftmaxMechanism):
    """The difference of two softmax maps. `heads` counts the standard heads it stands in for, and must be even.

    >>> layer = DifferentialAttention(width=32, heads=4)
    >>> layer.weights(torch.randn(1, 5, 32)).shape
    torch.Size([1, 2, 5, 5])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        layer: int = 0,
        layers: int = 1,
        *,
        config: DifferentialConfig = DifferentialConfig(),
    ) -> None:
        if heads < 2 or heads % 2 or width % heads:
            raise UsageError(f"differential attention needs an even number of heads that divides {width}, got {heads}")
        half, k = heads // 2, width // heads
        keys = half if config.key_heads is None else config.key_heads
        if keys < 1 or half % keys:
            raise UsageError(f"key_heads must divide the {half} differential heads, got {keys}")
        super().__init__(width, HeadShape(heads, 2 * keys, k, keys, 2 * k, half), config)
        self.lambda_init = lambda_init(layer)
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(0.1 * torch.randn(k)) for _ in range(4)
        )
        self.head_norm = nn.Parameter(torch.ones(2 * k))

    def attend(self, rows: Rows) -> Float[Tensor, "n t h v"]:
        """Through the fused kernel, one map after the other."""
        return differential_attention(rows.q, rows.k, rows.v, self._lambda(), causal=rows.causal, mask=rows.mask)

    def map(self, rows: Rows) -> Float[Tensor, "n h t s"]:
        """The difference of the two maps."""
        return differential_map(rows.q, rows.k, self._lambda(), causal=rows.causal, mask=rows.mask)

    def couple(
        self, q: Float[Tensor, "b t h k"], k: Float[Tensor, "b t g k"], *, drifted: bool = False
    ) -> tuple[Float[Tensor, "b t h k"], Float[Tensor, "b t g k"]]:
        """Each map's queries move with the keys of the same map."""
        groups = self.shape.values
        q = rearrange(q, "b t (g r two) k -> b t (g two r) k", g=groups, two=2)
        q, k = super().couple(q, k, drifted=drifted)
        return rearrange(q, "b t (g two r) k -> b t (g r two) k", g=groups, two=2), k

    def read(self, z: Float[Tensor, "b t h v"], x: Stream) -> Stream:
        """Each head normalised and scaled, then projected back to the stream."""
        return super().read(rms_norm(z, self.head_norm) * (1 - self.lambda_init), x)

    def circuits(self) -> Circuits:
        """Lambda weighs one map against the other: it belongs to the QK circuit, the heads' norm to OV."""
        base = super().circuits()
        lambdas = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
        return Circuits(qk=(*base.qk, *lambdas), ov=(*base.ov, "head_norm"))

    def exhibits(self, x: Stream) -> tuple[Diagnostic, ...]:
        """Lambda, which does not depend on the input, beside its published start; and what a coupling does."""
        lam = float(self._lambda().detach())
        return (
            *super().exhibits(x),
            Diagnostic(
                title="lambda, the weight of the map that is taken away",
                kind="bars",
                x=("lambda",),
                series=("learned", "published start"),
                values=((lam,), (self.lambda_init,)),
                y_label="lambda",
                note="Rows of the attention map sum to 1 - lambda; at zero the second map plays no part.",
            ),
        )

    def _pair_products(self) -> int:
        return 2 * super()._pair_products()  # each score is made twice, once for either half of the values

    def _lambda(self) -> Float[Tensor, ""]:
        return differential_lambda(self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2, self.lambda_init)
