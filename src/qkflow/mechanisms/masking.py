"""Causal, window and padding masks, with a key-value cache and padded or packed batches.

All mechanisms that score query-key pairs use these functions. They compute in row form (`qkflow.layout`): one sequence
per row, starting at column 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.mechanisms.base import Stream
from qkflow.ops.attention import Mask, causal_mask
from qkflow.state import KVCache


class AttentionInputs(NamedTuple):
    """Queries, the keys and values they may see, and the mask, in row form."""

    q: Float[Tensor, "n t h k"]
    k: Float[Tensor, "n s g k"]
    v: Float[Tensor, "n s u v"]
    causal: bool
    window: int | None
    mask: Mask | None
    cache: KVCache
    first_slot: int
    """The slot of the cache that `k` and `v` start at; earlier slots are outside the window."""
    is_blind: Bool[Tensor, "_ _ _"] | None = None
    """Which queries see no key, of shape [n h t] or 1 in place of a size; their weights and outputs are zero."""

    def zero_blind(self, z: Float[Tensor, "n t h v"]) -> Float[Tensor, "n t h v"]:
        """Return the weighted values with zeros for queries that see no key."""
        return z if self.is_blind is None else z.masked_fill(self.is_blind.transpose(1, 2).unsqueeze(-1), 0)

    def zero_blind_rows(self, weights: Float[Tensor, "n h t s"]) -> Float[Tensor, "n h t s"]:
        """Return the map with zeros for queries that see no key."""
        return weights if self.is_blind is None else weights.masked_fill(self.is_blind.unsqueeze(-1), 0)


def validate_input(x: Stream, layout: Layout | None) -> Stream:
    """Check a batch against its layout, and zero the padding."""
    if x.shape[1] == 0:
        raise UsageError("the input has no tokens: expected at least one per sequence")
    if layout is None:
        return x
    layout.check(x)
    return layout.zero_padding(x)


def visible_keys(q: Tensor, k: Tensor, v: Tensor, past: KVCache, cache: KVCache, window: int | None) -> AttentionInputs:
    """Select the keys and values inside the window, and build a mask if the rows of the cache differ in length.

    `cache` is `past` extended by the new `k` and `v`.
    """
    t = q.shape[1]
    if past.slots_used == 0:
        return AttentionInputs(q, k, v, True, window, None, cache, 0)
    first = 0
    if cache.slot_positions is None and window is not None:
        first = max(0, cache.slots_used - (window + t - 1))
    keys, values = (x[:, first:] for x in cache.tensors)
    if cache.slot_positions is None:
        return AttentionInputs(q, keys, values, t > 1, window if t > 1 else None, None, cache, first)
    offset = past.offset
    queries = torch.arange(t, device=q.device) + (offset if isinstance(offset, int) else offset[:, None])
    mask = causal_mask(queries, cache.positions[..., first:], window)
    return AttentionInputs(q, keys, values, False, None, mask, cache, first)


def all_keys(
    q: Tensor, k: Tensor, v: Tensor, lengths: Int[Tensor, " n"] | None, *, skip_own: bool = False
) -> AttentionInputs:
    """Every query sees every key of its row, the first `lengths[i]` of row i (default: all).

    With `skip_own` it does not see the key of its own token.
    """
    (n, t), s = q.shape[:2], k.shape[1]
    mask = is_blind = None
    if lengths is not None:
        mask = (torch.arange(s, device=q.device) < lengths[:, None])[:, None, None].expand(-1, -1, t, -1)
    if skip_own:
        others = ~torch.eye(t, s, dtype=torch.bool, device=q.device)
        mask = others if mask is None else mask & others
        lengths = torch.full((n,), t, device=q.device) if lengths is None else lengths
    if mask is not None and lengths is not None:
        is_blind = (lengths <= int(skip_own))[:, None, None]
        mask = mask | ~mask.any(-1, keepdim=True)  # a blind query sees everything instead: its softmax is finite
    return AttentionInputs(q, k, v, False, None, mask, KVCache.start((k, v)), 0, is_blind)


def restrict(
    inputs: AttentionInputs,
    mask: Bool[Tensor, "_ _ t t"] | Float[Tensor, "_ _ t t"],
    layout: Layout | None,
) -> AttentionInputs:
    """Also apply a mask of the pairs of tokens in each row of the batch: true where allowed, or added to the scores.

    For inputs without a state. A number of minus infinity forbids a pair.
    """
    if layout is not None and layout.index is not None:
        row, column = layout.index // layout.valid.shape[1], layout.index % layout.valid.shape[1]
        mask = mask.expand(len(layout.valid), -1, -1, -1)  # advanced indices move the heads to the end
        mask = mask[row[:, :, None], :, column[:, :, None], column[:, None, :]].movedim(-1, 1)
    is_allowed = mask if mask.dtype == torch.bool else mask != -torch.inf
    visible = inputs.mask
    if inputs.causal:
        positions = torch.arange(inputs.q.shape[1], device=mask.device)
        visible = causal_mask(positions, positions, inputs.window)
    is_allowed = is_allowed if visible is None else is_allowed & visible
    is_blind = ~is_allowed.any(-1)
    if mask.dtype == torch.bool:
        mask = is_allowed | is_blind.unsqueeze(-1)
    else:
        mask = mask.to(inputs.q.dtype).masked_fill(~is_allowed, -torch.inf).masked_fill(is_blind.unsqueeze(-1), 0)
    is_blind = is_blind if inputs.is_blind is None else is_blind | inputs.is_blind
    return inputs._replace(causal=False, window=None, mask=mask, is_blind=is_blind)


def map_by_token(
    scores: Float[Tensor, "n h span slots"], cached: int, layout: Layout | None
) -> Float[Tensor, "b h t s"]:
    """Convert a map in row form to one over `cached` slots of each token's own sequence and then the batch's tokens."""
    if layout is None:
        return scores
    if scores.shape[-1] == cached:  # the keys are those of a memory
        rows = rearrange(scores, "n h t s -> n t h s")[layout.sequences.clamp_min(0), layout.positions]
        return rearrange(rows * layout.valid[:, :, None, None], "b t h s -> b h t s")
    sequence, position = layout.sequences.clamp_min(0), layout.positions
    scores = rearrange(scores, "n h t s -> n t h s")[sequence, position]  # [b t h s]: the row of each token
    columns = repeat(cached + position, "b s -> b t h s", t=scores.shape[1], h=scores.shape[2])
    same_sequence = (sequence[:, :, None] == sequence[:, None, :]) & layout.valid[:, None, :] & layout.valid[:, :, None]
    new = scores.gather(3, columns) * same_sequence[:, :, None]
    old = scores[..., :cached] * layout.valid[:, :, None, None]
    return rearrange(torch.cat([old, new], -1), "b t h s -> b h t s")


def shift_right(x: Float[Tensor, "n t h p"], last: Float[Tensor, "n 1 c"]) -> Float[Tensor, "n t h p"]:
    """Move every token one position later; `last`, from the previous call, fills the first position."""
    first = last.view(x.shape[0], 1, *x.shape[2:]).to(x.dtype)
    if torch.compiler.is_compiling():  # `x[:, :-1]` would exclude length 2 from a graph for any length
        return torch.cat([first, x], 1)[:, : x.shape[1]]
    return torch.cat([first, x[:, :-1]], 1)


def shift_left(scores: Float[Tensor, "n h t s"], cache: KVCache) -> Float[Tensor, "n h t s"]:
    """Convert weights of shifted slots to weights of tokens: token p is stored in the slot of position p + 1."""
    if cache.slot_positions is None:
        return torch.nn.functional.pad(scores[..., 1:], (0, 1))
    position = cache.positions
    slot_of_token = (position[:, :, None] == position[:, None, :] + 1) & (position >= 0)[:, None, :]  # [n slot token]
    return torch.einsum("nhts,nsu->nhtu", scores, slot_of_token.to(scores.dtype))
