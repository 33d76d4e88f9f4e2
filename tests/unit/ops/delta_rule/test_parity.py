"""The same numbers as code of others: the gated delta rule of transformers, and the naive forms of fla."""

from __future__ import annotations

import importlib.util
import inspect
from importlib.metadata import PackageNotFoundError, distribution
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from qkflow.ops.delta_rule import delta_rule

WITHIN = 1e-5
"""They all compute in float32."""


def naive(operator: str) -> ModuleType:
    """fla/ops/.../naive.py by itself: the package wants a GPU's compiler, the file does not."""
    try:
        path = distribution("fla-core").locate_file(f"fla/ops/{operator}/naive.py")
    except PackageNotFoundError:
        pytest.skip("fla-core is not installed")
    spec = importlib.util.spec_from_file_location(f"fla_naive_{operator}", str(path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare(bench: Any, backend: str, given: dict[str, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    """Our outputs and final state against theirs, whose memory is [b h k v]."""
    o, final = delta_rule(**given, backend=backend)
    bench.agree({"o": o, "final": final}, {"o": theirs[0], "final": theirs[1].mT}, within=WITHIN)


def memory(given: dict[str, Tensor]) -> Tensor | None:
    return given["state"].mT.contiguous() if "state" in given else None


@pytest.mark.parametrize("without", [("lam",), ("lam", "state")])
@pytest.mark.parametrize("form", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
def test_the_gated_delta_rule_matches_transformers(
    bench: Any, backend: str, form: str, without: tuple[str, ...]
) -> None:
    pytest.importorskip("transformers")
    theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    given = bench.case(70, key=16, value=8, without=without, dtype=torch.float32)
    found = inspect.unwrap(getattr(theirs, form))(
        given["q"],
        given["k"],
        given["v"],
        g=given["log_alpha"],
        beta=given["beta"],
        initial_state=memory(given),
        output_final_state=True,
        use_qk_l2norm_in_kernel=False,
    )
    compare(bench, backend, given, found)


@pytest.mark.parametrize("without", [("lam",), ("lam", "state")])
@pytest.mark.parametrize("form", ["naive_recurrent_gated_delta_rule", "naive_chunk_gated_delta_rule"])
def test_the_gated_delta_rule_matches_fla(bench: Any, backend: str, form: str, without: tuple[str, ...]) -> None:
    given = bench.case(70, key=16, value=8, without=without, dtype=torch.float32)
    found = getattr(naive("gated_delta_rule"), form)(
        given["q"],
        given["k"],
        given["v"],
        beta=given["beta"],
        g=given["log_alpha"],
        initial_state=memory(given),
        output_final_state=True,
    )
    compare(bench, backend, given, found)


def test_the_delta_rule_matches_fla(bench: Any, backend: str) -> None:
    theirs = naive("delta_rule")
    given = bench.case(64, key=16, value=8, without=("lam", "log_alpha"), dtype=torch.float32)
    tokens = [given[name].transpose(1, 2) for name in ("q", "k", "v", "beta")]
    o, final = theirs.delta_rule_recurrence(*tokens, initial_state=memory(given))
    compare(bench, backend, given, (o.transpose(1, 2), final))
    del given["state"]
    o, final = theirs.delta_rule_chunkwise(*tokens)
    compare(bench, backend, given, (o.transpose(1, 2), final))


@pytest.mark.parametrize("rho", [0.0, 0.5])
@pytest.mark.parametrize("without", [(), ("state",)])
def test_qdelta_matches_comba_of_fla(bench: Any, backend: str, rho: float, without: tuple[str, ...]) -> None:
    given = bench.case(70, key=16, value=8, rho=rho, without=without, dtype=torch.float32)
    found = naive("comba").naive_recurrent_comba(
        given["q"],
        given["k"],
        given["v"],
        p=given["k"] + given["lam"][..., None] * given["q"],
        beta=given["beta"],
        g=given["log_alpha"],
        initial_state=memory(given),
        output_final_state=True,
    )
    compare(bench, backend, given, found)
