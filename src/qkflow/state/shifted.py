"""A cache whose tokens become visible one step later."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkflow.state.base import State
from qkflow.state.kv_cache import KVCache


@dataclass(frozen=True, eq=False)
class ShiftedKVCache(State):
    """A cache that excludes the last token of each row, which is kept separately.

    >>> ShiftedKVCache(KVCache.start([torch.zeros(2, 0, 4)]), (torch.zeros(2, 1, 4),)).length.tolist()
    [0, 0]
    """

    cache: KVCache
    """The visible tokens. The first slot holds the null key, so there are as many slots as tokens."""
    last: tuple[Float[Tensor, "n 1 _"], ...]
    """The content of the next slot."""

    @property
    def length(self) -> Int[Tensor, " n"]:
        """Number of tokens seen, per row."""
        return self.cache.length

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.cache.nbytes + sum(x.nbytes for x in self.last)

    def select(self, rows: Int[Tensor, " m"]) -> ShiftedKVCache:
        """A copy of the given rows."""
        return ShiftedKVCache(self.cache.select(rows), tuple(x[rows.to(x.device)] for x in self.last))

    def detach(self) -> ShiftedKVCache:
        """The same values, detached from the autograd graph."""
        return ShiftedKVCache(self.cache.detach(), tuple(x.detach() for x in self.last))

    def to(self, device: torch.device | str) -> ShiftedKVCache:
        """The state on another device."""
        return ShiftedKVCache(self.cache.to(device), tuple(x.to(device) for x in self.last))
