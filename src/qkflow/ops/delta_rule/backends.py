"""Which form of the delta rule runs: decided here and nowhere else.

| backend     | where                    | what                                                          |
|-------------|--------------------------|---------------------------------------------------------------|
| `triton`    | NVIDIA's GPUs, from 8.0  | kernels for tensor cores (`triton_forward.py`), not in float64 |
| `native`    | CPU, with a C compiler   | the kernel of `qkflow/ops/csrc/delta_rule.c`                     |
| `chunked`   | any device               | products of matrices in plain torch                           |
| `reference` | any device with float64  | the recurrence itself, slow; differentiable any number of times |

The first that can run is taken, unless a call, `use(...)` or QKFLOW_DELTA asks for another, in this order. On a GPU
where `triton` cannot run, one notice says why. On a CPU it runs where it is asked for and TRITON_INTERPRET is 1: slow,
for tests.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from qkflow.errors import UsageError, unknown
from qkflow.ops import csrc

BACKENDS = ("triton", "native", "chunked", "reference")
"""Every form by name, the fastest first."""
OLDEST = (8, 0)
"""The first generation of NVIDIA's GPUs that multiplies bfloat16, and float32 on tensor cores."""
_INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether the kernels in Triton run on a CPU, as Python."""
_told: set[str] = set()
_asked: str | None = os.environ.get("QKFLOW_DELTA") or None


@contextmanager
def use(backend: str | None) -> Iterator[None]:
    """Run this form inside the `with`; None lets the place decide again.

    >>> with use("reference"):
    ...     choose(torch.device("cpu"))
    'reference'
    """
    global _asked
    if backend is not None and backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    before, _asked = _asked, backend
    try:
        yield
    finally:
        _asked = before


def choose(device: torch.device, backend: str | None = None, dtype: torch.dtype = torch.float32) -> str:
    """The form that runs on a device, `backend` if that is asked for; `dtype` is that of the queries.

    >>> choose(torch.device("cpu"), "chunked")
    'chunked'
    """
    wanted = backend or _asked
    if wanted is not None and wanted not in BACKENDS:
        raise unknown("backend", wanted, BACKENDS)
    if wanted in ("chunked", "reference"):
        return wanted
    if wanted == "triton" or (wanted is None and device.type == "cuda"):
        return _on_a_gpu(device, dtype, asked=wanted is not None)
    if not torch.compiler.is_compiling():
        csrc.prepare()
    if device.type == "cpu" and csrc.ready():
        return "native"
    if wanted == "native":
        why = f"it runs on a CPU, the tensors are on {device.type}" if device.type != "cpu" else csrc.fault()
        raise UsageError(f"the native delta rule cannot run: {why}; use backend 'chunked'")
    return "chunked"


def triton_fault(device: torch.device, dtype: torch.dtype = torch.float32) -> str | None:
    """Why the kernels in Triton cannot run on a device; None where they can."""
    if not _INSTALLED:
        return "triton is not installed (pip install triton)"
    if dtype == torch.float64:
        return "they compute in float32, and the tensors are float64: give .float(), .bfloat16() or .half() ones"
    if device.type == "cpu":
        if INTERPRETED:
            return None
        return "the tensors are on a CPU, which runs them, slowly, only with TRITON_INTERPRET=1 in the environment"
    if device.type != "cuda" or torch.version.cuda is None:
        return f"they are for NVIDIA's GPUs, and the tensors are on {device.type}"
    if torch.compiler.is_compiling():
        return None  # a graph cannot ask a device; who compiles has called it before, or has a GPU of this decade
    if (found := torch.cuda.get_device_capability(device)) < OLDEST:
        return f"they need compute capability {OLDEST[0]}.{OLDEST[1]}, and {device} has {found[0]}.{found[1]}"
    return None


def _on_a_gpu(device: torch.device, dtype: torch.dtype, asked: bool) -> str:
    fault = triton_fault(device, dtype)
    if fault is None:
        return "triton"
    if asked:
        raise UsageError(f"the delta rule's kernels in Triton cannot run: {fault}; or use backend 'chunked'")
    if not torch.compiler.is_compiling():
        _tell(fault)
    return "chunked"


def _tell(fault: str) -> None:
    if fault in _told or multiprocessing.parent_process() is not None:  # a study's runs would repeat what it has said
        return
    _told.add(fault)
    warnings.warn(
        f"the delta rule's kernels in Triton cannot run: {fault}; plain torch serves instead, and is slower"
        " (QKFLOW_DELTA=chunked silences this)",
        RuntimeWarning,
        stacklevel=5,
    )
