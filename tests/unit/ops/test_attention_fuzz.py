"""A short run of `benchmarks/fuzz_attention.py`."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

import pytest

from qkflow.ops.attention import attention
from qkflow.ops.csrc import build

pytestmark = pytest.mark.skipif(build.load_error() is not None, reason=f"no C kernels: {build.load_error()}")


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks" / "fuzz_attention.py"
    spec = importlib.util.spec_from_file_location("fuzz_attention", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "attention", inspect.unwrap(attention))  # without run-time shape checks
    return module


def test_random_valid_calls_equal_the_definition(fuzz: ModuleType) -> None:
    assert fuzz.fuzz_valid(0, 60) == []


def test_random_invalid_calls_raise(fuzz: ModuleType) -> None:
    assert fuzz.fuzz_invalid(0, 200) == []
