"""`qkflow check --kernels`: the fast implementations are close to their references, and wrong ones are detected."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qkflow.laws import kernels
from qkflow.laws.kernels import KERNEL_TOLERANCES, KernelCheck, run_kernel_checks
from qkflow.ops.csrc import build
from qkflow.ops.delta_rule import delta_rule

Outcome = tuple[Tensor, Tensor]


def changed(monkeypatch: pytest.MonkeyPatch, backend: str, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A backend whose outputs are `change(outputs, queries)`."""

    def wrong(q: Tensor, *rest: Any, **options: Any) -> Outcome:
        o, final = delta_rule(q, *rest, **options)
        return (change(o, q) if options["backend"] == backend else o), final

    monkeypatch.setattr(kernels, "delta_rule", wrong)


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without C kernels."""
    monkeypatch.setattr(build, "load_error", lambda: "there is no C compiler (cc, gcc or clang)")


def test_every_available_kernel_is_accurate() -> None:
    rows = run_kernel_checks()
    assert [row for row in rows if not row.ok] == []
    names = {row.kernel for row in rows}
    assert ("delta rule, C" in names) == (build.load_error() is None)
    assert {(row.kernel, row.precision) for row in rows} == {
        (name, precision) for name in names for precision in ("float32", "float64")
    }
    assert {row.kernel for row in rows if row.gradients is None} == {
        name for name in names if "decoding" in name or "Newton" in name
    }


@pytest.mark.usefixtures("no_kernels")
def test_without_c_kernels_only_the_chunked_forms_are_checked() -> None:
    assert [(row.kernel, row.precision) for row in run_kernel_checks()] == [
        ("delta rule, chunked", "float32"),
        ("delta rule, chunked", "float64"),
        ("channel decay, chunked", "float32"),
        ("channel decay, chunked", "float64"),
    ]


@pytest.mark.usefixtures("no_kernels")
def test_wrong_values_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    changed(monkeypatch, "chunked", lambda o, q: o * (1 + 1e-6))
    for row in run_kernel_checks():
        assert row.ok == (row.precision == "float32")
        assert row.precision == "float32" or row.values == pytest.approx(1e-6, rel=1e-3)


@pytest.mark.usefixtures("no_kernels")
def test_wrong_gradients_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    changed(monkeypatch, "chunked", lambda o, q: o + (q.sum() - q.sum().detach()))
    for row in run_kernel_checks():
        assert row.values < KERNEL_TOLERANCES[row.precision]
        assert not row.ok


@pytest.mark.usefixtures("no_kernels")
def test_nan_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    changed(
        monkeypatch, "chunked", lambda o, q: torch.where(torch.arange(o.shape[1])[:, None, None] == 9, torch.nan, o)
    )
    rows = run_kernel_checks()
    assert not any(row.ok for row in rows)
    assert all(math.isnan(row.values) for row in rows)


@pytest.mark.parametrize(("values", "gradients", "ok"), [(9e-5, None, True), (9e-5, 9e-5, True), (9e-5, 2e-4, False)])
def test_both_values_and_gradients_count(values: float, gradients: float | None, ok: bool) -> None:
    assert KernelCheck(kernel="mine", precision="float32", values=values, gradients=gradients).ok == ok
