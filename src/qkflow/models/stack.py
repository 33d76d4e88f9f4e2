"""What models are made of: tokens become a stream, and one block after the other moves it.

tokens ─► embedding ─► block ─► block ─► ... ─► norm ─► what the model reads

A stack of mechanisms on a group has a phase stream: tokens are embedded as elements (angles, on the torus), blocks move
them, and what is read are their points (cosines and sines), not normalised, since they cannot grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.mechanisms.base import Mechanism, ParamOptions
from qkflow.mechanisms.registry import mechanism
from qkflow.models.blocks import Block, PhaseBlock, RMSNorm
from qkflow.ops.groups import TORUS, Group, near_identity
from qkflow.state import State

Tokens = Int[Tensor, "b t"]


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """The shape of a stack."""

    width: int
    """Numbers a token in the stream."""
    layers: int
    """Blocks."""
    heads: int
    """Heads of the mechanism; must divide the width."""
    hidden: int
    """Width of the feed-forward network inside a block."""
    vocabulary: int = 257
    """Tokens there are; 257 is the bytes and an end-of-document token."""
    mechanism: str | tuple[str, ...] = "standard"
    """The mechanism of every block, as in `standard:window=128`; or a list of them, one a layer, for a hybrid stack."""
    dropout: float = 0.0
    """Share of each branch's output that is dropped in training."""
    norm_eps: float = 1e-5
    """Added to mean squares before a root is taken."""

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "vocabulary"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.hidden < 0:
            raise UsageError(f"hidden must be at least 0, got {self.hidden}")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"dropout must be from 0 up to 1, got {self.dropout}")
        if not isinstance(self.mechanism, str) and len(self.mechanism) != self.layers:
            raise UsageError(
                f"a list of mechanisms names one a layer: got {len(self.mechanism)} for {self.layers} layers"
            )

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """The mechanism of each layer."""
        return (self.mechanism,) * self.layers if isinstance(self.mechanism, str) else self.mechanism


@dataclass(frozen=True, eq=False)
class DecoderState(State):
    """The states of a decoder's layers."""

    layers: tuple[State, ...]

    @property
    def length(self) -> Int[Tensor, " b"]:
        """Tokens seen so far of each row."""
        return self.layers[0].length

    def select(self, rows: Int[Tensor, " n"]) -> DecoderState:
        """The rows asked for, in every layer."""
        return DecoderState(tuple(layer.select(rows) for layer in self.layers))

    def detach(self) -> DecoderState:
        """Every layer cut from the graph that made it."""
        return DecoderState(tuple(layer.detach() for layer in self.layers))

    def to(self, device: torch.device | str) -> DecoderState:
        """Every layer on another device."""
        return DecoderState(tuple(layer.to(device) for layer in self.layers))

    @property
    def nbytes(self) -> int:
        """Bytes that the layers hold together."""
        return sum(layer.nbytes for layer in self.layers)


class Stack(nn.Module):
    """An embedding and blocks over any mechanism; a model adds a head that reads the stream."""

    def __init__(self, config: StackConfig, *, norm: bool = True) -> None:
        super().__init__()
        factories = [mechanism(spec) for spec in config.mechanisms]
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(
            _block(factory(config.width, config.heads, layer, config.layers), config, norm)
            for layer, factory in enumerate(factories)
        )
        mixers = self.mechanisms
        self.group = _stream(mixers, config.mechanisms)
        for factory, mixer in zip(factories, mixers, strict=True):
            if mixer is not (first := mixers[factories.index(factory)]):
                mixer.tie_weights(first)
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
        """The stream behind the last block, normalised, or the points of a phase stream; and what to carry on with."""
        x = self.embed(tokens)
        past: Sequence[State | None] = [None] * len(self.blocks) if state is None else state.layers
        states = []
        for block, before in zip(self.blocks, past, strict=True):
            x, after = block(x, before, layout)
            states.append(after)
        return self.norm(x), DecoderState(tuple(states))

    def embed(self, tokens: Tokens) -> Float[Tensor, "b t d"]:
        """The stream before the first block; training may take the elements of a phase stream off their group."""
        x = self.embedding(tokens)
        if self.group is None or self.group == TORUS:
            return x
        elements = x.unflatten(-1, (-1, self.group.size))
        return self.group.retract(elements, torch.zeros_like(elements)).flatten(-2)

    def param_options(self) -> dict[str, ParamOptions]:
        """How parameters learn, by name: what the mechanisms ask for, and in a phase stream all of them (ours)."""
        own = {
            f"blocks.{i}.mechanism.{name}": pace
            for i, mixer in enumerate(self.mechanisms)
            for name, pace in mixer.param_options().items()
        }
        if self.group is None:
            return own
        every = dict.fromkeys((name for name, _ in self.named_parameters()), ParamOptions(rate=_PHASE_MATRICES))
        return every | own | {"embedding.weight": ParamOptions(rate=_PHASES, decay=False)}

    def spread_tokens(self, std: float) -> None:
        """Give the tokens their first embeddings: of this size, or around the identity of a group."""
        if self.group is None:
            nn.init.normal_(self.embedding.weight, std=std)
            return
        elements = self.embedding.weight.shape[1] // self.group.size
        with torch.no_grad():
            around = near_identity(self.group, self.embedding.num_embeddings, elements, spread=_PHASE_SPREAD)
            self.embedding.weight.copy_(around.flatten(1))


class Points(nn.Module):
    """The points of a phase stream."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... p"]:
        """Cosines and sines, or the elements themselves."""
        return self.group.points(x.unflatten(-1, (-1, self.group.size))).flatten(-2)


def _block(mixer: Mechanism, config: StackConfig, norm: bool) -> nn.Module:
    if mixer.group is not None:
        return PhaseBlock(mixer, config.width, config.hidden, dropout=config.dropout)
    return Block(mixer, config.width, config.hidden, dropout=config.dropout, eps=config.norm_eps, norm=norm)


def _stream(mixers: Sequence[Mechanism], specs: Sequence[str]) -> Group | None:
    """The group of a stack's stream, which is the same for all of its layers."""
    groups = [mixer.group for mixer in mixers]
    for spec, group in zip(specs, groups, strict=True):
        if group != groups[0]:
            raise UsageError(
                f"{specs[0]!r} and {spec!r} cannot share a stack: one reads {_named(groups[0])}, one {_named(group)}"
            )
    return groups[0]


def _named(group: Group | None) -> str:
    return "an ordinary stream" if group is None else f"elements of {group.name}"


_PHASE_MATRICES = 2.0
"""How many times as fast the matrices of a phase stream learn: they read points, none longer than another."""
_PHASES = 20.0
"""How many times as fast the tokens' phases learn: angles live on a scale of radians, matrices do not."""
_PHASE_SPREAD = 1.0
"""How far the phases of tokens begin from 0, in radians: a standard deviation."""
