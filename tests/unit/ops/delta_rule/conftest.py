"""Helpers for tests of the delta rule: backends, inputs, results and comparisons."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from qkflow.ops.csrc import build
from qkflow.ops.delta_rule import BACKENDS, delta_rule

Inputs = dict[str, Tensor]
Rule = Callable[..., tuple[Tensor, Tensor]]
CPU_BACKENDS = tuple(name for name in BACKENDS if name != "triton")
"""Backends that support float64 and run on any machine; `test_triton.py` tests the other one."""


def _skip_if_missing(name: str) -> str:
    if name == "cpu" and build.load_error() is not None:
        pytest.skip(str(build.load_error()))
    return name


@pytest.fixture(scope="session", params=CPU_BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend that can run on this machine."""
    return _skip_if_missing(request.param)


@pytest.fixture(scope="session", params=[name for name in CPU_BACKENDS if name != "naive"])
def fast(request: pytest.FixtureRequest) -> str:
    """Every backend except the reference."""
    return _skip_if_missing(request.param)


def make_inputs(
    t: int,
    *,
    rows: int = 2,
    heads: int = 2,
    key: int = 4,
    value: int = 3,
    rho: float = 0.0,
    separate: bool = False,
    vector: bool = False,
    without: Collection[str] = (),
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Inputs:
    """Return arguments of `delta_rule`, except those in `without`; queries and keys are unit vectors.

    With `rho`, all queries and keys of a sequence have a common direction (with `separate`, one for queries and another
    for keys) and beta is close to 1: the case in which fast implementations lose precision. With `vector`, every key
    channel has a decay of its own.
    """
    g = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    def unit(*shape: int) -> Tensor:
        return normalize(noise(*shape), dim=-1)

    common, other = unit(rows, 1, heads, key), unit(rows, 1, heads, key)
    q, k = (
        normalize(rho * direction + (1 - rho) * unit(rows, t, heads, key), dim=-1)
        for direction in (other if separate else common, common)
    )
    beta, lam = noise(rows, t, heads).sigmoid(), noise(rows, t, heads).sigmoid()
    if rho:
        beta, lam = torch.full_like(beta, 0.99), (1.5 * lam).clamp(max=1.0)
    inputs = {
        "q": q,
        "k": k,
        "v": noise(rows, t, heads, value),
        "beta": beta,
        "log_alpha": -0.1 * noise(rows, t, heads, *([key] if vector else [])).exp(),
        "erase": k + lam.unsqueeze(-1) * q,
        "state": noise(rows, heads, value, key),
    }
    return {name: x.to(dtype) for name, x in inputs.items() if name not in without}


def published(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_alpha: Tensor | None = None,
    erase: Tensor | None = None,
    state: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The equation of the paper with explicit matrices; it uses no code of the package."""
    n, t, h, width = q.shape
    S = q.new_zeros(n, h, v.shape[-1], width) if state is None else state
    outputs = []
    for i in range(t):
        a = torch.ones_like(k[:, i]) if log_alpha is None else log_alpha[:, i].exp().view(n, h, -1).expand_as(k[:, i])
        x = k[:, i] if erase is None else erase[:, i]
        b, row = beta[:, i, :, None, None], k[:, i, :, None, :]
        S = (
            S @ torch.diag_embed(a) @ (torch.eye(width, dtype=q.dtype) - b * x[..., None] * row)
            + b * v[:, i, :, :, None] * row
        )
        outputs.append((S @ q[:, i, :, :, None])[..., 0])
    return torch.stack(outputs, 1) * (width**-0.5 if scale is None else scale), S


def results(inputs: Mapping[str, Tensor], rule: Rule = delta_rule, **options: object) -> Inputs:
    """Return the outputs `o`, the `final` state, and the gradient of each argument by its name.

    The gradient is that of a weighted sum of outputs and final state, with the same random weights for the same shapes.
    """
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    o, final = rule(**leaves, **options)
    outputs = [x for x in (o, final) if x.requires_grad]  # the final state does not depend on the queries
    gradients = torch.autograd.grad(outputs, tuple(leaves.values()), [_weight(x) for x in outputs])
    return {"o": o.detach(), "final": final.detach(), **dict(zip(leaves, gradients, strict=True))}


@cache
def expected(t: int, scale: float | None = None, **options: Any) -> Inputs:
    """Return the results of `make_inputs(t, **options)` by the published equation in float64. Do not modify them."""
    return results({name: x.double() for name, x in make_inputs(t, **options).items()}, published, scale=scale)


def _weight(x: Tensor) -> Tensor:
    g = torch.Generator().manual_seed(zlib.crc32(repr(tuple(x.shape)).encode()))
    return torch.randn(x.shape, generator=g, dtype=torch.float64).to(x)


def assert_agree(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-10, min_scale: float = 1e-2
) -> None:
    """Check that errors are below `tolerance`, relative to the largest value of each tensor (at least `min_scale`)."""
    assert actual.keys() == expected.keys()
    for name, b in expected.items():
        a, b = actual[name].detach().double(), b.detach().double()
        assert a.shape == b.shape, name
        error = float((a - b).abs().max()) / max(min_scale, float(b.abs().max())) if a.numel() else 0.0
        assert error <= tolerance, f"the relative error of {name} is {error:.1e}, more than {tolerance:g}"


@pytest.fixture(scope="session")
def helpers() -> SimpleNamespace:
    """The helpers of this folder as a fixture, because test modules cannot import each other."""
    return SimpleNamespace(
        make_inputs=make_inputs, published=published, results=results, expected=expected, assert_agree=assert_agree
    )
