"""One model on several processes: each learns from its rows of the batch, and their gradients are averaged.

    ddp     every process has the whole model, and gradients are averaged while the way back is still being walked
    fsdp    every process has a part of each parameter and of the optimiser's memory; a block is put together for as
            long as it computes

A step's rows are a function of (seed, step) and the processes share them out, so what is learnt does not depend on how
many there are, but for rounding.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qkflow.errors import UsageError
from qkflow.training.config import TrainConfig
from qkflow.training.distributed import World
from qkflow.training.dtensor import is_sharded, local
from qkflow.training.lm_logits import Scores


def refuse_uneven(config: TrainConfig, world: World, *, begun: bool = False) -> None:
    """Refuse what these processes cannot share out; the batch of a run that has `begun` cannot be another."""
    batch, size = config.batch, world.size
    if batch % size:
        near = sorted({max(1, batch // size) * size, (batch // size + 1) * size})
        divisors = [str(count) for count in range(2, batch + 1) if batch % count == 0]
        fewer = f"run {' or '.join(divisors[:4])} processes" if divisors else "run one process"
        advice = fewer if begun else f"give --batch {' or '.join(map(str, near))}, or {fewer}"
        raise UsageError(f"a batch of {batch} windows does not divide among {size} processes: {advice}")
    if config.compile and world.kind == "fsdp":
        raise UsageError("compile and fsdp do not go together: give --parallel ddp, or leave out --compile")


def micro_batches(rows: int, most: int) -> int:
    """The smallest number of equal micro-batches that `rows` divide into, of `most` rows each.

    >>> micro_batches(32, 8), micro_batches(16, 8), micro_batches(6, 4)
    (4, 2, 2)
    """
    return next(count for count in range(1, rows + 1) if rows % count == 0 and rows // count <= most)


def spread(scores: Scores, world: World, device: torch.device, *, unused: bool = False) -> nn.Module:
    """What to call instead of `scores` to train on all processes; under fsdp its parameters become sharded ones.

    `unused` says that there are parameters which get no gradient: ddp has to look for them then.
    """
    if world.kind == "fsdp":
        return _sharded(scores, world, device)
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(scores, find_unused_parameters=unused)


def _sharded(scores: Scores, world: World, device: torch.device) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (world.size,))
    whole = kept_whole(scores)
    for block in scores.model.blocks:
        fully_shard(block, mesh=mesh, ignored_params=whole)
    return cast(nn.Module, fully_shard(scores, mesh=mesh, ignored_params=whole))


def kept_whole(scores: Scores) -> set[nn.Parameter]:
    """What every process keeps whole under fsdp: single numbers, and small networks that several blocks share."""
    users: dict[nn.Parameter, int] = {}
    for block in scores.model.blocks:
        for parameter in block.parameters():
            users[parameter] = users.get(parameter, 0) + 1
    return {parameter for parameter in scores.parameters() if parameter.ndim == 0 or users.get(parameter, 0) > 1}


@contextlib.contextmanager
def quiet(world: World) -> Iterator[None]:
    """Leave out torch's advice not to change what a block returned, which nothing does."""
    if world.size == 1:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        yield


@contextlib.contextmanager
def gradients_travel(module: nn.Module, world: World, *, last: bool) -> Iterator[None]:
    """Average the gradients of this micro-batch only if it is the `last` of its step: until then they are summed."""
    if world.size == 1:
        yield
    elif world.kind == "fsdp":
        from torch.distributed.fsdp import FSDPModule

        cast(FSDPModule, module).set_requires_gradient_sync(last)
        yield
    else:
        from torch.nn.parallel import DistributedDataParallel

        with contextlib.nullcontext() if last else cast(DistributedDataParallel, module).no_sync():
            yield


@contextlib.contextmanager
def pieces_after(scores: Scores, world: World) -> Iterator[None]:
    """Leave a sharded model in pieces: a pass without a way back leaves some of it whole, unknown to the optimiser."""
    try:
        yield
    finally:
        if world.kind == "fsdp":
            from torch.distributed.fsdp import FSDPModule

            cast(FSDPModule, scores).reshard()


def average_whole(model: nn.Module, world: World) -> None:
    """Average the gradients of what fsdp left whole; ddp has averaged all of them already."""
    if world.kind != "fsdp":
        return
    some = [p.grad for p in model.parameters() if p.grad is not None and not is_sharded(p.grad)]
    if not some:
        return
    flat = torch.cat([gradient.flatten() for gradient in some])
    dist.all_reduce(flat)
    flat /= world.size
    for gradient, mean in zip(some, flat.split([gradient.numel() for gradient in some]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def mean_over(world: World, number: Tensor) -> Tensor:
    """The mean of the processes' numbers."""
    if world.size == 1:
        return number
    total = number.clone()
    dist.all_reduce(total)
    return total / world.size


def gradient_norm(model: nn.Module, world: World) -> Tensor:
    """The length of the whole gradient, the same on every process."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if world.kind != "fsdp":
        return torch.nn.utils.get_total_norm(gradients)
    parts = [local(gradient) for gradient in gradients if is_sharded(gradient)]
    squares = torch.stack([torch.linalg.vector_norm(part).square() for part in parts]).sum()
    dist.all_reduce(squares)
    whole = [torch.linalg.vector_norm(gradient).square() for gradient in gradients if not is_sharded(gradient)]
    return torch.stack([squares, *whole]).sum().sqrt()


def clip_gradients(model: nn.Module, most: float, norm: Tensor, world: World) -> None:
    """Scale the gradient down to the length `most` if its `norm` is more."""
    if world.kind != "fsdp":
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), most, norm)
        return
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)  # as torch has it
    for parameter in model.parameters():
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor)
