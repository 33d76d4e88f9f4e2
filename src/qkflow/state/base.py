"""The interface of a state."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Int
from torch import Tensor


class State(ABC):
    """The interface of all states. Rows are the sequences of the batch; packed input has one row per sequence."""

    @property
    @abstractmethod
    def length(self) -> Int[Tensor, " b"]:
        """Number of tokens seen, per row."""

    @abstractmethod
    def select(self, rows: Int[Tensor, " n"]) -> State:
        """A copy of the given rows, in that order; rows may be repeated."""

    @abstractmethod
    def detach(self) -> State:
        """The same values, detached from the autograd graph."""

    @abstractmethod
    def to(self, device: torch.device | str) -> State:
        """The state on another device."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Size in bytes."""
