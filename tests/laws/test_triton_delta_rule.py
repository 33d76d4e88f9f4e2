"""Every law for Q-Delta with the Triton kernels, in Triton's interpreter: in float32 and on small shapes."""

from __future__ import annotations

import pytest
import torch

from qkflow.laws import LAWS, check, sequences
from qkflow.mechanisms import mechanism
from qkflow.ops.delta_rule import use_backend

pytestmark = [pytest.mark.interpreted, pytest.mark.usefixtures("quick")]


@pytest.mark.filterwarnings("ignore")  # torch.compile emits warnings
@pytest.mark.parametrize("law", [law for law in LAWS if law != "permutation"])
def test_qdelta_satisfies_with_triton_kernels(law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeltaNet and Gated DeltaNet run the same kernels without some inputs, which `test_triton.py` covers."""
    monkeypatch.setattr(sequences, "LENGTHS", ([2], [3, 1]))
    with use_backend("triton"):
        (report,) = check(mechanism("qdelta"), only=[law], width=16, heads=1, backend="aot_eager", dtype=torch.float32)
    assert (report.outcome, report.detail) == ("passed", "")
