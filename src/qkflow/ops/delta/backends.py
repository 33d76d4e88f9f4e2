"""Which form of the delta rule runs: decided here and nowhere else.

| backend     | where                    | what                                                          |
|-------------|--------------------------|---------------------------------------------------------------|
| `native`    | CPU, with a C compiler   | the kernel of `qkflow/ops/native/delta.c`                     |
| `chunked`   | any device               | products of matrices in plain torch                           |
| `reference` | any device with float64  | the recurrence itself, slow; differentiable any number of times |

The first that can run is taken, unless a call, `use(...)` or QKFLOW_DELTA asks for another, in this order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from qkflow.errors import UsageError, unknown
from qkflow.ops import native

BACKENDS = ("native", "chunked", "reference")
"""Every form by name, the fastest first."""
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


def choose(device: torch.device, backend: str | None = None) -> str:
    """The form that runs on a device, `backend` if that is asked for."""
    wanted = backend or _asked
    if wanted is not None and wanted not in BACKENDS:
        raise unknown("backend", wanted, BACKENDS)
    if wanted in ("chunked", "reference"):
        return wanted
    if not torch.compiler.is_compiling():
        native.prepare()
    if device.type == "cpu" and native.ready():
        return "native"
    if wanted == "native":
        why = f"it runs on a CPU, the tensors are on {device.type}" if device.type != "cpu" else native.fault()
        raise UsageError(f"the native delta rule cannot run: {why}; use backend 'chunked'")
    return "chunked"
