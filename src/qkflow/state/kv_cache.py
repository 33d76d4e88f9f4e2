"""A cache of all past tokens, in buffers that grow geometrically."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from qkflow.errors import UsageError
from qkflow.state.base import State

_CLAIMING = threading.Lock()
"""Threads may continue the same state: only one of them gets the free slots of its buffers."""


@dataclass(eq=False)
class _Extent:
    """Number of written or reserved slots of a buffer, shared by all states on that buffer."""

    filled: int


@dataclass(frozen=True, eq=False, repr=False)
class KVCache(State):
    """Past tokens, one slot each, in one or several tensors `[b, slots, ...]`.

    While all rows have the same length, slot j holds position `tokens_seen - slots_used + j` of every row. After padded
    or packed input the rows differ, and the position in each slot is stored, or -1 if it is empty.
    """

    buffers: tuple[Shaped[Tensor, "b capacity ..."], ...]
    slots_used: int
    """Number of slots in use."""
    tokens_seen: int
    """Number of tokens seen, while all rows have the same length."""
    window: int | None = None
    """Size of the sliding window, including the current token; None for no window."""
    slot_positions: Int[Tensor, "b capacity"] | None = None
    """Position in each slot, -1 if empty; None while all rows have the same length."""
    lengths: Int[Tensor, " b"] | None = None
    """Number of tokens seen, per row; None while all rows have the same length."""
    conv_state: tuple[Float[Tensor, "b _ _"], ...] = ()
    """The last tokens of each stream that is convolved or shifted before it is cached, oldest first."""
    extent: _Extent = field(default_factory=lambda: _Extent(0))

    @staticmethod
    def start(like: Sequence[Shaped[Tensor, "b t ..."]], window: int | None = None) -> KVCache:
        """An empty cache for tensors shaped like these."""
        buffers = tuple(x.new_empty(x.shape[0], 0, *x.shape[2:]) for x in like)
        return KVCache(buffers, 0, 0, window, extent=_Extent(0))  # torch.compile cannot return a default

    @property
    def length(self) -> Int[Tensor, " b"]:
        """Number of tokens seen, per row."""
        if self.lengths is not None:
            return self.lengths
        first = self.buffers[0]
        return torch.full((first.shape[0],), self.tokens_seen, dtype=torch.long, device=first.device)

    @property
    def offset(self) -> int | Int[Tensor, " b"]:
        """Position of the next token: an int while all rows have the same length, else one per row."""
        return self.tokens_seen if self.lengths is None else self.lengths

    @property
    def tensors(self) -> tuple[Shaped[Tensor, "b used ..."], ...]:
        """The buffers, restricted to the slots in use."""
        return tuple(buffer[:, : self.slots_used] for buffer in self.buffers)

    @property
    def positions(self) -> Int[Tensor, " used"] | Int[Tensor, "b used"]:
        """Position in each slot, -1 if empty."""
        if self.slot_positions is not None:
            return self.slot_positions[:, : self.slots_used]
        return torch.arange(self.tokens_seen - self.slots_used, self.tokens_seen, device=self.buffers[0].device)

    @property
    def nbytes(self) -> int:
        """Bytes of the visible tokens, of their positions if they are stored, and of the convolution state."""
        visible = self.slots_used if self.window is None else min(self.slots_used, self.window)
        return sum(x[:, :visible].nbytes for x in self._stored) + sum(x.nbytes for x in self.conv_state)

    @property
    def reserved(self) -> int:
        """Bytes of the buffers, including free slots, and of the convolution state."""
        return sum(x.nbytes for x in (*self._stored, *self.conv_state))

    def extend(self, new: Sequence[Shaped[Tensor, "b t ..."]], lengths: Int[Tensor, " b"] | None = None) -> KVCache:
        """The cache extended by `new` tokens in row form; row i has `lengths[i]` of them (default: all)."""
        rows, t = new[0].shape[:2]
        expected = self.buffers[0].shape[0]
        if rows != expected:
            raise UsageError(f"the state holds {expected} rows, the input {rows}: select() the rows first")
        if self.lengths is None and lengths is None:
            return self._append([*new], None)
        counts = self.length.new_full((rows,), t) if lengths is None else lengths
        return self._with_positions()._append([*new], counts)

    def reserve(self) -> KVCache:
        """The cache with a slot for one more token, which the caller fills; for inference, and rows of equal length."""
        cache = self if self._claim(1) else self._grown(1)
        after = object.__new__(KVCache)  # `replace` takes longer than the attention of a short sequence
        vars(after).update(vars(cache), slots_used=cache.slots_used + 1, tokens_seen=cache.tokens_seen + 1)
        return after

    def trim(self) -> KVCache:
        """The cache without tokens outside the window (in inference, only once there are many of them)."""
        if self.window is None:
            return self
        keep = self.window if torch.is_grad_enabled() else 2 * self.window
        return self._recent(self.window) if self.slots_used > keep else self

    def map(self, f: Callable[[Tensor], Tensor]) -> KVCache:
        """The cache with `f` applied to its tensors; `f` may change the rows, but not the slots."""
        lengths, conv_state = None if self.lengths is None else f(self.lengths), tuple(map(f, self.conv_state))
        stored = [f(x[:, : self.slots_used]) for x in self._stored]
        return self._with(stored, _Extent(0), lengths=lengths, conv_state=conv_state)

    @property
    def _stored(self) -> tuple[Tensor, ...]:
        """All tensors with slots: the buffers, and the positions if they are stored."""
        return self.buffers if self.slot_positions is None else (*self.buffers, self.slot_positions)

    def _with(self, stored: Sequence[Tensor], extent: _Extent, **changes: Any) -> KVCache:
        """A copy with other tensors, in the order of `_stored`."""
        count = len(self.buffers)
        positions = stored[count] if len(stored) > count else None
        return replace(self, buffers=tuple(stored[:count]), slot_positions=positions, extent=extent, **changes)

    def _with_positions(self) -> KVCache:
        """The same cache with stored positions, for rows of different lengths."""
        if self.slot_positions is not None:
            return self
        rows, capacity = self.buffers[0].shape[:2]
        first = self.tokens_seen - self.slots_used
        positions = torch.arange(first, first + capacity, device=self.buffers[0].device).repeat(rows, 1)
        return replace(self, slot_positions=positions, lengths=self.length)

    def _append(self, new: list[Tensor], counts: Int[Tensor, " b"] | None) -> KVCache:
        t = new[0].shape[1]
        lengths = None
        if counts is not None and self.lengths is not None:
            column = torch.arange(t, device=counts.device)
            new.append(torch.where(column < counts[:, None], self.lengths[:, None] + column, -1))
            lengths = self.lengths + counts
        cache = self
        if self.slots_used == 0:  # the new tokens become the buffers, without free slots
            stored, extent = new, _Extent(t)
        elif torch.is_grad_enabled():  # later calls must not modify tensors saved by autograd
            past = (x[:, : self.slots_used] for x in self._stored)
            stored, extent = [torch.cat(pair, 1) for pair in zip(past, new, strict=True)], _Extent(0)
        else:
            cache = self if self._claim(t) else self._grown(t)
            stored, extent, end = cache._stored, cache.extent, cache.slots_used + t
            for buffer, x in zip(stored, new, strict=True):
                buffer[:, cache.slots_used : end] = x
        counters = {"slots_used": cache.slots_used + t, "tokens_seen": cache.tokens_seen + t}
        return cache._with(stored, extent, **counters, lengths=lengths)

    def _claim(self, t: int) -> bool:
        """Reserve the next `t` slots of the buffers; False if there are none, or if another state has them."""
        if torch.compiler.is_compiling():  # it cannot trace the lock
            return self._claim_unlocked(t)
        with _CLAIMING:
            return self._claim_unlocked(t)

    def _claim_unlocked(self, t: int) -> bool:
        if has_room := self._has_room(t):
            self.extent.filled = self.slots_used + t
        return has_room

    def _has_room(self, t: int) -> bool:
        first = self.buffers[0]
        free = self.extent.filled == self.slots_used and self.slots_used + t <= first.shape[1]
        if torch.compiler.is_compiling():
            return free
        return free and (torch.is_inference_mode_enabled() or not first.is_inference())

    def _grown(self, t: int) -> KVCache:
        """A copy whose next `t` slots are reserved: twice the size, counting only tokens inside the window."""
        live = self if self.window is None or self.slots_used < self.window else self._recent(self.window - 1)
        capacity = max(live.slots_used + t, 2 * live.slots_used, 16)

        def enlarge(x: Tensor) -> Tensor:
            buffer = x.new_empty(x.shape[0], capacity, *x.shape[2:])
            buffer[:, : live.slots_used] = x[:, : live.slots_used]
            return buffer

        return live._with([*map(enlarge, live._stored)], _Extent(live.slots_used + t))

    def _recent(self, count: int) -> KVCache:
        """A copy of the `count` most recent tokens of each row."""
        if self.slot_positions is None:
            stored = [x[:, self.slots_used - count :].clone() for x in self.tensors]
        else:
            positions, slot = self.positions.topk(count, dim=1)
            positions, slot = positions.flip(1), slot.flip(1)
            rows = torch.arange(len(slot), device=slot.device)[:, None]
            stored = [*(x[rows, slot] for x in self.tensors), positions]
        return self._with(stored, _Extent(0), slots_used=count)
