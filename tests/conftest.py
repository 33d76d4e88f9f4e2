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
    path = Path(__file__).parent / "unit" / "report" / "synthetic.py"
    spec = importlib.util.spec_from_file_location("synthetic", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
