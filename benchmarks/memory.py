"""Measure the peak memory of a function in a new process, above the memory with its inputs loaded.

The allocator returns freed memory immediately, so buffers of C kernels are included and freed memory is not.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar
from unittest import mock

import torch

T = TypeVar("T")
IS_SUPPORTED = Path("/proc/self/clear_refs").exists()


def peak_megabytes(make: Callable[[T], Callable[[], object]], small: T, cases: Sequence[T]) -> list[float]:
    """Return the peak of `make(case)()` for every case, after a call of a small one. `make` must be importable."""
    # The allocator returns freed blocks of this size to the system immediately.
    environment = mock.patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_="65536")
    with environment, ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        return executor.submit(_peaks, make, small, cases, torch.get_num_threads()).result()


def _peaks(make: Callable[[T], Callable[[], object]], small: T, cases: Sequence[T], threads: int) -> list[float]:
    torch.set_num_threads(threads)
    make(small)()
    peaks = []
    for case in cases:
        function = make(case)
        Path("/proc/self/clear_refs").write_text("5")
        before = _peak_resident()
        function()
        peaks.append((_peak_resident() - before) / 1e6)
    return peaks


def _peak_resident() -> int:
    """Return the peak resident memory in bytes. `getrusage` would return that of the parent if it is higher."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
