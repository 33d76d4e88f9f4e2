"""Precision in float32, half precision and autocast, and with strong decay."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from qkflow.ops.delta_rule import delta_rule


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("without", [(), ("log_alpha",)])
@pytest.mark.parametrize(("chunk", "values"), [(64, 1e-4), (32, 3e-5)])
def test_float32_is_accurate_for_similar_keys(
    helpers: Any, fast: str, chunk: int, values: float, separate: bool, vector: bool, without: tuple[str, ...]
) -> None:
    options = {
        "vector": vector,
        "rows": 1,
        "key": 64,
        "value": 64,
        "rho": 0.95,
        "separate": separate,
        "without": without,
        "dtype": torch.float32,
    }
    actual, expected = (
        helpers.results(helpers.make_inputs(300, **options), backend=fast, chunk=chunk),
        helpers.expected(300, **options),
    )
    helpers.assert_agree(actual, expected, tolerance=1e-4)
    helpers.assert_agree(*({name: x[name] for name in ("o", "final")} for x in (actual, expected)), tolerance=values)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_16_bit_inputs_have_a_float32_state_and_16_bit_gradients(
    helpers: Any, backend: str, dtype: torch.dtype, tolerance: float
) -> None:
    inputs = helpers.make_inputs(70, rho=0.95, dtype=dtype)
    inputs["state"] = inputs["state"].float()
    o, final = delta_rule(**inputs, backend=backend)
    assert (o.dtype, final.dtype) == (dtype, torch.float32)
    exact = {name: x.double() for name, x in inputs.items()}
    actual, expected = helpers.results(inputs, backend=backend), helpers.results(exact, helpers.published)
    helpers.assert_agree(actual, expected, tolerance=tolerance)
    assert all(actual[name].dtype == x.dtype for name, x in inputs.items())
    helpers.assert_agree({"final": final}, {"final": expected["final"]}, tolerance=1e-4)


def test_the_dtype_of_values_is_the_dtype_of_outputs(helpers: Any, backend: str) -> None:
    inputs = helpers.make_inputs(9, dtype=torch.float32)
    inputs["v"], inputs["state"] = inputs["v"].bfloat16(), inputs["state"].double()
    o, final = delta_rule(**inputs, backend=backend)
    assert (o.dtype, final.dtype) == (torch.bfloat16, torch.float32)


def test_autocast_does_not_reduce_precision(helpers: Any, backend: str) -> None:
    inputs = helpers.make_inputs(70, rho=0.95, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        actual = helpers.results(inputs, backend=backend)
    assert actual["o"].dtype == torch.float32
    helpers.assert_agree(actual, helpers.results(inputs, backend="naive"), tolerance=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("decay", [-10.0, -50.0, -1000.0, -1e4])
def test_complete_decay_is_accurate(helpers: Any, backend: str, decay: float, vector: bool, dtype: torch.dtype) -> None:
    inputs = helpers.make_inputs(70, rho=0.95, vector=vector, dtype=dtype)
    inputs["log_alpha"] = torch.full_like(inputs["log_alpha"], decay)
    exact = {name: x.double() for name, x in inputs.items()}
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    helpers.assert_agree(
        helpers.results(inputs, backend=backend),
        helpers.results(exact, helpers.published),
        tolerance=tolerance,
        min_scale=1.0,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("decay", [-50.0, -1e4, -1e10, -1e20, -math.inf])
def test_tokens_after_a_complete_decay_are_accurate(
    helpers: Any, fast: str, decay: float, vector: bool, dtype: torch.dtype, tolerance: float
) -> None:
    """Up to the strongest finite decay, which resets the memory."""
    inputs = helpers.make_inputs(70, rho=0.95, vector=vector, dtype=dtype)
    inputs["log_alpha"][:, 5::20] = max(decay, torch.finfo(dtype).min)
    helpers.assert_agree(
        helpers.results(inputs, backend=fast), helpers.results(inputs, backend="naive"), tolerance=tolerance
    )


def test_tokens_after_many_complete_decays_are_accurate(helpers: Any, fast: str) -> None:
    inputs = helpers.make_inputs(64, rho=0.95, dtype=torch.float32)
    inputs["log_alpha"][:, :32] = -100.0
    helpers.assert_agree(
        helpers.results(inputs, backend=fast), helpers.results(inputs, backend="naive"), tolerance=5e-5
    )


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("decay", [-1e-12, -1e-3, -3.0])
def test_every_decay_strength_is_accurate(helpers: Any, fast: str, decay: float, vector: bool) -> None:
    inputs = helpers.make_inputs(70, rho=0.95, vector=vector)
    inputs["log_alpha"] = torch.full_like(inputs["log_alpha"], decay)
    helpers.assert_agree(helpers.results(inputs, backend=fast), helpers.results(inputs, backend="naive"))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
@pytest.mark.parametrize("strongest", [-10.0, -1000.0])
@pytest.mark.parametrize("key", [5, 64])
def test_channels_with_very_different_decays_are_accurate(
    helpers: Any, fast: str, key: int, strongest: float, dtype: torch.dtype, tolerance: float
) -> None:
    """From none to the strongest: the decay of a pair of tokens cannot be split about one point of the chunk."""
    inputs = helpers.make_inputs(150, rows=1, key=key, rho=0.95, vector=True, dtype=dtype)
    inputs["log_alpha"] = (strongest * inputs["log_alpha"].tanh().abs().pow(2)).to(dtype)
    inputs["log_alpha"][..., 0], inputs["log_alpha"][..., 1] = 0.0, strongest
    helpers.assert_agree(
        helpers.results(inputs, backend=fast), helpers.results(inputs, backend="naive"), tolerance=tolerance
    )
