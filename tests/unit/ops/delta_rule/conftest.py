"""What the tests of the delta rule share: its forms, arguments for them, all that comes of a call, and a comparison."""

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

Case = dict[str, Tensor]
Form = Callable[..., tuple[Tensor, Tensor]]
FORMS = tuple(name for name in BACKENDS if name != "triton")
"""Those that know float64 and run anywhere; `test_triton.py` is about the other one."""


def _able(name: str) -> str:
    if name == "cpu" and build.load_error() is not None:
        pytest.skip(str(build.load_error()))
    return name


@pytest.fixture(scope="session", params=FORMS)
def backend(request: pytest.FixtureRequest) -> str:
    """Every form that can run here."""
    return _able(request.param)


@pytest.fixture(scope="session", params=[name for name in FORMS if name != "naive"])
def fast(request: pytest.FixtureRequest) -> str:
    """Every form but the one they are held to."""
    return _able(request.param)


def case(
    t: int,
    *,
    rows: int = 2,
    heads: int = 2,
    key: int = 4,
    value: int = 3,
    rho: float = 0.0,
    apart: bool = False,
    without: Collection[str] = (),
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Case:
    """Arguments of `delta_rule`, also the optional ones unless it is to be `without` them; queries and keys are units.

    With `rho` all queries and keys of a sequence share that much of one direction (or, `apart`, of one for the queries
    and one for the keys) and every token writes almost all it can: there fast forms lose their digits.
    """
    g = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    def unit(*shape: int) -> Tensor:
        return normalize(noise(*shape), dim=-1)

    common, other = unit(rows, 1, heads, key), unit(rows, 1, heads, key)
    q, k = (
        normalize(rho * direction + (1 - rho) * unit(rows, t, heads, key), dim=-1)
        for direction in (other if apart else common, common)
    )
    beta, lam = noise(rows, t, heads).sigmoid(), noise(rows, t, heads).sigmoid()
    if rho:
        beta, lam = torch.full_like(beta, 0.99), (1.5 * lam).clamp(max=1.0)
    made = {
        "q": q,
        "k": k,
        "v": noise(rows, t, heads, value),
        "beta": beta,
        "log_alpha": -0.1 * noise(rows, t, heads).exp(),
        "lam": lam,
        "state": noise(rows, heads, value, key),
    }
    return {name: x.to(dtype) for name, x in made.items() if name not in without}


def published(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_alpha: Tensor | None = None,
    lam: Tensor | None = None,
    state: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The equation of the paper with its matrices written out, for tests alone: not a line of it is the package's."""
    n, t, h, width = q.shape
    S = q.new_zeros(n, h, v.shape[-1], width) if state is None else state
    outputs = []
    for i in range(t):
        a = 1.0 if log_alpha is None else log_alpha[:, i, :, None, None].exp()
        x = k[:, i] if lam is None else k[:, i] + lam[:, i, :, None] * q[:, i]
        b, row = beta[:, i, :, None, None], k[:, i, :, None, :]
        S = a * S @ (torch.eye(width, dtype=q.dtype) - b * x[..., None] * row) + b * v[:, i, :, :, None] * row
        outputs.append((S @ q[:, i, :, :, None])[..., 0])
    return torch.stack(outputs, 1) * (width**-0.5 if scale is None else scale), S


def outcome(given: Mapping[str, Tensor], form: Form = delta_rule, **options: object) -> Case:
    """All that can be right or wrong: outputs `o`, the `final` state, and the gradient of each argument by its name.

    The gradient is of a random sum of outputs and final state, the same sum for the same shapes.
    """
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    o, final = form(**leaves, **options)
    gradients = torch.autograd.grad((o, final), tuple(leaves.values()), (_weight(o), _weight(final)))
    return {"o": o.detach(), "final": final.detach(), **dict(zip(leaves, gradients, strict=True))}


@cache
def truth(t: int, scale: float | None = None, **options: Any) -> Case:
    """What comes of `case(t, **options)` by the published equation, in float64; not to be written to."""
    return outcome({name: x.double() for name, x in case(t, **options).items()}, published, scale=scale)


def _weight(x: Tensor) -> Tensor:
    g = torch.Generator().manual_seed(zlib.crc32(repr(tuple(x.shape)).encode()))
    return torch.randn(x.shape, generator=g, dtype=torch.float64).to(x)


def agree(got: Mapping[str, Tensor], want: Mapping[str, Tensor], within: float = 1e-10, least: float = 1e-2) -> None:
    """Every number is right up to `within` of the largest of its tensor, or of `least` where that is larger."""
    assert got.keys() == want.keys()
    for name, b in want.items():
        a, b = got[name].detach().double(), b.detach().double()
        assert a.shape == b.shape, name
        off = float((a - b).abs().max()) / max(least, float(b.abs().max())) if a.numel() else 0.0
        assert off <= within, f"{name} is off by {off:.1e} of its largest value, more than {within:g}"


@pytest.fixture(scope="session")
def bench() -> SimpleNamespace:
    """The helpers of this folder: nothing can be imported from beside a test."""
    return SimpleNamespace(case=case, published=published, outcome=outcome, truth=truth, agree=agree)
