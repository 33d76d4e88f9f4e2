"""Where the runs of a study happen. An engine calls functions in processes; it knows nothing of studies."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from qkflow.errors import UsageError, unknown

ExecutorName = Literal["local", "ray"]

_PASSED_ON = ("QKFLOW_", "HF_", "XDG_CACHE_HOME")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What one call takes of a machine."""

    threads: int = 1
    """CPU threads."""
    gpus: int = 0
    """GPUs."""


@dataclass(frozen=True, kw_only=True)
class CallResult:
    """A call that has come to its end."""

    index: int
    """Which of the arguments it had."""
    value: Any = None
    """What the function returned."""
    crash: str | None = None
    """Why there is no value: the process died, or the function raised."""


@runtime_checkable
class Executor(Protocol):
    """Calls a function in processes of their own, some at a time. Used in a `with` block."""

    patience: float
    """Seconds after which a process that was lost is surely dead, and its locks are free."""

    def __enter__(self) -> Executor:
        """Make ready."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give back what was taken."""
        ...

    def cores(self) -> tuple[int, ...]:
        """CPU cores of each machine that calls can be made on."""
        ...

    def work(
        self, function: Callable[[Any], Any], arguments: Sequence[Any], *, at_once: int, need: Resources
    ) -> Iterator[CallResult | None]:
        """Call `function` (of a module) with each argument, each in a fresh process, `at_once` of them at a time.

        Yields a `CallResult` for each call, and `None` about twice a second, so that the caller can look around.
        """
        ...

    def stop(self) -> None:
        """Ask the calls that run to stop (they get a signal), and begin no others: `work` comes to its end soon."""
        ...


def make_executor(name: str, *, address: str | None = None) -> Executor:
    """The engine of that name; `address` is that of a Ray cluster.

    >>> len(make_executor("local").cores())
    1
    """
    if name not in get_args(ExecutorName):
        raise unknown("engine", name, get_args(ExecutorName))
    if name == "ray":
        from qkflow.experiment.executors.ray import RayExecutor  # here: ray may be absent

        return RayExecutor(address)
    if address is not None:
        raise UsageError(f"the address {address!r} is one of a Ray cluster: choose the engine ray with it")
    from qkflow.experiment.executors.local import LocalExecutor

    return LocalExecutor()


def surroundings() -> dict[str, str]:
    """The environment variables that a call must see as its caller does, wherever its process came from."""
    return {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
