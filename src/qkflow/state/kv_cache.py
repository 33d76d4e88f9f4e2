"""A cache of all past tokens, in buffers that grow geometrically."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from qkflow.errors import UsageError
from qkflow.state.base import State


@dataclass(eq=False)
class _Extent:
    """Number of written slots of a buffer, shared by all states on that buffer."""

    filled: int


@dataclass(frozen=True, eq=False)
class KVCache(State):
    """Past tokens, one slot each, in one or several tensors `[b, slots, ...]`.

    While all rows have the same length, slot j holds position `seen - used + j` of every row. After padded or packed
    input the rows differ, and a table holds the position in each slot, or -1 if it is empty.
    """

    buffers: tuple[Shaped[Tensor, "b capacity ..."], ...]
    used: int
    """Number of slots in use."""
    seen: int
    """Number of tokens seen, while all rows have the same length."""
    window: int | None = None
    """Size of the sliding window, including the current token; None for no window."""
    table: Int[Tensor, "b capacity"] | None = None
    """Position in each slot, -1 if empty; None while all rows have the same length."""
    lengths: Int[Tensor, " b"] | None = None
    """Number of tokens seen, per row; None while all rows have the same length."""
    extent: _Extent = field(default_factory=lambda: _Extent(0))

    @staticmethod
    def start(like: Sequence[Shaped[Tensor, "b t ..."]], window: int | None = None) -> KVCache:
        """An empty cache for tensors shaped like these."""
        return KVCache(tuple(x.new_empty(x.shape[0], 0, *x.shape[2:]) for x in like), 0, 0, window)

    @property
    def length(self) -> Int[Tensor, " b"]:
        """Number of tokens seen, per row."""
        if self.lengths is not None:
            return self.lengths
        first = self.buffers[0]
        return torch.full((first.shape[0],), self.seen, dtype=torch.long, device=first.device)

    @property
    def offset(self) -> int | Int[Tensor, " b"]:
        """Position of the next token: an int while all rows have the same length, else one per row."""
        return self.seen if self.lengths is None else self.lengths

    @property
    def tensors(self) -> tuple[Shaped[Tensor, "b used ..."], ...]:
        """The buffers, restricted to the slots in use."""
        return tuple(buffer[:, : self.used] for buffer in self.buffers)

    @property
    def positions(self) -> Int[Tensor, " used"] | Int[Tensor, "b used"]:
        """Position in each slot, -1 if empty."""
        if self.table is not None:
            return self.table[:, : self.used]
        return torch.arange(self.seen - self.used, self.seen, device=self.buffers[0].device)

    @property
    def nbytes(self) -> int:
        """Bytes of the visible tokens, and of their position table if there is one."""
        visible = self.used if self.window is None else min(self.used, self.window)
        tensors = self.buffers if self.table is None else (*self.buffers, self.table)
        return sum(x[:, :visible].nbytes for x in tensors)

    @property
    def reserved(self) -> int:
        """Bytes of the buffers, including free slots."""
        return sum(x.nbytes for x in self.buffers) + (0 if self.table is None else self.table.nbytes)

    def extend(self, new: Sequence[Shaped[Tensor, "b t ..."]], lengths: Int[Tensor, " b"] | None = None) -> KVCache:
        """The cache extended by `new` tokens in row form; row i has `lengths[i]` of them (default: all)."""
        rows, t = new[0].shape[:2]
        if rows != self.buffers[0].shape[0]:
            raise UsageError(
                f"the state holds {self.buffers[0].shape[0]} rows, the input {rows}: select() the rows first"
            )
        if self.lengths is not None or lengths is not None:
            return self._with_table()._append(
                [*new], lengths if lengths is not None else self.length.new_full((rows,), t)
            )
        return self._append([*new], None)

    def trim(self) -> KVCache:
        """The cache without tokens outside the window (in inference, only once there are many of them)."""
        if self.window is None:
            return self
        keep = self.window if torch.is_grad_enabled() else 2 * self.window
        return self._recent(self.window) if self.used > keep else self

    def select(self, rows: Int[Tensor, " n"]) -> KVCache:
        """A copy of the given rows."""
        return self._map(lambda x: x[rows.to(x.device)])

    def detach(self) -> KVCache:
        """The same values, detached from the autograd graph."""
        return self._map(Tensor.detach)

    def to(self, device: torch.device | str) -> KVCache:
        """The cache on another device."""
        return self._map(lambda x: x.to(device))

    def _map(self, f: Callable[[Tensor], Tensor]) -> KVCache:
        """Apply `f` to the slots in use; `f` may change rows, but not slots."""
        return replace(
            self,
            buffers=tuple(f(x) for x in self.tensors),
            table=None if self.table is None else f(self.table[:, : self.used]),
            lengths=None if self.lengths is None else f(self.lengths),
            extent=_Extent(0),
        )

    def _with_table(self) -> KVCache:
        """The same cache with a position table, for rows of different lengths."""
        if self.table is not None:
            return self
        capacity = self.buffers[0].shape[1]
        first = self.seen - self.used
        table = torch.arange(first, first + capacity, device=self.buffers[0].device).repeat(len(self.buffers[0]), 1)
        return replace(self, table=table, lengths=self.length)

    def _append(self, new: list[Tensor], counts: Int[Tensor, " b"] | None) -> KVCache:
        t = new[0].shape[1]
        lengths = None
        if counts is not None and self.lengths is not None:
            column = torch.arange(t, device=counts.device)
            new.append(torch.where(column < counts[:, None], self.lengths[:, None] + column, -1))
            lengths = self.lengths + counts
        if self.used == 0:  # the new tokens become the buffers, without free slots
            slots, extent, written = self, _Extent(t), new
        elif torch.is_grad_enabled():
            slots, extent = self, _Extent(0)  # later calls must not modify tensors saved by autograd
            old = self.tensors if self.table is None else (*self.tensors, self.table[:, : self.used])
            written = [torch.cat([past, x], 1) for past, x in zip(old, new, strict=True)]
        else:
            slots = self if self._has_room(t) else self._grown(t)
            extent = slots.extent
            written = [*slots.buffers] if slots.table is None else [*slots.buffers, slots.table]
            for buffer, x in zip(written, new, strict=True):
                buffer[:, slots.used : slots.used + t] = x
            extent.filled = slots.used + t
        buffers = tuple(written[: len(self.buffers)])
        table = None if slots.table is None else written[-1]
        return replace(
            slots,
            buffers=buffers,
            used=slots.used + t,
            seen=slots.seen + t,
            table=table,
            lengths=lengths,
            extent=extent,
        )

    def _has_room(self, t: int) -> bool:
        first = self.buffers[0]
        free = self.extent.filled == self.used and self.used + t <= first.shape[1]
        if torch.compiler.is_compiling():
            return free
        return free and (torch.is_inference_mode_enabled() or not first.is_inference())

    def _grown(self, t: int) -> KVCache:
        """A copy with room for `t` more tokens: twice the size, counting only tokens inside the window."""
        live = self if self.window is None or self.used < self.window else self._recent(self.window - 1)
        capacity = max(live.used + t, 2 * live.used, 16)

        def enlarge(x: Tensor) -> Tensor:
            buffer = x.new_empty(x.shape[0], capacity, *x.shape[2:])
            buffer[:, : live.used] = x[:, : live.used]
            return buffer

        table = None if live.table is None else enlarge(live.table)
        return replace(live, buffers=tuple(map(enlarge, live.buffers)), table=table, extent=_Extent(live.used))

    def _recent(self, count: int) -> KVCache:
        """A copy of the `count` most recent tokens of each row."""
        if self.table is None:
            buffers = tuple(x[:, self.used - count :].clone() for x in self.tensors)
            return replace(self, buffers=buffers, used=count, extent=_Extent(0))
        table, slot = self.table[:, : self.used].topk(count, dim=1)
        table, slot = table.flip(1), slot.flip(1)
        rows = torch.arange(len(slot), device=slot.device)[:, None]
        buffers = tuple(x[rows, slot] for x in self.tensors)
        return replace(self, buffers=buffers, used=count, table=table, extent=_Extent(0))
