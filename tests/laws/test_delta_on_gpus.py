"""Every law over the memories with the kernels in Triton, which run here as Python: in float32, on small shapes."""

from __future__ import annotations

import pytest
import torch

from qkflow.laws import LAWS, check, sequences
from qkflow.mechanisms import mechanism
from qkflow.ops.delta_rule import use_backend

pytestmark = [pytest.mark.interpreted, pytest.mark.usefixtures("quick")]


@pytest.mark.filterwarnings("ignore")  # the compiler warns of itself
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("spec", ["deltanet", "gated-deltanet", "qdelta"])
def test_a_memory_obeys_with_kernels_in_triton(spec: str, law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "RAGGED", ([2], [3, 1]))
    with use_backend("triton"):
        (answer,) = check(mechanism(spec), only=[law], width=16, heads=1, backend="aot_eager", dtype=torch.float32)
    assert (answer.outcome, answer.detail) == ("passed", "")
