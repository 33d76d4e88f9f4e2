"""Executors call functions in other processes. They know nothing about experiments."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from qkflow.errors import UsageError, out_of_memory, unknown

ExecutorName = Literal["local", "ray"]

_FORWARDED = ("QKFLOW_", "HF_", "XDG_CACHE_HOME")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The resources of one call."""

    threads: int = 1
    """CPU threads."""
    gpus: int = 0


@dataclass(frozen=True, kw_only=True)
class CallResult:
    """A call that has ended."""

    index: int
    """The index of its argument."""
    value: Any = None
    """What the function returned."""
    crash: str | None = None
    """Why there is no value: the process died, or the function raised."""


@runtime_checkable
class Executor(Protocol):
    """Calls a function in separate processes, several at a time. A context manager."""

    lock_timeout: float
    """Seconds after which a lost process is certainly dead and its locks are free."""

    def __enter__(self) -> Executor:
        """Acquire the executor's resources."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release them."""
        ...

    def cores(self) -> tuple[int, ...]:
        """CPU cores of each machine."""
        ...

    def run(
        self, function: Callable[[Any], Any], arguments: Sequence[Any], *, workers: int, resources: Resources
    ) -> Iterator[CallResult | None]:
        """Call a module-level `function` with each argument, each in a fresh process, `workers` at a time.

        Yields a `CallResult` per call as it ends, and `None` about twice a second so that the caller can check on
        other things.
        """
        ...

    def stop(self) -> None:
        """Signal the running calls to stop and start no others, so that `run` ends soon."""
        ...


def make_executor(name: str, *, address: str | None = None) -> Executor:
    """The executor of that name; `address` is the address of a Ray cluster.

    >>> len(make_executor("local").cores())
    1
    """
    if name not in get_args(ExecutorName):
        raise unknown("executor", name, get_args(ExecutorName))
    if name == "ray":
        from qkflow.experiment.executors.ray import RayExecutor  # optional dependency

        return RayExecutor(address)
    if address is not None:
        raise UsageError(f"the address {address!r} is for a Ray cluster: use --executor ray")
    from qkflow.experiment.executors.local import LocalExecutor

    return LocalExecutor()


def forwarded_environment() -> dict[str, str]:
    """The environment variables that a call needs from its caller."""
    return {name: value for name, value in os.environ.items() if name.startswith(_FORWARDED)}


def describe_error(error: BaseException, *, reduce: str = "--batch, --context, --size or --jobs") -> str:
    """An exception on one line; `reduce` is what to reduce if there is too little memory.

    >>> describe_error(RuntimeError("no attention"))
    'RuntimeError: no attention'
    >>> describe_error(RuntimeError("can't allocate memory: you tried to allocate 4000 bytes"), reduce="--batch")
    'out of memory (tried to allocate 4,000 bytes): reduce --batch'
    """
    if (size := out_of_memory(error)) is not None:
        return f"out of memory{size}: reduce {reduce}"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
