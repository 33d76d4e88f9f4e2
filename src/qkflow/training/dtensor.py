"""Tensors of which each process holds a piece: found out, looked into, cut and put together again."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

from qkflow.training.distributed import World

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether this process has only a piece of a tensor.

    >>> is_sharded(Tensor(2))
    False
    """
    module = sys.modules.get("torch.distributed.tensor")  # whoever has such a tensor has imported it
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """What of a tensor is on this process: all of it, unless it is sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def like(tensor: Tensor, own: Tensor) -> Tensor:
    """A copy of a whole tensor, placed and sharded as `own` is. Nothing travels: every process has the whole."""
    if not is_sharded(own):
        return tensor.to(own.device, copy=True)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


def put_together(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Whole tensors on the first process's CPU, one after the other; none on the others."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if is_sharded(tensor) else tensor
        if world.leads:
            found[name] = whole.detach().cpu()
    return found
