"""Processes of this machine. A server that has imported torch forks one for each call, in milliseconds."""

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

from qkflow.experiment.executors.base import CallResult, Resources, surroundings
from qkflow.experiment.worker import described

Context = ForkServerContext | SpawnContext

_TICK = 0.5
_PRELOAD = ["qkflow.experiment.worker", "torch._dynamo"]  # an optimiser imports the latter, which takes a second


@dataclass(eq=False)
class _Call:
    index: int
    process: BaseProcess
    answer: Connection


class LocalExecutor:
    """Runs calls on this machine's cores."""

    patience = 10.0

    def __init__(self) -> None:
        self._running: list[_Call] = []
        self._stopped = False

    def __enter__(self) -> LocalExecutor:
        """Nothing to make ready."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what still runs."""
        self._end()

    def cores(self) -> tuple[int, ...]:
        """Cores that this process may use."""
        return (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,)

    def work(
        self, function: Callable[[Any], Any], arguments: Sequence[Any], *, at_once: int, need: Resources
    ) -> Iterator[CallResult | None]:
        """See `Executor.work`. Threads are set by what is called, and the GPU is shared."""
        context, waiting = _context(), list(enumerate(arguments))
        try:
            while waiting or self._running:
                while waiting and len(self._running) < at_once and not self._stopped:
                    index, argument = waiting.pop(0)
                    try:
                        self._running.append(_start(context, index, argument, function))
                    except (EOFError, OSError) as error:  # the server was killed; the next start brings up another
                        yield CallResult(index=index, crash=f"its process could not be started ({described(error)})")
                if not self._running:
                    return
                ready = connection.wait([call.answer for call in self._running], _TICK)
                if not ready:
                    yield None
                for call in [call for call in self._running if call.answer in ready]:
                    self._running.remove(call)
                    yield _collect(call)
        finally:
            self._end()

    def stop(self) -> None:
        """SIGTERM to every process, once."""
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
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, surroundings(), function, argument), daemon=True)
    process.start()
    theirs.close()  # so that our end reads the end of the pipe when the process dies
    return _Call(index, process, cast(Connection, ours))


def _collect(call: _Call) -> CallResult:
    """The answer of a call whose process has answered or died."""
    try:
        value, crash = call.answer.recv()
    except (EOFError, OSError):  # nothing, or half of something
        value, crash = None, ""
    call.process.join()
    call.answer.close()
    code = call.process.exitcode
    call.process.close()
    if crash == "":
        crash = f"its process left with code {code}" if (code or 0) >= 0 else _signalled(-(code or 0))
    return CallResult(index=call.index, value=value, crash=crash)


def _signalled(number: int) -> str:
    name = signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"
    return f"its process was killed by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")


def _child(answer: Connection, environment: Mapping[str, str], function: Callable[[Any], Any], argument: Any) -> None:
    """Call the function and send what it gives. Signals come from the engine alone: a terminal's Ctrl-C does not."""
    os.setsid()
    threading.Thread(target=_follow_parent, daemon=True).start()
    os.environ.update(environment)
    try:
        message = (function(argument), None)
    except Exception as error:  # whatever was called: the engine passes it on
        message = (None, described(error))
    answer.send(message)


def _follow_parent() -> None:
    """End this process when its parent does, however that ends: no orphan holds a run's lock."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _context() -> Context:
    """A way to make processes: forked by a server that has imported everything, or started anew."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # a server that has threads cannot be forked safely
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    return context
