"""One model on several processes: each computes the gradient of its rows of the batch, and the gradients are averaged.

    ddp     every process has the whole model; gradients are averaged during the backward pass
    fsdp    every process has a shard of each parameter and of the optimizer state; a block is gathered to compute

The batch of a step is a function of (seed, step) and is divided among the processes, so results do not depend on how
many there are, up to rounding.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qkflow.errors import UsageError
from qkflow.models import Stack
from qkflow.training.config import TrainConfig
from qkflow.training.distributed import SingleProcess

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def validate_parallel(config: TrainConfig, group: SingleProcess, *, resume: bool = False) -> None:
    """Raise `UsageError` if these processes cannot share the run. The batch of a resumed run cannot change."""
    batch, size = config.batch, group.size
    if batch % size:
        nearest = sorted({max(1, batch // size) * size, (batch // size + 1) * size})
        divisors = [str(count) for count in range(2, batch + 1) if batch % count == 0]
        processes = f"use {' or '.join(divisors[:4])} processes" if divisors else "use one process"
        advice = processes if resume else f"use --batch {' or '.join(map(str, nearest))}, or {processes}"
        raise UsageError(f"a batch of {batch} sequences is not divisible among {size} processes: {advice}")
    if config.compile and group.is_sharded:
        raise UsageError("compile does not support fsdp: use --parallel ddp, or omit --compile")


def n_micro_batches(rows: int, max_rows: int) -> int:
    """The smallest number of equal micro-batches of at most `max_rows` rows each.

    >>> n_micro_batches(32, 8), n_micro_batches(16, 8), n_micro_batches(6, 4)
    (4, 2, 2)
    """
    return next(count for count in range(1, rows + 1) if rows % count == 0 and rows // count <= max_rows)


def wrap(module: nn.Module, group: SingleProcess, device: torch.device, *, find_unused: bool = False) -> nn.Module:
    """Wrap a module (with the model in `module.model`) for training on all processes; fsdp shards its parameters."""
    if not group.is_sharded:
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(module, find_unused_parameters=find_unused)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (group.size,))
    whole = unsharded_parameters(module)
    for block in _blocks(module):
        fully_shard(block, mesh=mesh, ignored_params=whole)
    return cast(nn.Module, fully_shard(module, mesh=mesh, ignored_params=whole))


def unsharded_parameters(module: nn.Module) -> set[nn.Parameter]:
    """What every process keeps whole under fsdp: scalars, and small networks shared by several blocks."""
    users: dict[nn.Parameter, int] = {}
    for block in _blocks(module):
        for parameter in block.parameters():
            users[parameter] = users.get(parameter, 0) + 1
    return {parameter for parameter in module.parameters() if parameter.ndim == 0 or users.get(parameter, 0) > 1}


def _blocks(module: nn.Module) -> nn.ModuleList:
    model = module.model
    if not isinstance(model, Stack):
        raise UsageError(f"fsdp needs a model made of blocks, got {type(model).__name__}: use --parallel ddp")
    return model.blocks


@contextlib.contextmanager
def ignore_view_warnings(group: SingleProcess) -> Iterator[None]:
    """Ignore FSDP's warning about modifying the output of a block in place, which nothing does."""
    if group.size == 1:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        yield


@contextlib.contextmanager
def gradient_sync(module: nn.Module, group: SingleProcess, *, enabled: bool) -> Iterator[None]:
    """Average the gradients of this backward pass over ranks if `enabled`; otherwise accumulate them locally."""
    if group.size == 1:
        yield
    elif group.is_sharded:
        from torch.distributed.fsdp import FSDPModule

        cast(FSDPModule, module).set_requires_gradient_sync(enabled)
        yield
    else:
        from torch.nn.parallel import DistributedDataParallel

        with contextlib.nullcontext() if enabled else cast(DistributedDataParallel, module).no_sync():
            yield


@contextlib.contextmanager
def reshard_after(module: nn.Module, group: SingleProcess) -> Iterator[None]:
    """Shard the model again afterwards: a forward pass without a backward pass leaves parts of it gathered."""
    try:
        yield
    finally:
        if group.is_sharded:
            from torch.distributed.fsdp import FSDPModule

            cast(FSDPModule, module).reshard()


def average_unsharded_gradients(model: nn.Module, group: SingleProcess) -> None:
    """Average the gradients of parameters that fsdp keeps whole; ddp has averaged all of them already."""
    if not group.is_sharded:
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None and not is_sharded(p.grad)]
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= group.size
    for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def mean_over_ranks(number: Tensor, group: SingleProcess) -> Tensor:
    """The mean over ranks."""
    if group.size == 1:
        return number
    total = number.clone()
    dist.all_reduce(total)
    return total / group.size


def gradient_norm(model: nn.Module, group: SingleProcess) -> Tensor:
    """The norm of the whole gradient, the same on every rank."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if not group.is_sharded:
        return torch.nn.utils.get_total_norm(gradients)
    shards = [local(gradient) for gradient in gradients if is_sharded(gradient)]
    squares = torch.stack([torch.linalg.vector_norm(shard).square() for shard in shards]).sum()
    dist.all_reduce(squares)
    whole = [torch.linalg.vector_norm(gradient).square() for gradient in gradients if not is_sharded(gradient)]
    return torch.stack([squares, *whole]).sum().sqrt()


def clip_gradients(model: nn.Module, max_norm: float, norm: Tensor, group: SingleProcess) -> None:
    """Scale the gradient down to `max_norm` if its `norm` is larger."""
    if not group.is_sharded:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
        return
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as in torch.nn.utils
    for parameter in model.parameters():
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor)


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether this process has only a shard of the tensor.

    >>> is_sharded(Tensor(2))
    False
    """
    module = sys.modules.get("torch.distributed.tensor")  # a sharded tensor exists only after this import
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The local shard of a tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def shard_like(tensor: Tensor, other: Tensor) -> Tensor:
    """A copy of a whole tensor on the device and with the sharding of `other`, without communication."""
    if not is_sharded(other):
        return tensor.to(other.device, copy=True)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements, src_data_rank=None)


def gather_tensors(tensors: Mapping[str, Tensor], group: SingleProcess) -> dict[str, Tensor]:
    """Whole tensors on the CPU of rank 0, gathered one at a time; nothing on the other ranks."""
    gathered: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if is_sharded(tensor) else tensor
        if group.is_main:
            gathered[name] = whole.detach().cpu()
    return gathered
