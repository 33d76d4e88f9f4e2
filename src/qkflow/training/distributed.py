"""The processes of a run: one, or a group started by torchrun.

Every process of a group must reach the same collective operations, or the others wait for it. So anything that only one
process can know (a signal, the clock, a full disk) is exchanged at a few points that all processes reach. For a single
process all of these are trivial (`SingleProcess`).
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from qkflow.errors import DiskError, DivergenceError, Interrupted, UsageError
from qkflow.training.reproducibility import pick_device

Parallel = Literal["ddp", "fsdp"]
E = TypeVar("E", bound=BaseException)
T = TypeVar("T")

_TIMEOUT = timedelta(minutes=30)
"""How long a process waits for another that neither responds nor exits."""
_FILE_TIMEOUT = 60.0
"""Seconds until a file written by one machine should be visible on all machines."""
_POLL_SECONDS = 0.02
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_ON_ALL_RANKS = "raised on all ranks"


class SingleProcess:
    """A run in one process.

    >>> group = SingleProcess()
    >>> group.is_main, group.any(False), group.broadcast({"steps": 3})
    (True, False, {'steps': 3})
    """

    rank: int = 0
    size: int = 1
    """The number of processes."""
    kind: Parallel | None = None
    """How the model is distributed; None for one process."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints, calls callbacks and writes files."""
        return self.rank == 0

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds only a shard of the model (fsdp)."""
        return self.kind == "fsdp"

    def device(self, name: str) -> torch.device:
        """The device of this process; `auto` is the first available."""
        return pick_device(name)

    def any(self, flag: bool) -> bool:
        """Whether the flag is true on at least one rank."""
        return flag

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in order."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0; the values of other ranks are ignored."""
        return self.gather(value if self.is_main else None)[0]

    def sum(self, array: np.ndarray) -> np.ndarray:
        """The sum of float64 arrays over ranks."""
        return array

    def wait_for_file(self, read: Callable[[], T]) -> T:
        """The result of `read`, repeated until it is true: files of rank 0 may appear late on other machines."""
        return read()

    @contextlib.contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """If the block raises on one rank, raise on all. The block must not communicate."""
        yield

    def on_main(self, action: Callable[[], T]) -> T | None:
        """Call `action` on rank 0; if it raises, raise on all ranks. Its result on rank 0, None on the others."""
        with self.raise_on_all_ranks():
            return action() if self.is_main else None


class ProcessGroup(SingleProcess):
    """The processes that train one model together, as seen by one of them."""

    def __init__(self, *, rank: int, size: int, local_rank: int, kind: Parallel) -> None:
        self.rank, self.size, self.local_rank, self.kind = rank, size, local_rank, kind

    def device(self, name: str) -> torch.device:  # noqa: D102
        device = pick_device(name)
        if device.type == "mps":
            raise UsageError(f"{self.size} processes cannot share the single mps device: use --device cpu")
        if device.type == "cuda":
            if self.local_rank >= (n_gpus := torch.cuda.device_count()):
                raise UsageError(
                    f"local rank {self.local_rank} has no GPU, this machine has {n_gpus}: "
                    f"use torchrun --nproc-per-node {n_gpus}"
                )
            device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(device)
        return device

    def any(self, flag: bool) -> bool:  # noqa: D102
        votes = torch.tensor([int(flag)])
        dist.all_reduce(votes, dist.ReduceOp.MAX)
        return bool(votes.item())

    def gather(self, value: Any) -> list[Any]:  # noqa: D102
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def sum(self, array: np.ndarray) -> np.ndarray:  # noqa: D102
        total = torch.from_numpy(array.copy())
        dist.all_reduce(total)
        return total.numpy()

    def wait_for_file(self, read: Callable[[], T]) -> T:  # noqa: D102
        deadline = time.monotonic() + (0 if self.is_main else _FILE_TIMEOUT)
        while not (result := read()) and time.monotonic() < deadline:
            time.sleep(0.5)
        return result

    @contextlib.contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:  # noqa: D102
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        if not self.any(error is not None):
            return
        gathered = self.gather(None if error is None else _for_other_ranks(error, self.rank))
        raise mark_on_all_ranks(error or next(caught for caught in gathered if caught is not None))


class LostProcessError(RuntimeError):
    """Another process of the run has exited."""


@contextlib.contextmanager
def join(parallel: Parallel | None = None) -> Iterator[SingleProcess]:
    """The group of torchrun's environment variables, or the one already initialized; otherwise a single process."""
    if dist.is_available() and dist.is_initialized():
        size, rank = dist.get_world_size(), dist.get_rank()
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        with _explain_lost_processes():
            if size == 1:
                yield SingleProcess()
            else:
                yield ProcessGroup(rank=rank, size=size, local_rank=local_rank, kind=parallel or "ddp")
        return
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or any(name not in os.environ for name in _VARIABLES):
        yield SingleProcess()
        return
    if not dist.is_available():
        raise UsageError("this build of PyTorch has no torch.distributed: use one process, or install another build")
    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    # Flags are exchanged between CPUs in both cases, so that they do not wait for queued GPU work.
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = private_store(next(rendezvous("env://", timeout=_TIMEOUT))[0], rank, size, _TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    failed = True
    try:
        with join(parallel) as group:
            yield group
        failed = False
    finally:
        if not (failed and cuda):  # with a pending collective on a GPU this would hang; process exit ends it
            dist.destroy_process_group()


@contextlib.contextmanager
def _explain_lost_processes() -> Iterator[None]:
    """Turn a broken connection into a `LostProcessError`."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, LostProcessError) or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise LostProcessError(
            "another process of this run has exited, see its output: use --resume to continue, or let torchrun restart "
            f"it (--max-restarts 3). [{str(error).splitlines()[0]}]"
        ) from error


def private_store(store: Store, rank: int, size: int, timeout: timedelta) -> Store:
    """A part of the store that only these `size` processes use; returns when all of them have joined.

    torchrun keeps one store across restarts, with the addresses of processes that have exited, and a process that reads
    one of those waits forever (https://github.com/pytorch/pytorch/issues/135712). The restart count cannot tell them
    apart, since each machine counts its own. So rank 0 chooses a random prefix, and the others request it:

        r -> hello/r          a random number n
        0 -> welcome/r/n      the prefix: a process that answers n was not started earlier
        r -> here/prefix/r    r has the prefix, so r was not started earlier either

    >>> from torch.distributed import HashStore
    >>> store = HashStore()
    >>> private_store(store, 0, 1, timedelta(seconds=1)).set("a", "b")
    >>> store.check(["a"])
    False
    """
    if rank:
        number = uuid.uuid4().hex
        store.set(f"hello/{rank}", number)
        store.wait([f"welcome/{rank}/{number}"], timeout)
        prefix = store.get(f"welcome/{rank}/{number}").decode()
        store.set(f"here/{prefix}/{rank}", "")
        return PrefixStore(prefix, store)
    prefix, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    missing, answered = set(range(1, size)), set[str]()
    while missing:
        for other in sorted(missing):
            if store.check([f"here/{prefix}/{other}"]):
                missing.remove(other)
            elif store.check([f"hello/{other}"]):
                number = store.get(f"hello/{other}").decode()
                if number not in answered:
                    store.set(f"welcome/{other}/{number}", prefix)
                    answered.add(number)
        if missing and time.monotonic() > deadline:
            raise UsageError(
                f"timed out after {timeout}: {len(missing)} of {size} processes did not join (the first is rank "
                f"{min(missing)}): see their output, and check that all machines run the same command"
            )
        time.sleep(_POLL_SECONDS if missing else 0)
    return PrefixStore(prefix, store)


def was_restarted() -> bool:
    """Whether torchrun has restarted these processes."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def is_torchrun() -> bool:
    """Whether torchrun started this process, and may restart it with the same command."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def mark_on_all_ranks(error: E) -> E:
    """Mark an error that every rank raises, so that only rank 0 prints it."""
    error.add_note(_ON_ALL_RANKS)
    return error


def is_on_all_ranks(error: BaseException | None) -> bool:
    """Whether an error, or its cause, was marked.

    >>> is_on_all_ranks(UsageError("on this rank only"))
    False
    """
    while error is not None:
        if _ON_ALL_RANKS in getattr(error, "__notes__", ()):
            return True
        error = error.__cause__
    return False


def first_not_none(values: Iterable[T | None]) -> T | None:
    """The first value that is not None.

    >>> first_not_none([None, "head"])
    'head'
    """
    return next((value for value in values if value is not None), None)


def _for_other_ranks(error: Exception, rank: int) -> Exception:
    """An error that names its rank and can be sent to the others, which libraries' own classes may not allow."""
    if isinstance(error, DiskError):
        return DiskError(error.errno, f"process {rank}: {error.strerror}")
    if isinstance(error, UsageError | DivergenceError | Interrupted):
        return type(error)(f"process {rank}: {error}")
    return RuntimeError(f"process {rank}: {type(error).__name__}: {error}")
