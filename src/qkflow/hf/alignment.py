"""Where the weights of a loaded model lie in memory: the last bits of a product depend on it."""

from __future__ import annotations

from itertools import chain

from torch import nn

_LINE = 64
"""Torch's own tensors begin at multiples of so many bytes on a CPU; in a file that is mapped they begin anywhere."""


def align(model: nn.Module) -> None:
    """Move weights that came from a file to where torch would have put them, so that they compute the same bits.

    >>> align(nn.Linear(2, 2))
    """
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % _LINE:
            tensor.data = tensor.data.clone()
