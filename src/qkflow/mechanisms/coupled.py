"""Coupled attention: standard attention with the default coupling (`qkflow.mechanisms.coupling`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from qkflow.mechanisms.coupling import CouplingConfig
from qkflow.mechanisms.softmax import StandardAttention, StandardConfig


@dataclass(frozen=True, kw_only=True)
class CoupledConfig(StandardConfig):
    """Options of `CoupledAttention`: those of `StandardConfig`, with a coupling by default."""

    coupling: CouplingConfig | None = field(default_factory=CouplingConfig)

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> CoupledAttention:
        """Return the mechanism of one layer."""
        return CoupledAttention(width, heads, layer, layers, config=self)


class CoupledAttention(StandardAttention):
    """Standard attention whose queries and keys take one Hamiltonian step before scoring.

    >>> import torch
    >>> layer = CoupledAttention(width=32, heads=4)
    >>> y, state = layer(torch.randn(2, 10, 32))
    >>> y.shape, round(layer.coupling.dt.item(), 2)
    (torch.Size([2, 10, 32]), 0.1)
    """

    config_type = CoupledConfig
    has_decode_step = True
