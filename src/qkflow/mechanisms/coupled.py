"""Coupled attention (Gahtan & Bronstein, https://arxiv.org/abs/2604.01683): queries and keys move together, then score.

It is standard attention with a Hamiltonian coupling, under a name of its own; any softmax mechanism takes a coupling.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from qkflow.mechanisms.coupling import CouplingConfig
from qkflow.mechanisms.standard import StandardAttention, StandardConfig


@dataclass(frozen=True, kw_only=True)
class CoupledConfig(StandardConfig):
    """Options of `CoupledAttention`: those of `StandardConfig`, with a coupling from the start."""

    coupling: CouplingConfig | None = field(default_factory=CouplingConfig)

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> CoupledAttention:
        """The mechanism of one layer; they are all alike."""
        return CoupledAttention(width, heads, layer, layers, config=self)


class CoupledAttention(StandardAttention):
    """Softmax attention over the past, with queries and keys that have moved one step together.

    >>> import torch
    >>> layer = CoupledAttention(width=32, heads=4)
    >>> y, state = layer(torch.randn(2, 10, 32))
    >>> y.shape, round(layer.coupling.dt.item(), 2)
    (torch.Size([2, 10, 32]), 0.1)
    """

    def __init__(
        self, width: int, heads: int, layer: int = 0, layers: int = 1, *, config: StandardConfig = CoupledConfig()
    ) -> None:
        super().__init__(width, heads, layer, layers, config=config)
