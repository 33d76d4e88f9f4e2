"""The blocks that a stack repeats: over an ordinary stream, and over one of phases.

x ──┬────────────────────────────────────► + ──┬──────────────────────────────► + ──► y
    └─► norm ─► mechanism ─► [dropout] ────┘   └─► norm ─► SwiGLU ─► [dropout] ─┘

θ ──┬────────────────────────────────────► + ──┬──────────────────────────────────► + ──► θ'
    └─► mechanism ─► [dropout] ────────────┘   └─► cos, sin ─► SwiGLU ─► [dropout] ─┘
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from qkflow.errors import UsageError
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

    def __init__(self, width: int, hidden: int, outputs: int | None = None) -> None:
        super().__init__()
        self.gate = projection(width, hidden)
        self.up = projection(width, hidden)
        self.output = projection(hidden, width if outputs is None else outputs)

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... o"]:
        """Each token by itself."""
        return self.output(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A mechanism and a feed-forward network, each normalised before and added after.

    Without a `hidden` width there is no feed-forward network, and without `norm` nothing is normalised: the smallest
    models of attention are like that.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        width: int,
        hidden: int,
        *,
        dropout: float = 0.0,
        eps: float = 1e-5,
        norm: bool = True,
    ) -> None:
        super().__init__()
        self.mechanism_norm = RMSNorm(width, eps) if norm else nn.Identity()
        self.mechanism = mechanism
        self.feed_forward: SwiGLU | None = None
        if hidden:
            self.feed_forward_norm = RMSNorm(width, eps) if norm else nn.Identity()
            self.feed_forward = SwiGLU(width, hidden)
        self.dropout = dropout

    def forward(self, x: Stream, state: State | None = None, layout: Layout | None = None) -> tuple[Stream, State]:
        """The stream after this block, and the mechanism's state."""
        mixed, after = self.mechanism(self.mechanism_norm(x), state, layout)
        x = x + _dropped(self, mixed)
        if self.feed_forward is None:
            return x, after
        return x + _dropped(self, self.feed_forward(self.feed_forward_norm(x))), after


class PhaseBlock(nn.Module):
    """Synchronise, then move each token by itself. Nothing is normalised: only points of the group are ever read.

    On the torus the stream holds angles, and both branches are added; on another group they move its elements. Without
    a `hidden` width tokens only synchronise.
    """

    def __init__(self, mechanism: Mechanism, width: int, hidden: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        if mechanism.group is None:
            raise UsageError(f"{type(mechanism).__name__} has no group: its stream is no phase stream")
        self.group = mechanism.group
        elements = width // self.group.size
        self.mechanism = mechanism
        self.feed_forward: SwiGLU | None = None
        if hidden:
            self.feed_forward = SwiGLU(elements * self.group.ambient, hidden, elements * self.group.dim)
        self.dropout = dropout

    def forward(self, x: Stream, state: State | None = None, layout: Layout | None = None) -> tuple[Stream, State]:
        """The stream after this block, and the mechanism's state."""
        change, after = self.mechanism(x, state, layout)
        x = self._moved(self._elements(x), self._elements(_dropped(self, change)))
        if self.feed_forward is None:
            return x, after
        points = self.group.points(self._elements(x))
        motion = _dropped(self, self.feed_forward(points.flatten(-2)))
        return self._moved(
            self._elements(x), self.group.push(points, motion.unflatten(-1, (-1, self.group.dim)))
        ), after

    def _elements(self, x: Stream) -> Float[Tensor, "b t e size"]:
        return x.unflatten(-1, (-1, self.group.size))

    def _moved(self, x: Float[Tensor, "b t e size"], change: Float[Tensor, "b t e size"]) -> Stream:
        return self.group.retract(x, change).flatten(-2)


def _dropped(block: Block | PhaseBlock, x: Stream) -> Stream:
    return F.dropout(x, block.dropout, block.training) if block.dropout else x
