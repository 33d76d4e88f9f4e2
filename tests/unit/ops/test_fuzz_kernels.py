"""Every C kernel on random valid and invalid calls (`benchmarks/fuzz_kernels.py`), without tokens, and twice."""

from __future__ import annotations

import dataclasses
import importlib.util
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from qkflow.errors import UsageError
from qkflow.mechanisms import mechanism, mechanisms
from qkflow.ops.csrc import build

pytestmark = pytest.mark.skipif(build.load_error() is not None, reason=f"no C kernels: {build.load_error()}")
SCRIPT = Path(__file__).parents[3] / "benchmarks" / "fuzz_kernels.py"
OPERATORS = (
    *("attention", "delta", "drift_kick", "short_conv", "phases", "tangent"),
    *("linear", "swiglu", "norm", "projection", "newton_schulz"),
    *("norm_few", "swiglu_few", "attention_step", "delta_step", "kuramoto_step"),
)
DTYPES = (torch.float32, torch.float64)


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_kernels", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_operator_is_tested(fuzz: ModuleType) -> None:
    assert set(fuzz.OPERATORS) == set(OPERATORS)


def test_random_calls_equal_the_definition_or_raise() -> None:
    command = [sys.executable, str(SCRIPT), "--valid", "150", "--invalid", "400"]  # a process without shape checks
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "150 valid and 400 invalid calls, 0 failures" in result.stdout


def test_a_wrong_kernel_fails(fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    right = fuzz.tangent_call
    monkeypatch.setitem(fuzz.OPERATORS, "tangent", lambda *x: dataclasses.replace(right(*x), kernel=wrong_tangent))
    failures, _ = fuzz.fuzz_valid(0, 40)
    assert failures
    assert all("(tangent, " in failure for failure in failures)


def wrong_tangent(points: Tensor, mean: Tensor) -> tuple[Tensor, ...]:
    return ((points * mean).sum(-1),)


def run(fuzz: ModuleType, name: str, dtype: torch.dtype, tokens: int, seed: int) -> Sequence[Tensor]:
    """Outputs with and without gradients, and the gradients."""
    torch.manual_seed(seed)
    call = fuzz.OPERATORS[name](random.Random(seed), dtype, tokens)
    with fuzz.poisoned_memory():
        outputs, gradients, _ = fuzz.outputs_and_gradients(
            call.kernel, call.inputs, lambda outputs: [torch.randn_like(x) for x in outputs], call.has_backward
        )
        with torch.no_grad():
            return *outputs, *gradients, *call.kernel(*call.inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATORS)
def test_without_tokens_outputs_and_gradients_are_zero(fuzz: ModuleType, name: str, dtype: torch.dtype) -> None:
    for seed in range(12):
        if name == "delta":
            with pytest.raises(UsageError, match="at least one token"):
                run(fuzz, name, dtype, 0, seed)
        else:
            assert not any(x.any() for x in run(fuzz, name, dtype, 0, seed))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATORS)
def test_the_same_call_gives_the_same_bits(fuzz: ModuleType, name: str, dtype: torch.dtype, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for seed in range(3):
            first, second = (run(fuzz, name, dtype, 400, seed) for _ in range(2))
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
            assert all(x.isfinite().all() for x in first)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("n", "t"), [(2, 0), (0, 5)])
@pytest.mark.parametrize("spec", sorted(mechanisms()))
def test_a_mechanism_without_tokens_gives_zero_gradients_or_raises(fuzz: ModuleType, spec: str, n: int, t: int) -> None:
    layer = mechanism(spec)(32, 4, 0, 1)
    x = torch.zeros(n, t, 32, requires_grad=True)
    with fuzz.poisoned_memory():
        try:
            y, _ = layer(x)
        except UsageError as error:
            assert (t, "no tokens" in str(error)) == (0, True)  # noqa: PT017
            return
        gradients = torch.autograd.grad(y.sum(), [x, *layer.parameters()], allow_unused=True)
    assert y.shape == x.shape
    assert not any(g.any() for g in gradients if g is not None)
