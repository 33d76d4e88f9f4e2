"""Who sees whom: the keys and values in reach of each query, with a cache, a window and rows that differ.

Mechanisms that score every pair share it. They work in row form (`qkflow.layout`), each sequence in a row of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.mechanisms.base import Stream
from qkflow.ops.attention import Mask, causal_mask
from qkflow.state import KVCache


class Rows(NamedTuple):
    """A call in row form: what to attend with, what came before, and who sees whom."""

    q: Float[Tensor, "n t h k"]
    k: Float[Tensor, "n s g k"]
    v: Float[Tensor, "n s u v"]
    causal: bool
    mask: Mask | None
    cache: KVCache
    first: int
    """Slots of the cache that lie before the first one of `k` and `v` (out of the window's reach)."""


def validate_input(x: Stream, layout: Layout | None) -> Stream:
    """What a call is given, if it is one: at least one token, as the layout says, and zeros at padding."""
    if x.shape[1] == 0:
        raise UsageError("a call needs at least one token, got none")
    if layout is None:
        return x
    layout.check(x)
    return layout.clean(x)


def visible_keys(q: Tensor, k: Tensor, v: Tensor, past: KVCache, cache: KVCache, window: int | None) -> Rows:
    """The keys and values in reach, and the mask over them: none where causality alone, or nothing, does it.

    `cache` is `past` followed by the new `k` and `v`.
    """
    t = q.shape[1]
    if past.used == 0 and (window is None or t <= window):
        return Rows(q, k, v, True, None, cache, 0)
    first = 0
    if cache.table is None and window is not None:
        first = max(0, cache.used - (window + t - 1))
    keys, values = (x[:, first:] for x in cache.tensors)
    if cache.table is None and t == 1:
        return Rows(q, keys, values, False, None, cache, first)
    offset = past.offset
    queries = torch.arange(t, device=q.device) + (offset if isinstance(offset, int) else offset[:, None])
    mask = causal_mask(queries, cache.positions[..., first:], window)
    return Rows(q, keys, values, False, mask, cache, first)


def map_by_token(
    scores: Float[Tensor, "n h span slots"], rows: Rows, layout: Layout | None
) -> Float[Tensor, "b h t s"]:
    """A map over the cache's slots in row form as one over those slots and then the tokens of the batch.

    In a packed batch the slots are those of each token's own sequence.
    """
    if layout is None:
        return scores
    sequence, position = layout.sequences.clamp_min(0), layout.positions
    past = rows.cache.used - layout.span
    scores = rearrange(scores, "n h t s -> n t h s")[sequence, position]  # [b t h s]: each token's own row
    own = repeat(past + position, "b s -> b t h s", t=scores.shape[1], h=scores.shape[2])
    together = (sequence[:, :, None] == sequence[:, None, :]) & layout.valid[:, None, :] & layout.valid[:, :, None]
    here = scores.gather(3, own) * together[:, :, None]
    before = scores[..., :past] * layout.valid[:, :, None, None]
    return rearrange(torch.cat([before, here], -1), "b t h s -> b h t s")


def shift_right(x: Float[Tensor, "n t h p"], last: Float[Tensor, "n 1 c"]) -> Float[Tensor, "n t h p"]:
    """Tokens one step late: each where the next one was, behind the last of a call before."""
    return torch.cat([last.view(len(x), 1, *x.shape[2:]).to(x.dtype), x[:, :-1]], 1)


def one_early(scores: Float[Tensor, "n h t s"], cache: KVCache) -> Float[Tensor, "n h t s"]:
    """The weights of slots as those of tokens: token p lies in the slot of position p + 1, and nothing in the first."""
    if cache.table is None:
        return torch.nn.functional.pad(scores[..., 1:], (0, 1))
    position = cache.positions
    place = (position[:, :, None] == position[:, None, :] + 1) & (position >= 0)[:, None, :]  # [n slot token]
    return torch.einsum("nhts,nsu->nhtu", scores, place.to(scores.dtype))
