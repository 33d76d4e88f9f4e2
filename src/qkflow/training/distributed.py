"""The processes of one run, as torchrun starts them: who they are, and how they come to agree.

A process that went its own way would leave the others waiting for it. So whatever one of them alone can know (a signal,
a clock, a disk that is full) becomes known to all at points that all of them reach, and then all do the same. One
process alone agrees with itself at no cost.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from qkflow import errors
from qkflow.errors import DiskError, UsageError
from qkflow.training.environment import pick_device
from qkflow.training.rendezvous import meet

Parallel = Literal["ddp", "fsdp"]
E = TypeVar("E", bound=BaseException)
T = TypeVar("T")

_PATIENCE = timedelta(minutes=30)
"""How long a process waits for one that neither answers nor is gone."""
_LATE = 60.0
"""Seconds after which a file should be seen on every machine."""
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_KINDS: tuple[type[Exception], ...] = (
    errors.CheckpointError,
    errors.BusyError,
    errors.UsageError,
    errors.DiskError,
    errors.DivergenceError,
    errors.Interrupted,
)
_AGREED = "all processes of the run know of this"


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes that make one run together, as one of them sees them.

    >>> World().leads, World().any(False), World().first({"steps": 3})
    (True, False, {'steps': 3})
    """

    rank: int = 0
    """Which of the processes this one is."""
    size: int = 1
    """How many there are."""
    local_rank: int = 0
    """Which of those on this machine this one is: the number of its GPU."""
    kind: Parallel | None = None
    """How the model is spread over them; None for one process."""

    @property
    def leads(self) -> bool:
        """Whether this is the process that talks and writes."""
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """The device of a kind that is this process's own; `auto` is the first there is."""
        device = pick_device(name)
        if self.size == 1:
            return device
        if device.type == "mps":
            raise UsageError(f"{self.size} processes cannot share the one device mps: give --device cpu")
        if device.type == "cuda":
            if self.local_rank >= (found := torch.cuda.device_count()):
                raise UsageError(
                    f"process {self.local_rank} of this machine has no GPU of its own, there are {found}: "
                    f"give torchrun --nproc-per-node {found}"
                )
            device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(device)
        return device

    def any(self, flag: bool) -> bool:
        """Whether one of the processes at least says so."""
        if self.size == 1:
            return flag
        votes = torch.tensor([int(flag)])
        dist.all_reduce(votes, dist.ReduceOp.MAX)
        return bool(votes.item())

    def gather(self, value: Any) -> list[Any]:
        """What every process gives, in their order; it travels as JSON."""
        if self.size == 1:
            return [value]
        content = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(content)]))
        room = max(int(size.item()) for size in sizes)
        mine = torch.zeros(room, dtype=torch.uint8)
        mine[: len(content)] = torch.from_numpy(content.copy())
        pieces = [torch.zeros_like(mine) for _ in range(self.size)]
        dist.all_gather(pieces, mine)
        return [
            json.loads(piece[: int(size.item())].numpy().tobytes()) for piece, size in zip(pieces, sizes, strict=True)
        ]

    def first(self, value: Any) -> Any:
        """What the first process gives; the others' values are ignored."""
        return value if self.size == 1 else self.gather(value if self.leads else None)[0]

    def add(self, numbers: np.ndarray) -> np.ndarray:
        """The sum of the processes' arrays of float64."""
        if self.size == 1:
            return numbers
        total = torch.from_numpy(numbers.copy())
        dist.all_reduce(total)
        return total.numpy()

    def sees(self, look: Callable[[], T]) -> T:
        """What `look` finds of what the first process has written: over a network, others may have to wait for it."""
        until = time.monotonic() + (0 if self.leads else _LATE)
        while not (found := look()) and time.monotonic() < until:
            time.sleep(0.5)
        return found

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """What fails in the block for one process fails for all of them. Nothing inside may talk to the others."""
        if self.size == 1:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        if not self.any(error is not None):
            return
        told = self.gather(None if error is None else _told(error))
        if error is None:
            rank, what = next((rank, what) for rank, what in enumerate(told) if what is not None)
            error = _retold(rank, what)
        raise known_to_all(error)


ALONE = World()
"""One process."""


class LostError(RuntimeError):
    """Another process of the run is gone."""


@contextlib.contextmanager
def join(parallel: Parallel | None = None) -> Iterator[World]:
    """The world that torchrun's environment names, or a group that is there already; else one process."""
    if dist.is_available() and dist.is_initialized():
        size, rank = dist.get_world_size(), dist.get_rank()
        local = int(os.environ.get("LOCAL_RANK", rank))
        with _losses():
            yield World(rank=rank, size=size, local_rank=local, kind=parallel or "ddp") if size > 1 else ALONE
        return
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or any(name not in os.environ for name in _NAMES):
        yield ALONE
        return
    if not dist.is_available():
        raise UsageError("this torch was built without torch.distributed: run one process, or install another torch")
    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    # Flags travel between CPUs in both cases: asking must not wait for what a GPU has in its queue.
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = meet(next(rendezvous("env://", timeout=_PATIENCE))[0], rank, size, _PATIENCE)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_PATIENCE)
    failed = True
    try:
        with join(parallel) as world:
            yield world
        failed = False
    finally:
        if not (failed and cuda):  # with a collective under way on a GPU it would wait; the end of the process ends it
            dist.destroy_process_group()


@contextlib.contextmanager
def _losses() -> Iterator[None]:
    """Say plainly what a broken connection means."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, LostError) or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise LostError(
            "another process of this run has ended, see what it said: go on with --resume, or let torchrun do it "
            f"(--max-restarts 3). [{str(error).splitlines()[0]}]"
        ) from error


def restarted() -> bool:
    """Whether torchrun started these processes again, after one of them was lost."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def by_torchrun() -> bool:
    """Whether torchrun started this process, and may start it again with the same command."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def known_to_all(error: E) -> E:
    """Mark an error that every process of the run meets, so that only the first speaks of it."""
    error.add_note(_AGREED)
    return error


def is_known_to_all(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, was marked.

    >>> is_known_to_all(UsageError("mine alone"))
    False
    """
    while error is not None:
        if _AGREED in getattr(error, "__notes__", ()):
            return True
        error = error.__cause__
    return False


def first_of(names: Iterable[str | None]) -> tuple[int, str] | None:
    """The first name that there is, and which process gave it.

    >>> first_of([None, "head"])
    (1, 'head')
    """
    return next(((rank, name) for rank, name in enumerate(names) if name is not None), None)


def _told(error: Exception) -> dict[str, Any]:
    kind = next((kind.__name__ for kind in _KINDS if isinstance(error, kind)), None)
    text = error.strerror if isinstance(error, DiskError) else str(error)
    return {"kind": kind, "text": text if kind else f"{type(error).__name__}: {text}", "errno": _errno(error)}


def _retold(rank: int, what: dict[str, Any]) -> Exception:
    """The error of another process."""
    text = f"process {rank}: {what['text']}"
    kind = next((kind for kind in _KINDS if kind.__name__ == what["kind"]), RuntimeError)
    return DiskError(what["errno"], text) if kind is DiskError else kind(text)


def _errno(error: Exception) -> int | None:
    return error.errno if isinstance(error, OSError) else None
