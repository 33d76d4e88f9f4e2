"""A cache whose tokens become visible one step later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from qkflow.state.base import State
from qkflow.state.kv_cache import KVCache


@dataclass(frozen=True, eq=False, repr=False)
class ShiftedKVCache(State):
    """A cache that excludes the last token of each row, which is kept separately.

    >>> import torch
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

    def map(self, f: Callable[[Tensor], Tensor]) -> ShiftedKVCache:
        """The state with `f` applied to every tensor."""
        return ShiftedKVCache(self.cache.map(f), tuple(map(f, self.last)))
