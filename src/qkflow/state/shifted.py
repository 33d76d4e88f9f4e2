"""A cache whose tokens are seen one step late."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkflow.state.base import State
from qkflow.state.kv_cache import KVCache


@dataclass(frozen=True, eq=False)
class ShiftedKVCache(State):
    """A cache of tokens that are seen one step late: the last token of each row waits beside it.

    >>> ShiftedKVCache(KVCache.start([torch.zeros(2, 0, 4)]), (torch.zeros(2, 1, 4),)).length.tolist()
    [0, 0]
    """

    cache: KVCache
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

    def select(self, rows: Int[Tensor, " m"]) -> ShiftedKVCache:
        """The rows asked for, copied."""
        return ShiftedKVCache(self.cache.select(rows), tuple(x[rows.to(x.device)] for x in self.last))

    def detach(self) -> ShiftedKVCache:
        """The same values, cut from the graph that made them."""
        return ShiftedKVCache(self.cache.detach(), tuple(x.detach() for x in self.last))

    def to(self, device: torch.device | str) -> ShiftedKVCache:
        """The same state on another device."""
        return ShiftedKVCache(self.cache.to(device), tuple(x.to(device) for x in self.last))
