"""A state of fixed size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkflow.state.base import State


@dataclass(frozen=True, eq=False, repr=False)
class RecurrentState(State):
    """A matrix per row and head, and the last few tokens for the short convolutions.

    >>> RecurrentState(torch.zeros(2, 4, 16, 8), (torch.zeros(2, 3, 32),), tokens_seen=5).length.tolist()
    [5, 5]
    """

    matrix: Float[Tensor, "n h v k"]
    conv_state: tuple[Float[Tensor, "n w _"], ...]
    """The last tokens of each convolved stream, oldest first; zeros before the first token."""
    tokens_seen: int
    """Number of tokens seen, while all rows have the same length."""
    lengths: Int[Tensor, " n"] | None = None
    """Number of tokens seen, per row; None while all rows have the same length."""

    @property
    def length(self) -> Int[Tensor, " n"]:
        """Number of tokens seen, per row."""
        if self.lengths is not None:
            return self.lengths
        return torch.full((self.matrix.shape[0],), self.tokens_seen, dtype=torch.long, device=self.matrix.device)

    @property
    def nbytes(self) -> int:
        """Size in bytes, which does not depend on the number of tokens seen."""
        return self.matrix.nbytes + sum(x.nbytes for x in self.conv_state)

    @staticmethod
    def after(
        past: RecurrentState | None,
        matrix: Float[Tensor, "n h v k"],
        conv_state: tuple[Float[Tensor, "n w _"], ...],
        t: int,
        lengths: Int[Tensor, " n"] | None = None,
    ) -> RecurrentState:
        """The state `t` tokens after `past` (None at the start); row i has `lengths[i]` of them (default: all)."""
        tokens_seen = t if past is None else past.tokens_seen + t
        if past is not None and (past.lengths is not None or lengths is not None):
            lengths = past.length + (t if lengths is None else lengths)
        return RecurrentState(matrix, conv_state, tokens_seen, lengths)

    def map(self, f: Callable[[Tensor], Tensor]) -> RecurrentState:
        """The state with `f` applied to every tensor."""
        lengths = None if self.lengths is None else f(self.lengths)
        return RecurrentState(f(self.matrix), tuple(map(f, self.conv_state)), self.tokens_seen, lengths)
