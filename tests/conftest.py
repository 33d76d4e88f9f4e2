"""One torch thread a worker, no randomness from outside, and the comparisons that several tests share."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

torch.set_num_threads(1)
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
def quick() -> Iterator[None]:
    """Triton's interpreter without what makes it slow: `unit/ops/delta/interpreter.py`."""
    with _loaded("unit/ops/delta/interpreter.py").quick():
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
