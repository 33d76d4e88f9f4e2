"""The block that a stack repeats.

x ──┬────────────────────────────────────► + ──┬──────────────────────────────► + ──► y
    └─► norm ─► mechanism ─► [dropout] ────┘   └─► norm ─► SwiGLU ─► [dropout] ─┘
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from qkflow.layout import Layout
from qkflow.mechanisms.base import Mechanism, Stream, projection
from qkflow.ops.norm import rms_norm
from qkflow.state import State


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the width, with a learned scale."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """The input at unit scale."""
        return rms_norm(x, self.weight, self.eps)


class SwiGLU(nn.Module):
    r"""The gated feed-forward network  W_{output} (silu(W_{gate} x) \odot W_{up} x).  https://arxiv.org/abs/2002.05202"""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = projection(width, hidden)
        self.up = projection(width, hidden)
        self.output = projection(hidden, width)

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """Each token by itself."""
        return self.output(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A mechanism and a feed-forward network, each normalised before and added after."""

    def __init__(
        self, mechanism: Mechanism, width: int, hidden: int, *, dropout: float = 0.0, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.mechanism_norm = RMSNorm(width, eps)
        self.mechanism = mechanism
        self.feed_forward_norm = RMSNorm(width, eps)
        self.feed_forward = SwiGLU(width, hidden)
        self.dropout = dropout

    def forward(self, x: Stream, state: State | None = None, layout: Layout | None = None) -> tuple[Stream, State]:
        """The stream after this block, and the mechanism's state."""
        mixed, after = self.mechanism(self.mechanism_norm(x), state, layout)
        x = x + self._drop(mixed)
        return x + self._drop(self.feed_forward(self.feed_forward_norm(x))), after

    def _drop(self, x: Stream) -> Stream:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x
