"""Every past token, in buffers that grow without copying the past."""

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
    """How many slots of a shared buffer are written: the one thing that states on the same buffer agree on."""

    filled: int


@dataclass(frozen=True, eq=False)
class KVCache(State):
    """Past tokens, one slot each, in one or several tensors `[b, slots, ...]`.

    As long as all rows have seen the same tokens, slot j holds position `seen - used + j` of every row and no table is
    kept. After padded or packed input the rows differ: then a table tells the position in each slot, -1 where it is
    empty.
    """

    buffers: tuple[Shaped[Tensor, "b capacity ..."], ...]
    used: int
    """Slots in use, from the first."""
    seen: int
    """Tokens seen, while all rows are alike."""
    window: int | None = None
    """How far back the mechanism looks, itself included; `None` is all the way."""
    table: Int[Tensor, "b capacity"] | None = None
    """Position held by each slot, -1 for none; `None` while all rows are alike."""
    lengths: Int[Tensor, " b"] | None = None
    """Tokens seen of each row; `None` while all rows are alike."""
    extent: _Extent = field(default_factory=lambda: _Extent(0))

    @staticmethod
    def start(like: Sequence[Shaped[Tensor, "b t ..."]], window: int | None = None) -> KVCache:
        """A cache that has seen nothing, for tensors shaped like these."""
        return KVCache(tuple(x.new_empty(x.shape[0], 0, *x.shape[2:]) for x in like), 0, 0, window)

    @property
    def length(self) -> Int[Tensor, " b"]:
        """Tokens seen so far of each row."""
        if self.lengths is not None:
            return self.lengths
        first = self.buffers[0]
        return torch.full((first.shape[0],), self.seen, dtype=torch.long, device=first.device)

    @property
    def offset(self) -> int | Int[Tensor, " b"]:
        """The position the next token will have: a number while all rows are alike, else one for each row."""
        return self.seen if self.lengths is None else self.lengths

    @property
    def tensors(self) -> tuple[Shaped[Tensor, "b used ..."], ...]:
        """The slots in use."""
        return tuple(buffer[:, : self.used] for buffer in self.buffers)

    @property
    def positions(self) -> Int[Tensor, " used"] | Int[Tensor, "b used"]:
        """The position in each slot, -1 for none."""
        if self.table is not None:
            return self.table[:, : self.used]
        return torch.arange(self.seen - self.used, self.seen, device=self.buffers[0].device)

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens that can still be seen, and of the table of their positions if there is one."""
        held = self.used if self.window is None else min(self.used, self.window)
        every = self.buffers if self.table is None else (*self.buffers, self.table)
        return sum(x[:, :held].nbytes for x in every)

    @property
    def reserved(self) -> int:
        """Bytes of the buffers, room to grow included."""
        return sum(x.nbytes for x in self.buffers) + (0 if self.table is None else self.table.nbytes)

    def extend(self, new: Sequence[Shaped[Tensor, "b t ..."]], lengths: Int[Tensor, " b"] | None = None) -> KVCache:
        """The cache followed by `new` tokens in row form, of which row i has `lengths[i]` (all, if not given)."""
        rows, t = new[0].shape[:2]
        if rows != self.buffers[0].shape[0]:
            raise UsageError(
                f"the state holds {self.buffers[0].shape[0]} rows, the input {rows}: select() the rows first"
            )
        if self.lengths is not None or lengths is not None:
            return self._uneven()._append([*new], lengths if lengths is not None else self.length.new_full((rows,), t))
        return self._append([*new], None)

    def trim(self) -> KVCache:
        """The cache to hand on: what lies past a sliding window's reach is given up (in inference, once it is much)."""
        if self.window is None:
            return self
        keep = self.window if torch.is_grad_enabled() else 2 * self.window
        return self._recent(self.window) if self.used > keep else self

    def select(self, rows: Int[Tensor, " n"]) -> KVCache:
        """The rows asked for, copied."""
        return self._map(lambda x: x[rows.to(x.device)])

    def detach(self) -> KVCache:
        """The same values, cut from the graph that made them."""
        return self._map(Tensor.detach)

    def to(self, device: torch.device | str) -> KVCache:
        """The same cache on another device."""
        return self._map(lambda x: x.to(device))

    def _map(self, f: Callable[[Tensor], Tensor]) -> KVCache:
        """The cache with `f` over the slots in use; `f` may change rows, not slots."""
        return replace(
            self,
            buffers=tuple(f(x) for x in self.tensors),
            table=None if self.table is None else f(self.table[:, : self.used]),
            lengths=None if self.lengths is None else f(self.lengths),
            extent=_Extent(0),
        )

    def _uneven(self) -> KVCache:
        """The same cache with a table of positions, as rows that differ need it."""
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
        if self.used == 0:  # nothing to put it behind: the new tokens are the buffers, full to the brim
            slots, extent, written = self, _Extent(t), new
        elif torch.is_grad_enabled():
            slots, extent = self, _Extent(0)  # nothing may later be written in place into what autograd has seen
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
        """A copy with room for `t` more: twice the size, or, under a window, room for the window once more."""
        live = self if self.window is None or self.used < self.window else self._recent(self.window - 1)
        capacity = max(live.used + t, 2 * live.used, 16)

        def roomy(x: Tensor) -> Tensor:
            buffer = x.new_empty(x.shape[0], capacity, *x.shape[2:])
            buffer[:, : live.used] = x[:, : live.used]
            return buffer

        table = None if live.table is None else roomy(live.table)
        return replace(live, buffers=tuple(map(roomy, live.buffers)), table=table, extent=_Extent(live.used))

    def _recent(self, count: int) -> KVCache:
        """A copy of the `count` latest tokens of each row."""
        if self.table is None:
            buffers = tuple(x[:, self.used - count :].clone() for x in self.tensors)
            return replace(self, buffers=buffers, used=count, extent=_Extent(0))
        table, slot = self.table[:, : self.used].topk(count, dim=1)
        table, slot = table.flip(1), slot.flip(1)
        rows = torch.arange(len(slot), device=slot.device)[:, None]
        buffers = tuple(x[rows, slot] for x in self.tensors)
        return replace(self, buffers=buffers, used=count, table=table, extent=_Extent(0))
