"""The interface of a state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from qkflow.layout import format_lengths

_S = TypeVar("_S", bound="State")


class State(ABC):
    """The interface of all states. Rows are the sequences of the batch; packed input has one row per sequence."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({format_lengths(self.length, 'row')}, {self.nbytes:,} bytes)"

    @property
    @abstractmethod
    def length(self) -> Int[Tensor, " b"]:
        """Number of tokens seen, per row."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Size in bytes."""

    @abstractmethod
    def map(self: _S, f: Callable[[Tensor], Tensor]) -> _S:
        """The state with `f` applied to every tensor; `f` may change the rows, but no other dimension."""

    def select(self: _S, rows: Int[Tensor, " n"]) -> _S:
        """A copy of the given rows, in that order; rows may be repeated."""
        return self.map(lambda x: x[rows.to(x.device)])

    def detach(self: _S) -> _S:
        """The same values, detached from the autograd graph."""
        return self.map(Tensor.detach)

    def to(self: _S, device: torch.device | str) -> _S:
        """The state on another device."""
        return self.map(lambda x: x.to(device))
