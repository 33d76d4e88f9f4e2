"""Standard causal attention: the baseline, with grouped-query heads, QK norm and a sliding window where asked for."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from qkflow.errors import UsageError
from qkflow.mechanisms.masking import Rows
from qkflow.mechanisms.softmax import HeadShape, SoftmaxConfig, SoftmaxMechanism
from qkflow.ops.attention import attention, attention_map


@dataclass(frozen=True, kw_only=True)
class StandardConfig(SoftmaxConfig):
    """Options of `StandardAttention`; called with a width and heads, it makes one."""

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> StandardAttention:
        """The mechanism of one layer; they are all alike."""
        return StandardAttention(width, heads, layer, layers, config=self)


class StandardAttention(SoftmaxMechanism):
    """Softmax attention over the past.

    >>> import torch
    >>> layer = StandardAttention(width=32, heads=4)
    >>> x = torch.randn(2, 10, 32)
    >>> y, state = layer(x)
    >>> rest, state = layer(torch.randn(2, 1, 32), state)  # one more token
    >>> y.shape, state.length.tolist()
    (torch.Size([2, 10, 32]), [11, 11])
    """

    def __init__(
        self, width: int, heads: int, layer: int = 0, layers: int = 1, *, config: StandardConfig = StandardConfig()
    ) -> None:
        keys = heads if config.key_heads is None else config.key_heads
        if heads < 1 or width % heads:
            raise UsageError(f"heads must divide the width, got {heads} heads for a width of {width}")
        if keys < 1 or heads % keys:
            raise UsageError(f"key_heads must divide the heads, got {keys} for {heads} heads")
        super().__init__(width, HeadShape(heads, keys, width // heads, keys, width // heads, heads), config)

    def attend(self, rows: Rows) -> Float[Tensor, "n t h v"]:
        """Through the fused kernel."""
        return attention(rows.q, rows.k, rows.v, causal=rows.causal, mask=rows.mask)

    def map(self, rows: Rows) -> Float[Tensor, "n h t s"]:
        """The softmax map."""
        return attention_map(rows.q, rows.k, causal=rows.causal, mask=rows.mask)
