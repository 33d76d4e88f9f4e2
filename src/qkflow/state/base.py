"""The contract of a state."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Int
from torch import Tensor


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
