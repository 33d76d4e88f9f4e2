"""Processes on this machine, forked in milliseconds by a server that has imported torch.

concurrent.futures and loky reuse workers and treat the death of one as the end of the pool. Here each call has its own
process: a crash fails one call, peak memory is that of one run, and no process outlives its parent.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, cast

from qkflow.experiment.executors.base import CallResult, Resources, describe_error, forwarded_environment

Context = ForkServerContext | SpawnContext

_TICK = 0.5
_PRELOAD = ["qkflow.experiment.worker", "torch._dynamo"]  # optimizers import torch._dynamo, which takes a second


@dataclass(eq=False)
class _Call:
    index: int
    process: BaseProcess
    pipe: Connection


class LocalExecutor:
    """Runs calls on the cores of this machine."""

    lock_timeout = 10.0

    def __init__(self) -> None:
        self._running: list[_Call] = []
        self._stopped = False

    def __enter__(self) -> LocalExecutor:
        """Nothing to acquire."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill the running calls."""
        self._end()

    def cores(self) -> tuple[int, ...]:
        """The cores that this process may use."""
        return (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,)

    def run(
        self, function: Callable[[Any], Any], arguments: Sequence[Any], *, workers: int, resources: Resources
    ) -> Iterator[CallResult | None]:
        """See `Executor.run`. The called function sets its threads; GPUs are shared."""
        context, waiting = _context(), list(enumerate(arguments))
        try:
            while waiting or self._running:
                while waiting and len(self._running) < workers and not self._stopped:
                    index, argument = waiting.pop(0)
                    try:
                        self._running.append(_start(context, index, argument, function))
                    except (EOFError, OSError) as error:  # the fork server was killed; the next start launches another
                        reason = f"its process could not be started ({describe_error(error)})"
                        yield CallResult(index=index, crash=reason)
                if not self._running:
                    return
                ready = connection.wait([call.pipe for call in self._running], _TICK)
                if not ready:
                    yield None
                for call in [call for call in self._running if call.pipe in ready]:
                    self._running.remove(call)
                    yield _collect(call)
        finally:
            self._end()

    def stop(self) -> None:
        """Send SIGTERM to every process, once."""
        if not self._stopped:
            self._stopped = True
            for call in self._running:
                call.process.terminate()

    def _end(self) -> None:
        for call in self._running:
            call.process.kill()
        for call in self._running:
            _collect(call)
        self._running.clear()


def _start(context: Context, index: int, argument: Any, function: Callable[[Any], Any]) -> _Call:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, forwarded_environment(), function, argument), daemon=True)
    process.start()
    sender.close()  # so that the receiver gets EOF when the process dies
    return _Call(index, process, cast(Connection, receiver))


def _collect(call: _Call) -> CallResult:
    """The result of a call whose process has answered or died."""
    try:
        value, crash = call.pipe.recv()
    except (EOFError, OSError):  # nothing, or a truncated message
        value, crash = None, ""
    call.process.join()
    call.pipe.close()
    code = call.process.exitcode
    call.process.close()
    if crash == "":
        crash = f"its process exited with code {code}" if (code or 0) >= 0 else _killed_by(-(code or 0))
    return CallResult(index=call.index, value=value, crash=crash)


def _killed_by(number: int) -> str:
    name = signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"
    return f"its process was killed by {name}" + (", possibly out of memory" if name == "SIGKILL" else "")


def _child(pipe: Connection, environment: Mapping[str, str], function: Callable[[Any], Any], argument: Any) -> None:
    """Call the function and send its result."""
    os.setsid()  # a Ctrl-C of the terminal must not reach it: signals come from the executor
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ.update(environment)
    try:
        message = (function(argument), None)
    except Exception as error:  # any error of the called function is reported
        message = (None, describe_error(error))
    pipe.send(message)


def _exit_with_parent() -> None:
    """End this process when its parent ends, so that no orphan holds the lock of a run."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _context() -> Context:
    """Fork from a server that has imported everything, or spawn where there is no fork."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # a process with threads cannot be forked safely
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    return context
