"""Stop signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from qkflow.training.signals import stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_requests_a_stop_and_handlers_are_restored(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        assert not stop()
        os.kill(os.getpid(), number)
        assert stop()
        assert stop.signal is number
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_the_process_at_once(number: signal.Signals) -> None:
    code = (
        "import os, sys, signal\n"
        "from importlib.util import module_from_spec, spec_from_file_location\n"
        "spec = spec_from_file_location('signals', sys.argv[1])\n"  # not the package: importing torch is slow
        "module = module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with module.stop_on_signals():\n"
        "    os.kill(os.getpid(), int(sys.argv[2]))\n"
        "    print('still here', flush=True)\n"
        "    os.kill(os.getpid(), int(sys.argv[2]))\n"
        "    print('and here', flush=True)\n"
    )
    file = sys.modules[stop_on_signals.__module__].__file__
    done = subprocess.run([sys.executable, "-c", code, str(file), str(int(number))], capture_output=True, text=True)
    assert done.returncode == -number
    assert done.stdout == "still here\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_patient_process_ignores_the_second_signal(number: signal.Signals) -> None:
    """A scheduler signals all processes, and torchrun forwards the signal again."""
    with stop_on_signals(patient=True) as stop:
        for _ in range(3):
            os.kill(os.getpid(), number)
        assert stop.signal is number


def test_no_handlers_are_installed_outside_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGTERM)
    received = []

    def look() -> None:
        with stop_on_signals() as stop:
            received.append((stop(), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert received == [(False, before)]


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_on_signals() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop()
    finally:
        signal.signal(signal.SIGINT, before)
