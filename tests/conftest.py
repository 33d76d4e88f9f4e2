"""One torch thread per worker, a fixed seed for every test, and helpers that several tests share."""

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
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # background jobs ignore it, and some tests send Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
SUITE_CACHE = Path(
    os.environ.setdefault("QKFLOW_CACHE", str(Path(__file__).parents[1] / ".pytest_cache" / "qkflow"))
).absolute()
"""Not the user's cache."""
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(SUITE_CACHE / "inductor"))


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """Every test starts with the same state of torch's global generator, and the state is restored afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture(scope="session", autouse=True)
def kernels() -> Path:
    """The folder of the compiled kernels, which are loaded before any test sets another cache."""
    from qkflow.ops.csrc import build

    build.load()
    return SUITE_CACHE / "native"


@pytest.fixture(scope="session")
def new_cache(kernels: Path) -> Callable[[Path], str]:
    """Creates a cache with nothing but a link to the compiled kernels: other processes need not build them again."""

    def make(folder: Path) -> str:
        folder.mkdir(parents=True, exist_ok=True)
        if kernels.is_dir() and not (folder / "native").exists():
            (folder / "native").symlink_to(kernels)
        return str(folder)

    return make


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory: pytest.TempPathFactory, new_cache: Callable[[Path], str]) -> str:
    """A cache of prepared corpora for this session."""
    return new_cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    """Synthetic studies: `unit/report/synthetic.py`."""
    return _loaded("unit/report/synthetic.py")


@pytest.fixture(scope="session")
def numbers() -> Callable[[Path], dict[str, Any]]:
    """Return all numbers of a finished run except times."""
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
    """A faster Triton interpreter: `unit/ops/delta_rule/interpreter.py`."""
    with _loaded("unit/ops/delta_rule/interpreter.py").quick():
        yield


def _loaded(file: str) -> ModuleType:
    """Import a file next to the tests by its path."""
    path = Path(__file__).parent / file
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
