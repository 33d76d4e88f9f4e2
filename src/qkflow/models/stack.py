"""The common part of all models: an embedding and a stack of blocks.

tokens ─► embedding ─► block ─► block ─► ... ─► norm ─► output

A stack of mechanisms on a group has a phase stream: tokens are embedded as group elements (angles on the torus), and
the output is their points (cosines and sines), which need no normalisation because their norm is constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.mechanisms.base import Mechanism, ParamOptions
from qkflow.mechanisms.registry import mechanism
from qkflow.models.blocks import Block, PhaseBlock, Points, RMSNorm
from qkflow.ops.groups import TORUS, Group, near_identity
from qkflow.state import State

Tokens = Int[Tensor, "b t"]


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """Shape of a stack."""

    width: int
    """Width of the stream."""
    layers: int
    heads: int
    """Number of heads; must divide the width."""
    hidden: int
    """Hidden width of the feed-forward networks."""
    vocabulary: int = 257
    """Vocabulary size; 257 is the bytes and an end-of-document token."""
    mechanism: str | tuple[str, ...] = "standard"
    """Spec of the mechanism, such as `standard:window=128`; or one spec per layer, for a hybrid stack."""
    dropout: float = 0.0
    """Dropout probability of each residual branch."""
    norm_eps: float = 1e-5
    """Epsilon of the RMS norms."""

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "vocabulary"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.hidden < 0:
            raise UsageError(f"hidden must be at least 0, got {self.hidden}")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"dropout must be at least 0 and below 1, got {self.dropout}")
        if not isinstance(self.mechanism, str) and len(self.mechanism) != self.layers:
            raise UsageError(
                f"mechanism must be one spec, or one per layer, got {len(self.mechanism)} for {self.layers} layers"
            )

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """The spec of each layer."""
        return (self.mechanism,) * self.layers if isinstance(self.mechanism, str) else self.mechanism


@dataclass(frozen=True, eq=False, repr=False)
class DecoderState(State):
    """The states of all layers."""

    layers: tuple[State, ...]

    @property
    def length(self) -> Int[Tensor, " b"]:
        """Number of tokens of each row."""
        return self.layers[0].length

    def map(self, f: Callable[[Tensor], Tensor]) -> DecoderState:
        """The state with `f` applied to every tensor of every layer."""
        return DecoderState(tuple(layer.map(f) for layer in self.layers))

    @property
    def nbytes(self) -> int:
        """Size of all layers in bytes."""
        return sum(layer.nbytes for layer in self.layers)


class Stack(nn.Module):
    """An embedding and blocks with any mechanism; subclasses add a head."""

    def __init__(self, config: StackConfig, *, norm: bool = True) -> None:
        super().__init__()
        factories = [mechanism(spec) for spec in config.mechanisms]
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(
            _block(factory(config.width, config.heads, layer, config.layers), config, norm)
            for layer, factory in enumerate(factories)
        )
        mechanisms = self.mechanisms
        self.group = _common_group(mechanisms, config.mechanisms)
        for factory, layer in zip(factories, mechanisms, strict=True):
            if layer is not (first := mechanisms[factories.index(factory)]):
                layer.tie_weights(first)
        self.read_width = config.width
        if self.group is not None:
            self.norm = Points(self.group)
            self.read_width = config.width // self.group.size * self.group.ambient
        else:
            self.norm = RMSNorm(config.width, config.norm_eps) if norm else nn.Identity()

    @property
    def mechanisms(self) -> list[Mechanism]:
        """The mechanism of each layer."""
        return [cast(Mechanism, block.mechanism) for block in self.blocks]

    def read(
        self, tokens: Tokens, state: DecoderState | None = None, layout: Layout | None = None
    ) -> tuple[Float[Tensor, "b t p"], DecoderState]:
        """Return the normalised stream (or the points of a phase stream) after the last block, and the new state."""
        return self.read_embedded(self.embed(tokens), state, layout)

    def read_embedded(
        self, x: Float[Tensor, "b t d"], state: DecoderState | None = None, layout: Layout | None = None
    ) -> tuple[Float[Tensor, "b t p"], DecoderState]:
        """`read`, given the stream before the first block."""
        old_states: Sequence[State | None] = [None] * len(self.blocks) if state is None else state.layers
        new_states = []
        for block, old_state in zip(self.blocks, old_states, strict=True):
            x, new_state = block(x, old_state, layout)
            new_states.append(new_state)
        return self.norm(x), DecoderState(tuple(new_states))

    def embed(self, tokens: Tokens) -> Float[Tensor, "b t d"]:
        """Return the stream before the first block; embeddings that left the group in training are projected back."""
        return self.to_stream(self.embedding(tokens))

    def to_stream(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Project embeddings to the group, if there is one; any angle is an element of the torus."""
        if self.group is None or self.group == TORUS:
            return x
        elements = x.unflatten(-1, (-1, self.group.size))
        return self.group.retract(elements, torch.zeros_like(elements)).flatten(-2)

    def param_options(self) -> dict[str, ParamOptions]:
        """Return the optimizer options by parameter: those of the mechanisms, and for a phase stream our own."""
        options = {
            f"blocks.{i}.mechanism.{name}": option
            for i, mechanism in enumerate(self.mechanisms)
            for name, option in mechanism.param_options().items()
        }
        if self.group is None:
            return options
        defaults = dict.fromkeys((name for name, _ in self.named_parameters()), ParamOptions(rate=_PHASE_MATRIX_RATE))
        return defaults | options | {"embedding.weight": ParamOptions(rate=_PHASE_EMBEDDING_RATE, decay=False)}

    def init_embedding(self, std: float) -> None:
        """Initialise the embedding: normal with this standard deviation, or around the identity of the group."""
        if self.group is None:
            nn.init.normal_(self.embedding.weight, std=std)
            return
        elements = self.embedding.weight.shape[1] // self.group.size
        with torch.no_grad():
            phases = near_identity(self.group, self.embedding.num_embeddings, elements, spread=_PHASE_SPREAD)
            self.embedding.weight.copy_(phases.flatten(1))


def _block(mechanism: Mechanism, config: StackConfig, norm: bool) -> nn.Module:
    if mechanism.group is not None:
        return PhaseBlock(mechanism, config.width, config.hidden, dropout=config.dropout)
    return Block(mechanism, config.width, config.hidden, dropout=config.dropout, eps=config.norm_eps, norm=norm)


def _common_group(mechanisms: Sequence[Mechanism], specs: Sequence[str]) -> Group | None:
    """Return the group of the stream, which all layers must share."""
    groups = [mechanism.group for mechanism in mechanisms]
    for spec, group in zip(specs, groups, strict=True):
        if group != groups[0]:
            names = ["an ordinary stream" if g is None else f"elements of {g.name}" for g in (groups[0], group)]
            raise UsageError(
                f"{specs[0]!r} and {spec!r} cannot be in one stack: one reads {names[0]}, the other {names[1]}"
            )
    return groups[0]


_PHASE_MATRIX_RATE = 2.0
"""Learning-rate factor of the matrices of a phase stream, whose inputs have unit norm."""
_PHASE_EMBEDDING_RATE = 20.0
"""Learning-rate factor of the embedded phases: angles are on the scale of radians, matrices are not."""
_PHASE_SPREAD = 1.0
"""Initial standard deviation of the embedded phases, in radians."""
