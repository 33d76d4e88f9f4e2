"""The forward pass of a stack with the optional outputs of transformers: attentions, hidden states, checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from qkflow.layout import Layout
from qkflow.models import DecoderState
from qkflow.models.blocks import Block
from qkflow.models.stack import Stack
from qkflow.state import KVCache, ShiftedKVCache, State

AttentionMaps = tuple[Float[Tensor, "b _ t _"], ...]
"""One [b h t s] per layer. Layers may differ in their number of heads, and in the slots of their states."""


class StackOutput(NamedTuple):
    """The output of a forward pass over the blocks."""

    x: Float[Tensor, "b t p"]
    """The input of the head: the stream after the last block, normalised."""
    state: DecoderState | None
    attentions: AttentionMaps | None = None
    hidden_states: tuple[Float[Tensor, "b t _"], ...] | None = None
    """The input of each block, and `x`."""


def forward(
    stack: Stack,
    x: Float[Tensor, "b t d"],
    state: DecoderState | None,
    layout: Layout | None,
    *,
    output_attentions: bool = False,
    output_hidden_states: bool = False,
    checkpoint: Callable[..., Any] | None = None,
) -> StackOutput:
    """`Stack.read_embedded` with optional outputs.

    With a `checkpoint` function, blocks recompute their activations in the backward pass and return no state.
    """
    if not (output_attentions or output_hidden_states or checkpoint):
        return StackOutput(*stack.read_embedded(x, state, layout))
    past = [None] * len(stack.blocks) if state is None else state.layers
    states, hidden_states, attentions = [], [x], []
    for block, layer_state in zip(stack.blocks, past, strict=True):
        if output_attentions:
            mechanism: Any = block.mechanism
            normed = block.mechanism_norm(x) if isinstance(block, Block) else x
            attentions.append(mechanism.weights(normed, layer_state, layout))
        if checkpoint is None:
            x, new_state = block(x, layer_state, layout)
            states.append(new_state)
        else:
            x = checkpoint(_without_state(block), x, layer_state, layout)
        hidden_states.append(x)
    x = stack.norm(x)
    return StackOutput(
        x,
        DecoderState(tuple(states)) if states else None,
        tuple(attentions) if output_attentions else None,
        (*hidden_states[:-1], x) if output_hidden_states else None,
    )


def expand_to_columns(
    attentions: AttentionMaps, state: DecoderState | None, columns: int, valid: Bool[Tensor, "b c"] | None
) -> AttentionMaps:
    """Convert maps over the slots of `state` and the new tokens to maps over all columns of the batch.

    Columns are zero if they were padding, have left the window, or belong to a state of fixed size without slots.
    """
    if state is None:
        return attentions
    return tuple(
        _expand_layer(attention, layer_state, columns, valid)
        for attention, layer_state in zip(attentions, state.layers, strict=True)
    )


def _expand_layer(
    attention: Float[Tensor, "b h t _"], state: State, columns: int, valid: Bool[Tensor, "b c"] | None
) -> Float[Tensor, "b h t _"]:
    b, h, t, _ = attention.shape
    cache = state.cache if isinstance(state, ShiftedKVCache) else state
    if not isinstance(cache, KVCache):
        return torch.nn.functional.pad(attention, (columns, 0))
    past, new = attention[..., : cache.slots_used], attention[..., cache.slots_used :]
    position = cache.positions.expand(b, -1)
    index = torch.where(position < 0, columns, position)[:, None, None].expand(b, h, t, -1)  # empty slots: last column
    by_position = attention.new_zeros(b, h, t, columns + 1).scatter(3, index, past)
    if valid is None:
        return torch.cat([by_position[..., :columns], new], -1)
    position_of_column = (valid.long().cumsum(1) - 1).clamp_min(0)[:, None, None].expand(b, h, t, -1)
    return torch.cat([by_position.gather(3, position_of_column) * valid[:, None, None], new], -1)


def _without_state(block: nn.Module) -> Callable[..., Tensor]:
    def call(x: Tensor, state: State | None, layout: Layout | None) -> Tensor:
        return block(x, state, layout)[0]

    return call
