"""Handle Ctrl-C and SIGTERM: the first signal requests a stop, the second ends the process at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class StopRequest:
    """Whether a stop was requested; called between units of work."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __call__(self) -> bool:
        """True after the first signal."""
        return self.signal is not None


@contextlib.contextmanager
def stop_on_signals(*, patient: bool = False) -> Iterator[StopRequest]:
    """Turn SIGINT and SIGTERM into a stop request inside the block, and restore the old handlers after it.

    A second signal ends the process at once, unless `patient`: torchrun forwards signals to its processes, so that a
    terminal or scheduler that signals the whole job signals them twice. torchrun kills those that do not stop in time.

    Outside the main thread no handlers are installed, since Python does not allow it. A signal that is already ignored
    (SIGINT of a background job) stays ignored.

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

    handled = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            # A handler that was not installed from Python reads as None and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
