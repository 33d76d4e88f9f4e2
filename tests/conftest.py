"""One torch thread a worker, no randomness from outside, and the comparisons that several tests share."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job's; some tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("QKFLOW_CACHE", str(Path(__file__).parents[1] / ".pytest_cache" / "qkflow"))  # not the home


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """Every test begins at the same point of torch's global stream, and leaves it as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    """Studies that were never run, to show and to judge: `unit/report/synthetic.py`."""
    return _loaded("unit/report/synthetic.py")


@pytest.fixture(scope="session")
def numbers() -> Callable[[Path], dict[str, Any]]:
    """All numbers of a finished run, times left out."""
    from qkflow.io import checksum
    from qkflow.training import read_metrics

    def of(folder: Path) -> dict[str, Any]:
        records = read_metrics(folder / "metrics.jsonl")
        times = ("seconds", "evaluation_seconds")
        return {
            "metrics": [{key: value for key, value in record.items() if key not in times} for record in records],
            "weights": checksum(folder / "weights.safetensors"),
            "documents": checksum(folder / "documents.npy"),
        }

    return of


@pytest.fixture(scope="session")
def quick() -> Iterator[None]:
    """Triton's interpreter without what makes it slow: `unit/ops/delta_rule/interpreter.py`."""
    with _loaded("unit/ops/delta_rule/interpreter.py").quick():
        yield


def _loaded(file: str) -> ModuleType:
    """A file that lies beside tests, from which nothing can be imported by name."""
    path = Path(__file__).parent / file
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
