"""One pass over the blocks of a stack, with what transformers may ask for on the way: maps, streams, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from qkflow.layout import Layout
from qkflow.models import DecoderState
from qkflow.models.blocks import Block
from qkflow.models.stack import Stack, Tokens
from qkflow.state import KVCache, ShiftedKVCache, State

Maps = tuple[Float[Tensor, "b _ t _"], ...]
"""Of each layer, [b h t s]: layers may differ in their heads, and in the slots of their states."""


class Reading(NamedTuple):
    """What a pass over the blocks gives."""

    x: Float[Tensor, "b t p"]
    """The stream behind the last block, as the head reads it."""
    state: DecoderState | None
    maps: Maps | None = None
    streams: tuple[Float[Tensor, "b t _"], ...] | None = None
    """Before each block, and `x`."""


def read(
    stack: Stack,
    tokens: Tokens,
    state: DecoderState | None,
    layout: Layout | None,
    *,
    maps: bool = False,
    streams: bool = False,
    checkpoint: Callable[..., Any] | None = None,
) -> Reading:
    """As `Stack.read`, and the map of every layer, the stream before each (and behind the last) if asked for.

    With a `checkpoint` function blocks keep nothing for their gradients and compute it again; they carry no state on.
    """
    if not (maps or streams or checkpoint):
        return Reading(*stack.read(tokens, state, layout))
    x = stack.embed(tokens)
    past = [None] * len(stack.blocks) if state is None else state.layers
    states, seen, shown = [], [x], []
    for block, before in zip(stack.blocks, past, strict=True):
        if maps:
            shown.append(_map(block, x, before, layout))
        if checkpoint is None:
            x, after = block(x, before, layout)
            states.append(after)
        else:
            x = checkpoint(_stream_of(block), x, before, layout)
        seen.append(x)
    x = stack.norm(x)
    return Reading(
        x,
        DecoderState(tuple(states)) if states else None,
        tuple(shown) if maps else None,
        (*seen[:-1], x) if streams else None,
    )


def over_columns(found: Maps, state: DecoderState | None, columns: int, valid: Bool[Tensor, "b c"] | None) -> Maps:
    """Maps over the slots of a state, and new tokens, as maps over all columns of the batch.

    Columns that were padding, that a window has given up, or that a memory of fixed size has no slot for, are zero.
    """
    if state is None:
        return found
    return tuple(_over_columns(one, layer, columns, valid) for one, layer in zip(found, state.layers, strict=True))


def _over_columns(
    found: Float[Tensor, "b h t _"], state: State, columns: int, valid: Bool[Tensor, "b c"] | None
) -> Float[Tensor, "b h t _"]:
    b, h, t, _ = found.shape
    cache = state.cache if isinstance(state, ShiftedKVCache) else state
    if not isinstance(cache, KVCache):
        return torch.nn.functional.pad(found, (columns, 0))
    position = cache.positions.expand(b, -1)
    place = torch.where(position < 0, columns, position)[:, None, None].expand(b, h, t, -1)
    by_position = found.new_zeros(b, h, t, columns + 1).scatter(3, place, found[..., : cache.used])
    if valid is None:
        return torch.cat([by_position[..., :columns], found[..., cache.used :]], -1)
    where = (valid.long().cumsum(1) - 1).clamp_min(0)[:, None, None].expand(b, h, t, -1)
    past = by_position.gather(3, where) * valid[:, None, None]
    return torch.cat([past, found[..., cache.used :]], -1)


def _map(block: nn.Module, x: Tensor, state: State | None, layout: Layout | None) -> Float[Tensor, "b h t s"]:
    mechanism: Any = block.mechanism
    return mechanism.weights(block.mechanism_norm(x) if isinstance(block, Block) else x, state, layout)


def _stream_of(block: nn.Module) -> Callable[..., Tensor]:
    def stream(x: Tensor, state: State | None, layout: Layout | None) -> Tensor:
        return block(x, state, layout)[0]

    return stream
