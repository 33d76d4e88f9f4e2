"""environment.json: where a run was made, and with what. The threads are there because the last bits depend on them."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from qkflow.data import Corpus
from qkflow.errors import UsageError
from qkflow.ops.csrc import build
from qkflow.ops.delta_rule import triton_error

_PACKAGES = ("qkflow", "torch", "numpy", "safetensors", "tokenizers")


def environment(
    corpus: Corpus, device: torch.device, command: Sequence[str], *, processes: int = 1, parallel: str | None = None
) -> dict[str, Any]:
    """The present process and its machine, and how many make the run together, JSON-ready."""
    what = {"command": list(command), "corpus": {"name": corpus.name, "digest": corpus.digest}}
    return what | {"processes": processes, "parallel": parallel} | platform_record(device)


def platform_record(device: torch.device | None = None) -> dict[str, Any]:
    """The machine and the versions, JSON-ready.

    >>> platform_record()["device"]
    'cpu'
    """
    return {
        "cores": os.cpu_count(),
        "cpu": _cpu(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": _device(device),
        "kernels": _kernels(device),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
    }


def _kernels(device: torch.device | None) -> str:
    """Which fast forms a device has: `triton` on a GPU, `native` on a CPU, or plain `torch`."""
    if device is not None and device.type == "cuda":
        return "triton" if triton_error(device) is None else "torch"
    return "native" if build.is_loaded() else "torch"


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs from the record in a way that bits can depend on, as lines to show.

    >>> changes({"threads": 2, "device": "cpu"}, {"threads": 4, "device": "cpu"})
    ['threads was 2 when the run began and is 4 now: the last bits of results may differ']
    """
    pairs = {name: (before.get(name), now.get(name)) for name in ("threads", "device", "cpu")}
    alike = before.get("processes") == now.get("processes")
    for name in ("kernels", "processes", *(["parallel"] if alike else [])):
        if name in before:  # older records do not tell
            pairs[name] = (before[name], now.get(name))
    old, new = before.get("versions", {}), now.get("versions", {})
    pairs |= {f"the version of {name}": (old.get(name), new.get(name)) for name in ("torch", "qkflow")}
    return [
        f"{name} was {was} when the run began and is {is_now} now: the last bits of results may differ"
        for name, (was, is_now) in pairs.items()
        if was != is_now
    ]


def pick_device(name: str) -> torch.device:
    """The device of a config; `auto` is the first there is of cuda, mps, cpu.

    >>> pick_device("cpu")
    device(type='cpu')
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, found in there.items() if found)
    if not there[name]:
        raise UsageError(
            f"device {name!r} is not available on this machine: use 'cpu', or 'auto' to take what there is"
        )
    return torch.device(name)


def _device(device: torch.device | None) -> str:
    if device is None:
        return "cpu"
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    """The processor's name; Linux keeps it in a file, elsewhere Python knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
