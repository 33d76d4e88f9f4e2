"""A summary of fixed size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkflow.state.base import State


@dataclass(frozen=True, eq=False)
class RecurrentState(State):
    """A matrix for each row and head, and the last few tokens that a short convolution still reads.

    >>> RecurrentState(torch.zeros(2, 4, 16, 8), (torch.zeros(2, 3, 32),), seen=5).length.tolist()
    [5, 5]
    """

    matrix: Float[Tensor, "n h v k"]
    """What has been written."""
    conv_state: tuple[Float[Tensor, "n w _"], ...]
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
        return self.matrix.nbytes + sum(tail.nbytes for tail in self.conv_state)

    @staticmethod
    def after(
        past: RecurrentState | None,
        matrix: Float[Tensor, "n h v k"],
        conv_state: tuple[Float[Tensor, "n w _"], ...],
        t: int,
        lengths: Int[Tensor, " n"] | None = None,
    ) -> RecurrentState:
        """What is held `t` tokens after `past`, or after none; row i had `lengths[i]` of them (all, if not given)."""
        seen = 0 if past is None else past.seen
        if past is not None and (past.lengths is not None or lengths is not None):
            lengths = past.length + (t if lengths is None else lengths)
        return RecurrentState(matrix, conv_state, seen + t, lengths)

    def select(self, rows: Int[Tensor, " m"]) -> RecurrentState:
        """The rows asked for, copied."""
        return self._map(lambda x: x[rows.to(x.device)])

    def detach(self) -> RecurrentState:
        """The same values, cut from the graph that made them."""
        return self._map(Tensor.detach)

    def to(self, device: torch.device | str) -> RecurrentState:
        """The same memory on another device."""
        return self._map(lambda x: x.to(device))

    def _map(self, f: Callable[[Tensor], Tensor]) -> RecurrentState:
        lengths = None if self.lengths is None else f(self.lengths)
        return RecurrentState(f(self.matrix), tuple(map(f, self.conv_state)), self.seen, lengths)
