"""Parity with other implementations: the gated delta rule of transformers, and the naive forms of fla."""

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

TOLERANCE = 1e-5
"""The other implementations compute in float32."""


def naive(operator: str) -> ModuleType:
    """fla/ops/.../naive.py imported by its path, because the package needs a GPU compiler."""
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


def compare(helpers: Any, backend: str, inputs: dict[str, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    """Compare outputs and final states; theirs have the layout [b h k v]."""
    o, final = delta_rule(**inputs, backend=backend)
    helpers.assert_agree({"o": o, "final": final}, {"o": theirs[0], "final": theirs[1].mT}, tolerance=TOLERANCE)


def memory(inputs: dict[str, Tensor]) -> Tensor | None:
    return inputs["state"].mT.contiguous() if "state" in inputs else None


@pytest.mark.parametrize("without", [("erase",), ("erase", "state")])
@pytest.mark.parametrize("form", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
def test_the_gated_delta_rule_matches_transformers(
    helpers: Any, backend: str, form: str, without: tuple[str, ...]
) -> None:
    pytest.importorskip("transformers")
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    inputs = helpers.make_inputs(70, key=16, value=8, without=without, dtype=torch.float32)
    theirs = inspect.unwrap(getattr(module, form))(
        inputs["q"],
        inputs["k"],
        inputs["v"],
        g=inputs["log_alpha"],
        beta=inputs["beta"],
        initial_state=memory(inputs),
        output_final_state=True,
        use_qk_l2norm_in_kernel=False,
    )
    compare(helpers, backend, inputs, theirs)


@pytest.mark.parametrize("without", [("erase",), ("erase", "state")])
@pytest.mark.parametrize("form", ["naive_recurrent_gated_delta_rule", "naive_chunk_gated_delta_rule"])
def test_the_gated_delta_rule_matches_fla(helpers: Any, backend: str, form: str, without: tuple[str, ...]) -> None:
    inputs = helpers.make_inputs(70, key=16, value=8, without=without, dtype=torch.float32)
    theirs = getattr(naive("gated_delta_rule"), form)(
        inputs["q"],
        inputs["k"],
        inputs["v"],
        beta=inputs["beta"],
        g=inputs["log_alpha"],
        initial_state=memory(inputs),
        output_final_state=True,
    )
    compare(helpers, backend, inputs, theirs)


def test_the_delta_rule_matches_fla(helpers: Any, backend: str) -> None:
    module = naive("delta_rule")
    inputs = helpers.make_inputs(64, key=16, value=8, without=("erase", "log_alpha"), dtype=torch.float32)
    tokens = [inputs[name].transpose(1, 2) for name in ("q", "k", "v", "beta")]
    o, final = module.delta_rule_recurrence(*tokens, initial_state=memory(inputs))
    compare(helpers, backend, inputs, (o.transpose(1, 2), final))
    del inputs["state"]
    o, final = module.delta_rule_chunkwise(*tokens)
    compare(helpers, backend, inputs, (o.transpose(1, 2), final))


def fla_comba(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_alpha: Tensor, erase: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The recurrent form: the chunked reference leaves alpha out of the erasure."""
    rule, initial = naive("comba").naive_recurrent_comba, None if state is None else state.mT
    o, final = rule(q, k, v, p=erase, beta=beta, g=log_alpha, initial_state=initial, output_final_state=True)
    return o, final.mT


def fla_kda(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_alpha: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    rule, initial = naive("kda").naive_recurrent_kda, None if state is None else state.mT
    o, final = rule(q, k, v, g=log_alpha, beta=beta, initial_state=initial, output_final_state=True)
    return o, final.mT


@pytest.mark.parametrize("rho", [0.0, 0.5])
@pytest.mark.parametrize("without", [(), ("state",)])
def test_any_erase_direction_matches_comba_of_fla(
    helpers: Any, backend: str, rho: float, without: tuple[str, ...]
) -> None:
    inputs = helpers.make_inputs(70, key=16, value=8, rho=rho, without=without, dtype=torch.float32)
    helpers.assert_agree(
        helpers.results(inputs, backend=backend), helpers.results(inputs, fla_comba), tolerance=TOLERANCE
    )


@pytest.mark.parametrize("strength", [0.1, 10.0])
@pytest.mark.parametrize("without", [("erase",), ("erase", "state")])
def test_a_decay_per_channel_matches_kda_of_fla(
    helpers: Any, backend: str, strength: float, without: tuple[str, ...]
) -> None:
    """With log decays from 0 to -0.1 and to -10 per token; the gradients of all inputs as well."""
    inputs = helpers.make_inputs(70, key=16, value=8, vector=True, without=without, dtype=torch.float32)
    inputs["log_alpha"] = strength * (10 * inputs["log_alpha"]).clamp(min=-1)
    helpers.assert_agree(
        helpers.results(inputs, backend=backend), helpers.results(inputs, fla_kda), tolerance=TOLERANCE
    )
