"""What a mechanism carries from one call to the next.

A `State` is a value: a call returns a new one, and the one it was given still says what it said. It knows how many
tokens it has seen of each row, moves between devices, can be detached, selected by row (beams) and measured in bytes.

`Cache` is the state of mechanisms that keep every past token. With gradients on it is functional: new tensors at each
call. In inference it writes behind the tokens it holds, in a buffer that doubles when it is full, so that nothing is
copied for each new token. Older states on the same buffer keep what they see, because nobody writes where they look: a
state whose next place is taken already (it was continued once before) copies itself first. Under a sliding window a
full buffer keeps what can still be seen and forgets the rest.

`Delayed` is a cache whose tokens are seen one step late, so that the last one still waits outside.

`Memory` is the state of mechanisms that keep a summary of fixed size. It is functional always.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from qkflow.errors import UsageError


class State(ABC):
    """What every carried memory can do. Rows are the sequences of the batch: for packed input, one a segment."""

    @property
    @abstractmethod
    def length(self) -> Int[Tensor, " b"]:
        """Tokens seen so far of each row."""

    @abstractmethod
    def select(self, rows: Int[Tensor, " n"]) -> State:
        """The state of the given rows, in that order, repeated where asked for: copies, never shared memory."""

    @abstractmethod
    def detach(self) -> State:
        """The same values, cut from the graph that made them."""

    @abstractmethod
    def to(self, device: torch.device | str) -> State:
        """The same state on another device."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of what the state holds."""


@dataclass(eq=False)
class _Extent:
    """How many slots of a shared buffer are written: the one thing that states on the same buffer agree on."""

    filled: int


@dataclass(frozen=True, eq=False)
class Cache(State):
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
    def start(like: Sequence[Shaped[Tensor, "b t ..."]], window: int | None = None) -> Cache:
        """A cache that has seen nothing, for tensors shaped like these."""
        return Cache(tuple(x.new_empty(x.shape[0], 0, *x.shape[2:]) for x in like), 0, 0, window)

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

    def extend(self, new: Sequence[Shaped[Tensor, "b t ..."]], lengths: Int[Tensor, " b"] | None = None) -> Cache:
        """The cache followed by `new` tokens in row form, of which row i has `lengths[i]` (all, if not given)."""
        rows, t = new[0].shape[:2]
        if rows != self.buffers[0].shape[0]:
            raise UsageError(
                f"the state holds {self.buffers[0].shape[0]} rows, the input {rows}: select() the rows first"
            )
        if self.lengths is not None or lengths is not None:
            return self._uneven()._append([*new], lengths if lengths is not None else self.length.new_full((rows,), t))
        return self._append([*new], None)

    def trim(self) -> Cache:
        """The cache to hand on: what lies past a sliding window's reach is given up (in inference, once it is much)."""
        if self.window is None:
            return self
        keep = self.window if torch.is_grad_enabled() else 2 * self.window
        return self._recent(self.window) if self.used > keep else self

    def select(self, rows: Int[Tensor, " n"]) -> Cache:
        """The rows asked for, copied."""
        return self._map(lambda x: x[rows.to(x.device)])

    def detach(self) -> Cache:
        """The same values, cut from the graph that made them."""
        return self._map(Tensor.detach)

    def to(self, device: torch.device | str) -> Cache:
        """The same cache on another device."""
        return self._map(lambda x: x.to(device))

    def _map(self, f: Callable[[Tensor], Tensor]) -> Cache:
        """The cache with `f` over the slots in use; `f` may change rows, not slots."""
        return replace(
            self,
            buffers=tuple(f(x) for x in self.tensors),
            table=None if self.table is None else f(self.table[:, : self.used]),
            lengths=None if self.lengths is None else f(self.lengths),
            extent=_Extent(0),
        )

    def _uneven(self) -> Cache:
        """The same cache with a table of positions, as rows that differ need it."""
        if self.table is not None:
            return self
        capacity = self.buffers[0].shape[1]
        first = self.seen - self.used
        table = torch.arange(first, first + capacity, device=self.buffers[0].device).repeat(len(self.buffers[0]), 1)
        return replace(self, table=table, lengths=self.length)

    def _append(self, new: list[Tensor], counts: Int[Tensor, " b"] | None) -> Cache:
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

    def _grown(self, t: int) -> Cache:
        """A copy with room for `t` more: twice the size, or, under a window, room for the window once more."""
        live = self if self.window is None or self.used < self.window else self._recent(self.window - 1)
        capacity = max(live.used + t, 2 * live.used, 16)

        def roomy(x: Tensor) -> Tensor:
            buffer = x.new_empty(x.shape[0], capacity, *x.shape[2:])
            buffer[:, : live.used] = x[:, : live.used]
            return buffer

        table = None if live.table is None else roomy(live.table)
        return replace(live, buffers=tuple(map(roomy, live.buffers)), table=table, extent=_Extent(live.used))

    def _recent(self, count: int) -> Cache:
        """A copy of the `count` latest tokens of each row."""
        if self.table is None:
            buffers = tuple(x[:, self.used - count :].clone() for x in self.tensors)
            return replace(self, buffers=buffers, used=count, extent=_Extent(0))
        table, slot = self.table[:, : self.used].topk(count, dim=1)
        table, slot = table.flip(1), slot.flip(1)
        rows = torch.arange(len(slot), device=slot.device)[:, None]
        buffers = tuple(x[rows, slot] for x in self.tensors)
        return replace(self, buffers=buffers, used=count, table=table, extent=_Extent(0))


@dataclass(frozen=True, eq=False)
class Delayed(State):
    """A cache of tokens that are seen one step late: the last token of each row waits beside it.

    >>> Delayed(Cache.start([torch.zeros(2, 0, 4)]), (torch.zeros(2, 1, 4),)).length.tolist()
    [0, 0]
    """

    cache: Cache
    """What can be seen; its slots are as many as the tokens, the first of which holds what came before all of them."""
    last: tuple[Float[Tensor, "n 1 _"], ...]
    """What the next slot will hold."""

    @property
    def length(self) -> Int[Tensor, " n"]:
        """Tokens seen so far of each row."""
        return self.cache.length

    @property
    def nbytes(self) -> int:
        """Bytes of the cache and of what waits."""
        return self.cache.nbytes + sum(x.nbytes for x in self.last)

    def select(self, rows: Int[Tensor, " m"]) -> Delayed:
        """The rows asked for, copied."""
        return Delayed(self.cache.select(rows), tuple(x[rows.to(x.device)] for x in self.last))

    def detach(self) -> Delayed:
        """The same values, cut from the graph that made them."""
        return Delayed(self.cache.detach(), tuple(x.detach() for x in self.last))

    def to(self, device: torch.device | str) -> Delayed:
        """The same state on another device."""
        return Delayed(self.cache.to(device), tuple(x.to(device) for x in self.last))


@dataclass(frozen=True, eq=False)
class Memory(State):
    """A matrix for each row and head, and the last few tokens that a short convolution still reads.

    >>> Memory(torch.zeros(2, 4, 16, 8), (torch.zeros(2, 3, 32),), seen=5).length.tolist()
    [5, 5]
    """

    matrix: Float[Tensor, "n h v k"]
    """What has been written."""
    tails: tuple[Float[Tensor, "n w _"], ...]
    """The last tokens of each stream that is convolved, the latest last; zeros before the first token."""
    seen: int
    """Tokens seen, while all rows are alike."""
    lengths: Int[Tensor, " n"] | None = None
    """Tokens seen of each row; `None` while all rows are alike."""

    @property
    def length(self) -> Int[Tensor, " n"]:
        """Tokens seen so far of each row."""
        if self.lengths is not None:
            return self.lengths
        return torch.full((len(self.matrix),), self.seen, dtype=torch.long, device=self.matrix.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices and the tails: the same however many tokens were seen."""
        return self.matrix.nbytes + sum(tail.nbytes for tail in self.tails)

    @staticmethod
    def after(
        past: Memory | None,
        matrix: Float[Tensor, "n h v k"],
        tails: tuple[Float[Tensor, "n w _"], ...],
        t: int,
        lengths: Int[Tensor, " n"] | None = None,
    ) -> Memory:
        """What is held `t` tokens after `past`, or after none; row i had `lengths[i]` of them (all, if not given)."""
        seen = 0 if past is None else past.seen
        if past is not None and (past.lengths is not None or lengths is not None):
            lengths = past.length + (t if lengths is None else lengths)
        return Memory(matrix, tails, seen + t, lengths)

    def select(self, rows: Int[Tensor, " m"]) -> Memory:
        """The rows asked for, copied."""
        return self._map(lambda x: x[rows.to(x.device)])

    def detach(self) -> Memory:
        """The same values, cut from the graph that made them."""
        return self._map(Tensor.detach)

    def to(self, device: torch.device | str) -> Memory:
        """The same memory on another device."""
        return self._map(lambda x: x.to(device))

    def _map(self, f: Callable[[Tensor], Tensor]) -> Memory:
        lengths = None if self.lengths is None else f(self.lengths)
        return Memory(f(self.matrix), tuple(map(f, self.tails)), self.seen, lengths)
