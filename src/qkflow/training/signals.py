"""Ctrl-C and SIGTERM as a request: the first one is noted; the second one ends the process at once, unless it waits."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class StopRequest:
    """Whether someone has asked to stop; a callable, to be asked between two pieces of work."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __call__(self) -> bool:
        """True from the first signal on."""
        return self.signal is not None


@contextlib.contextmanager
def stop_on_signals(*, patient: bool = False) -> Iterator[StopRequest]:
    """Note SIGINT and SIGTERM while the block runs, and put the old handlers back after it.

    A second one ends the process at once, unless it is `patient`: torchrun passes on what it is sent, so that whoever
    signals all processes of a job (a terminal, a scheduler) signals these twice. It kills those that stay too long.

    Outside the main thread nothing is installed: Python allows handlers only there. A signal that is ignored already (a
    background job's SIGINT) stays ignored.

    >>> with stop_on_signals() as stop:
    ...     stop()
    False
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.signal is not None and not patient:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        stop.signal = signal.Signals(number)

    asked = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in asked}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            # A handler that was not installed from Python reads as None and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
