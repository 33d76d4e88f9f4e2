"""The blocks of a stack: over an ordinary stream, and over a stream of phases.

x ──┬────────────────────────────────────► + ──┬──────────────────────────────► + ──► y
    └─► norm ─► mechanism ─► [dropout] ────┘   └─► norm ─► SwiGLU ─► [dropout] ─┘

θ ──┬────────────────────────────────────► + ──┬──────────────────────────────────► + ──► θ'
    └─► mechanism ─► [dropout] ────────────┘   └─► cos, sin ─► SwiGLU ─► [dropout] ─┘
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.mechanisms.base import Mechanism, Stream, apply_linear, is_plain_linear, projection
from qkflow.ops import few_rows
from qkflow.ops.csrc.eager import has_hooks
from qkflow.ops.groups import TORUS, Group
from qkflow.ops.norm import add_rms_norm, rms_norm
from qkflow.ops.swiglu import swiglu
from qkflow.state import State


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learned scale."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """Normalise over the last dimension."""
        return rms_norm(x, self.weight, self.eps)


class SwiGLU(nn.Module):
    r"""Gated feed-forward network W_{output} (silu(W_{gate} x) \odot W_{up} x), https://arxiv.org/abs/2002.05202"""

    def __init__(self, width: int, hidden: int, outputs: int | None = None) -> None:
        super().__init__()
        self.gate = projection(width, hidden)
        self.up = projection(width, hidden)
        self.output = projection(hidden, width if outputs is None else outputs)

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... o"]:
        """Apply the network to each token."""
        if torch.is_grad_enabled() and is_plain_linear(self.gate) and is_plain_linear(self.up):
            return apply_linear(self.output, swiglu(x, self.gate.weight, self.up.weight))
        return self.output(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm residual block: a mechanism, then a feed-forward network.

    With `hidden=0` there is no feed-forward network; with `norm=False` there is no normalisation.
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
        """Return the stream after the block, and the state of the mechanism."""
        mixed, new_state = self.mechanism(self.mechanism_norm(x), state, layout)
        mixed = _dropout(self, mixed)
        if self.feed_forward is None:
            return x + mixed, new_state
        if not self.training and not torch.is_grad_enabled():
            x = x + mixed
            if (y := _add_swiglu(x, self.feed_forward, self.feed_forward_norm)) is not None:
                return y, new_state
            return x + self.feed_forward(self.feed_forward_norm(x)), new_state
        x, normed = _add_and_norm(x, mixed, self.feed_forward_norm)
        return x + _dropout(self, self.feed_forward(normed)), new_state


class PhaseBlock(nn.Module):
    """Residual block over a phase stream, without normalisation: only points of the group are read.

    On the torus the stream holds angles, and both branches add to it; on other groups they move its elements. With
    `hidden=0` there is no feed-forward network.
    """

    def __init__(self, mechanism: Mechanism, width: int, hidden: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        if mechanism.group is None:
            raise UsageError(f"{type(mechanism).__name__} has no group: a PhaseBlock needs a mechanism on a group")
        self.group = mechanism.group
        self._is_torus = self.group == TORUS
        elements = width // self.group.size
        self.mechanism = mechanism
        self.feed_forward: SwiGLU | None = None
        if hidden:
            self.feed_forward = SwiGLU(elements * self.group.ambient, hidden, elements * self.group.dim)
        self.dropout = dropout

    def forward(self, x: Stream, state: State | None = None, layout: Layout | None = None) -> tuple[Stream, State]:
        """Return the stream after the block, and the state of the mechanism."""
        change, new_state = self.mechanism(x, state, layout)
        change = _dropout(self, change)
        x = x + change if self._is_torus else self._retract(self._elements(x), self._elements(change))
        if self.feed_forward is None:
            return x, new_state
        if self._is_torus and not self.training and (y := _add_swiglu(x, self.feed_forward, None)) is not None:
            return y, new_state
        points = self.group.points(self._elements(x))
        motion = _dropout(self, self.feed_forward(points.flatten(-2))).unflatten(-1, (-1, self.group.dim))
        return self._retract(self._elements(x), self.group.push(points, motion)), new_state

    def _elements(self, x: Stream) -> Float[Tensor, "b t e size"]:
        return x.unflatten(-1, (-1, self.group.size))

    def _retract(self, x: Float[Tensor, "b t e size"], change: Float[Tensor, "b t e size"]) -> Stream:
        return self.group.retract(x, change).flatten(-2)


class Points(nn.Module):
    """The points of a phase stream: cosines and sines on the torus, the elements themselves on other groups."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... p"]:
        """Return the points, concatenated."""
        return self.group.points(x.unflatten(-1, (-1, self.group.size))).flatten(-2)


def _add_and_norm(x: Stream, branch: Stream, norm: nn.Module) -> tuple[Stream, Stream]:
    """The residual sum, and its norm; in training one operation."""
    if torch.is_grad_enabled() and type(norm) is RMSNorm and not has_hooks(norm):
        return add_rms_norm(x, branch, norm.weight, norm.eps)
    x = x + branch
    return x, norm(x)


def _add_swiglu(x: Stream, network: SwiGLU, norm: nn.Module | None) -> Stream | None:
    """The feed-forward branch of a few rows added to the stream, in one native call; None if it cannot be used."""
    if type(network) is not SwiGLU or has_hooks(network):
        return None
    weights = (
        few_rows.plain_weight(network.gate),
        few_rows.plain_weight(network.up),
        few_rows.plain_weight(network.output),
    )
    if not few_rows.supports(x, *weights):
        return None
    gate, up, output = cast(Any, weights)
    (hidden, inputs), width = gate.shape, x.shape[2]
    if inputs != width * (1 if norm is not None else 2) or up.shape != gate.shape or output.shape != (width, hidden):
        return None
    if norm is None or (type(norm) is nn.Identity and not has_hooks(norm)):
        return few_rows.add_swiglu(x, None, 0.0, gate, up, output)
    if type(norm) is not RMSNorm or has_hooks(norm) or not few_rows.are_plain(x.dtype, (norm.weight,)):
        return None
    return None if len(norm.weight) != width else few_rows.add_swiglu(x, norm.weight, norm.eps, gate, up, output)


def _dropout(block: Block | PhaseBlock, x: Stream) -> Stream:
    return F.dropout(x, block.dropout, block.training) if block.dropout else x
