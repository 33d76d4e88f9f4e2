"""What reproducible results depend on: seeds, CPU threads, deterministic kernels, and the record of the environment."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qkflow.errors import UsageError
from qkflow.ops.csrc import build
from qkflow.ops.delta_rule import triton_error

_PACKAGES = ("qkflow", "torch", "numpy", "safetensors", "tokenizers")


MAX_THREADS = max(1024, os.cpu_count() or 1)
"""More than this many CPU threads are refused: PyTorch crashes if it cannot start them."""


def validate_threads(count: int | None) -> None:
    """Raise `UsageError` if there are too many CPU threads.

    >>> validate_threads(10**8)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    qkflow.errors.UsageError: threads must be at most ..., got 100000000
    """
    if count is not None and count > MAX_THREADS:
        raise UsageError(f"threads must be at most {MAX_THREADS}, got {count}")


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Set PyTorch's number of CPU threads inside the block; None leaves it.

    >>> with threads(1):
    ...     torch.get_num_threads()
    1
    """
    validate_threads(count)
    before = torch.get_num_threads()
    if count is not None and count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


@contextlib.contextmanager
def flushed_denormals(enabled: bool = True) -> Iterator[None]:
    """Treat denormal CPU numbers as zero inside the block; sharp attention has many, and they are slow."""
    if not enabled:
        yield
        return
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextlib.contextmanager
def own_randomness(device: torch.device) -> Iterator[None]:
    """Restore the global random generators after the block; on a GPU, use deterministic kernels inside it."""
    cuda = [device] if device.type == "cuda" else []
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if cuda:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        if cuda:
            torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])


def step_seed(seed: int, step: int, rank: int = 0) -> int:
    """The seed of one step on one rank, independent of those of other steps, seeds and ranks.

    >>> step_seed(0, 1) != step_seed(1, 0) != step_seed(1, 0, rank=1)
    True
    """
    entropy = (seed, step, rank) if rank else (seed, step)
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])


def pick_device(name: str) -> torch.device:
    """The device of a config; `auto` is the first available of cuda, mps and cpu.

    >>> pick_device("cpu")
    device(type='cpu')
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, is_available in available.items() if is_available)
    if not available[name]:
        raise UsageError(f"device {name!r} is not available on this machine: use 'cpu' or 'auto'")
    return torch.device(name)


def platform_record(device: torch.device | None = None) -> dict[str, Any]:
    """The machine, the package versions and the kernels in use (triton, native or torch), as JSON values.

    >>> platform_record()["device"]
    'cpu'
    """
    device = device or torch.device("cpu")
    kernels = "native" if build.is_loaded() else "torch"
    if device.type == "cuda":
        kernels = "triton" if triton_error(device) is None else "torch"
    return {
        "cores": os.cpu_count(),
        "cpu": _cpu_name(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "kernels": kernels,
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
    }


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Notices about differences between two records that can change the last bits of results.

    >>> changes({"threads": 2, "device": "cpu"}, {"threads": 4, "device": "cpu"})
    ['threads was 2 when the run started and is 4 now: the last bits of results may differ']
    """
    values = {name: (before.get(name), now.get(name)) for name in ("threads", "device", "cpu")}
    same_count = before.get("processes") == now.get("processes")
    for name in ("kernels", "processes", *(["parallel"] if same_count else [])):
        if name in before:  # older records do not have it
            values[name] = (before[name], now.get(name))
    old, new = before.get("versions", {}), now.get("versions", {})
    values |= {f"the version of {name}": (old.get(name), new.get(name)) for name in ("torch", "qkflow")}
    return [
        f"{name} was {old_value} when the run started and is {new_value} now: the last bits of results may differ"
        for name, (old_value, new_value) in values.items()
        if old_value != new_value
    ]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    """The name of the processor, from /proc/cpuinfo on Linux, otherwise from Python."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
