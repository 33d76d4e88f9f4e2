"""What is left of the digits when there are few: float32, half precision, autocast, and decay that forgets all."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from qkflow.ops.delta_rule import delta_rule


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("without", [(), ("log_alpha",)])
@pytest.mark.parametrize(("chunk", "values"), [(64, 1e-4), (32, 3e-5)])
def test_float32_is_accurate_for_similar_keys(
    bench: Any, fast: str, chunk: int, values: float, apart: bool, without: tuple[str, ...]
) -> None:
    made = {"rows": 1, "key": 64, "value": 64, "rho": 0.95, "apart": apart, "without": without, "dtype": torch.float32}
    got, want = bench.outcome(bench.case(300, **made), backend=fast, chunk=chunk), bench.truth(300, **made)
    bench.agree(got, want, within=1e-4)
    bench.agree(*({name: x[name] for name in ("o", "final")} for x in (got, want)), within=values)


@pytest.mark.parametrize(("dtype", "within"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_16_bit_inputs_have_a_float32_state_and_16_bit_gradients(
    bench: Any, backend: str, dtype: torch.dtype, within: float
) -> None:
    given = bench.case(70, rho=0.95, dtype=dtype)
    given["state"] = given["state"].float()
    o, final = delta_rule(**given, backend=backend)
    assert (o.dtype, final.dtype) == (dtype, torch.float32)
    exact = {name: x.double() for name, x in given.items()}
    got, want = bench.outcome(given, backend=backend), bench.outcome(exact, bench.published)
    bench.agree(got, want, within=within)
    assert all(got[name].dtype == x.dtype for name, x in given.items())
    bench.agree({"final": final}, {"final": want["final"]}, within=1e-4)


def test_the_dtype_of_values_is_the_dtype_of_outputs(bench: Any, backend: str) -> None:
    given = bench.case(9, dtype=torch.float32)
    given["v"], given["state"] = given["v"].bfloat16(), given["state"].double()
    o, final = delta_rule(**given, backend=backend)
    assert (o.dtype, final.dtype) == (torch.bfloat16, torch.float32)


def test_autocast_does_not_reduce_precision(bench: Any, backend: str) -> None:
    given = bench.case(70, rho=0.95, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = bench.outcome(given, backend=backend)
    assert got["o"].dtype == torch.float32
    bench.agree(got, bench.outcome(given, backend="naive"), within=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decay", [-50.0, -1e4])
def test_complete_decay_is_accurate(bench: Any, backend: str, decay: float, dtype: torch.dtype) -> None:
    given = bench.case(70, rho=0.95, dtype=dtype)
    given["log_alpha"] = torch.full_like(given["log_alpha"], decay)
    exact = {name: x.double() for name, x in given.items()}
    within = 1e-10 if dtype == torch.float64 else 1e-5
    bench.agree(bench.outcome(given, backend=backend), bench.outcome(exact, bench.published), within=within, least=1.0)


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
@pytest.mark.parametrize("decay", [-50.0, -1e4, -1e10, -1e20, -math.inf])
def test_tokens_after_a_complete_decay_are_accurate(
    bench: Any, fast: str, decay: float, dtype: torch.dtype, within: float
) -> None:
    """Up to the strongest decay that is a finite number, as one would set it to begin anew."""
    given = bench.case(70, rho=0.95, dtype=dtype)
    given["log_alpha"][:, 5::20] = max(decay, torch.finfo(dtype).min)
    bench.agree(bench.outcome(given, backend=fast), bench.outcome(given, backend="naive"), within=within)


def test_tokens_after_many_complete_decays_are_accurate(bench: Any, fast: str) -> None:
    given = bench.case(64, rho=0.95, dtype=torch.float32)
    given["log_alpha"][:, :32] = -100.0
    bench.agree(bench.outcome(given, backend=fast), bench.outcome(given, backend="naive"), within=5e-5)


@pytest.mark.parametrize("decay", [-1e-12, -1e-3, -3.0])
def test_every_decay_strength_is_accurate(bench: Any, fast: str, decay: float) -> None:
    given = bench.case(70, rho=0.95)
    given["log_alpha"] = torch.full_like(given["log_alpha"], decay)
    bench.agree(bench.outcome(given, backend=fast), bench.outcome(given, backend="naive"))
