"""Every law over the memories with the kernels in Triton, which run here as Python: in float32, on small shapes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qkflow.laws import LAWS, check, sequences
from qkflow.mechanisms import mechanism
from qkflow.ops.delta import use

pytestmark = pytest.mark.interpreted


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    path = Path(__file__).parents[1] / "unit" / "ops" / "delta" / "interpreter.py"
    spec = importlib.util.spec_from_file_location("interpreter", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.quick():
        yield


@pytest.mark.filterwarnings("ignore")  # the compiler warns of itself
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("spec", ["deltanet", "gated-deltanet", "qdelta"])
def test_a_memory_obeys_with_kernels_in_triton(spec: str, law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "RAGGED", ([2], [3, 1]))
    with use("triton"):
        (answer,) = check(mechanism(spec), only=[law], width=16, heads=1, backend="aot_eager", dtype=torch.float32)
    assert (answer.outcome, answer.detail) == ("kept", "")
