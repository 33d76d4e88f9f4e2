"""How far the fast forms are from what they compute, on the machine at hand: values and gradients.

Every case is a hard one: queries and keys share a direction at 0.95 and every token corrects nearly all of its error,
where fast forms lose their digits. The truth is computed in float64 from the very numbers that the fast form is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from qkflow.ops import kuramoto
from qkflow.ops.csrc import build
from qkflow.ops.delta_rule import delta_rule
from qkflow.ops.delta_rule.dispatch import INTERPRETED, triton_error
from qkflow.ops.rotary import rotary_factors
from qkflow.ops.short_conv import short_conv
from qkflow.ops.symplectic import naive
from qkflow.ops.symplectic.reversible import drift_kick_reversible

Precision = Literal["float32", "float64", "bfloat16"]
Form = Callable[..., tuple[Tensor, ...]]
Case = Callable[[torch.Generator], Sequence[Tensor]]

WITHIN: dict[Precision, float] = {"float32": 1e-4, "float64": 1e-10, "bfloat16": 1e-2}
"""How far a form may be off in each precision."""
_DTYPES: dict[Precision, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
}
_COMMON = 0.95
_SMALL = 1e-2
"""Below this, errors are no longer held against a tensor's own largest number."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far a fast form is from its reference, as a part of each tensor's largest number."""

    kernel: str
    """What was tried."""
    precision: Precision
    """In which numbers."""
    values: float
    """The largest error of an output."""
    gradients: float | None
    """The largest error of a gradient; None for a form that is not differentiated."""

    @property
    def ok(self) -> bool:
        """Whether it is near enough; what is not a number is not.

        >>> Agreement(kernel="mine", precision="float32", values=2e-5, gradients=float("nan")).ok
        False
        """
        return all(error <= WITHIN[self.precision] for error in (self.values, self.gradients) if error is not None)


@dataclass(frozen=True, kw_only=True)
class _Trial:
    kernel: str
    needs: Literal["C", "Triton"] | None
    """What it is written in, where that is not torch."""
    fast: Form
    truth: Form
    case: Case
    differentiated: bool = True

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """The numbers it computes in."""
        return ("float32", "bfloat16") if self.needs == "Triton" else ("float32", "float64")


def own_device() -> torch.device:
    """Where fast forms are tried: a GPU, if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def agreements(device: torch.device | None = None) -> list[Agreement]:
    """Every fast form that can run on a device, `own_device()` unless told, in the precisions it knows.

    What is written in C runs on the CPU, wherever the rest does.

    >>> all(row.ok for row in agreements())
    True
    """
    place = own_device() if device is None else device
    able = {"C": build.load_error() is None, "Triton": triton_error(place) is None, None: True}
    return [
        _agreement(trial, precision, torch.device("cpu") if trial.needs == "C" else place)
        for trial in _TRIALS
        if able[trial.needs]
        for precision in trial.precisions
    ]


def _agreement(trial: _Trial, precision: Precision, device: torch.device) -> Agreement:
    g, dtype = torch.Generator().manual_seed(0), _DTYPES[precision]
    given = [x.to(dtype).to(device) for x in trial.case(g)]
    values, gradients = _outcome(trial.fast, given, dtype, trial.differentiated)
    true_values, true_gradients = _outcome(trial.truth, [x.double() for x in given], dtype, trial.differentiated)
    return Agreement(
        kernel=trial.kernel,
        precision=precision,
        values=_furthest(values, true_values),
        gradients=_furthest(gradients, true_gradients) if trial.differentiated else None,
    )


def _outcome(
    form: Form, given: Sequence[Tensor], dtype: torch.dtype, differentiated: bool
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Outputs, and the gradient of a random sum of them by each argument: the same sum, in `dtype`, for all forms."""
    if not differentiated:
        with torch.no_grad():
            return form(*given), ()
    g = torch.Generator().manual_seed(1)
    leaves = [x.detach().requires_grad_() for x in given]
    with torch.enable_grad():
        outputs = form(*leaves)
    weights = [torch.randn(x.shape, generator=g, dtype=torch.float64).to(dtype).to(x) for x in outputs]
    return [x.detach() for x in outputs], torch.autograd.grad(outputs, leaves, weights)


def _furthest(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    errors = [(a.double() - b).abs().max() / b.abs().max().clamp(min=_SMALL) for a, b in zip(got, want, strict=True)]
    return float(torch.stack(errors).max())  # which is no number where one of them is none


def _noise(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


def _alike(g: torch.Generator, *shape: int) -> tuple[Tensor, Tensor]:
    """Queries and keys of unit length, [b, t, h, k], that share one direction a head."""
    b, _, h, k = shape
    common = F.normalize(_noise(g, b, 1, h, k), dim=-1)
    made = [_COMMON * common + (1 - _COMMON) * F.normalize(_noise(g, *shape), dim=-1) for _ in range(2)]
    return F.normalize(made[0], dim=-1), F.normalize(made[1], dim=-1)


def _memory(g: torch.Generator) -> Sequence[Tensor]:
    t = 40 if INTERPRETED else 150  # several chunks, and a part of one
    b, h, k, v = 1, 2, 64, 64
    q, key = _alike(g, b, t, h, k)
    lam = (1.5 * _noise(g, b, t, h).sigmoid()).clamp(max=1.0)
    log_alpha = -0.01 * _noise(g, b, t, h).exp()
    return q, key, _noise(g, b, t, h, v), torch.full_like(lam, 0.99), log_alpha, lam, _noise(g, b, h, v, k)


def _delta(backend: str) -> Form:
    def form(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_alpha: Tensor, lam: Tensor, S: Tensor
    ) -> tuple[Tensor, ...]:
        return delta_rule(q, k, v, beta, log_alpha, lam, S, backend=backend)

    return form


def _decoded(backend: str) -> Form:
    """Token by token, from a memory that is handed on."""

    def form(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_alpha: Tensor, lam: Tensor, S: Tensor
    ) -> tuple[Tensor, ...]:
        outputs = []
        for at in range(q.shape[1]):
            now = (x[:, at : at + 1] for x in (q, k, v, beta, log_alpha, lam))
            o, S = delta_rule(*now, state=S, backend=backend)
            outputs.append(o)
        return torch.cat(outputs, 1), S

    return form


def _windows(g: torch.Generator) -> Sequence[Tensor]:
    common, taps = _noise(g, 1, 1, 24), 4
    x, tail = (_COMMON * common + (1 - _COMMON) * _noise(g, 2, t, 24) for t in (70, taps - 1))
    return x, _noise(g, 24, taps), tail


def _convolved(x: Tensor, weight: Tensor, tail: Tensor) -> tuple[Tensor, ...]:
    window = torch.cat([tail, x], 1)
    return (F.silu(F.conv1d(window.mT, weight[:, None], groups=weight.shape[0]).mT),)


def _pairs(tokens: int) -> Case:
    def case(g: torch.Generator) -> Sequence[Tensor]:
        width, hidden = 24, 20
        q, k = _alike(g, 2, tokens, 4, width)
        inner = _noise(g, hidden, width) / width**0.5, _noise(g, hidden)
        outer = _noise(g, width, hidden) / hidden**0.5, _noise(g, width)
        return q, k, *inner, *outer, torch.tensor(0.1, dtype=torch.float64)

    return case


def _moved(q: Tensor, k: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, dt: Tensor) -> tuple[Tensor, ...]:
    return naive.leapfrog(q, k, lambda q: naive.mlp_force(q, w1, b1, w2, b2), dt, _STEPS)


def _moved_fast(q: Tensor, k: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, dt: Tensor) -> tuple[Tensor, ...]:
    return drift_kick_reversible(q, k, (w1, b1, w2, b2), dt, naive.drift_coefficients("leapfrog", _STEPS), "silu")


def _phases(g: torch.Generator) -> Sequence[Tensor]:
    b, t, h, j = 2, 35, 2, 12
    theta = 3 * _noise(g, 1, 1, h, j) + _noise(g, b, t, h, j)
    first = torch.polar(torch.ones(b, 1, h, j, dtype=torch.float64), _noise(g, b, 1, h, j))
    return theta, _noise(g, b, t, h, j, 2), _noise(g, h, j), _noise(g, h, j), torch.view_as_real(first)


def _drawn(theta: Tensor, mean: Tensor, along: Tensor, across: Tensor, first: Tensor) -> tuple[Tensor, ...]:
    points = kuramoto.points(theta)
    pull = kuramoto.phase_increment(theta, points, mean, along, across)
    return points, pull, *kuramoto.shift_points(theta, points, _drift(points), (first, first))


def _drawn_truth(theta: Tensor, mean: Tensor, along: Tensor, across: Tensor, first: Tensor) -> tuple[Tensor, ...]:
    point, towards = torch.polar(torch.ones_like(theta), theta), torch.view_as_complex(mean)
    pull, by = towards * point.conj(), torch.view_as_complex(_drift(first).contiguous())
    late = [torch.cat([torch.view_as_complex(first), x[:, :-1]], 1) for x in (point * by, point)]
    return torch.view_as_real(point), along * pull.imag + across * pull.real, *map(torch.view_as_real, late)


def _drift(like: Tensor) -> Tensor:
    """Turns of 35 positions, two heads and twelve coordinates."""
    by = rotary_factors(0, 35, heads=2, width=24, base=100.0, like=like)
    return torch.view_as_real(by) if by.is_complex() else by


_STEPS = 3
_TRUTH = _delta("naive")
_TRIALS = (
    _Trial(kernel="delta rule, Triton", needs="Triton", fast=_delta("triton"), truth=_TRUTH, case=_memory),
    _Trial(
        kernel="delta rule, Triton, decoding",
        needs="Triton",
        fast=_decoded("triton"),
        truth=_TRUTH,
        case=_memory,
        differentiated=False,
    ),
    _Trial(kernel="delta rule, native", needs="C", fast=_delta("cpu"), truth=_TRUTH, case=_memory),
    _Trial(
        kernel="delta rule, native, decoding",
        needs="C",
        fast=_decoded("cpu"),
        truth=_TRUTH,
        case=_memory,
        differentiated=False,
    ),
    _Trial(kernel="delta rule, chunked", needs=None, fast=_delta("chunked"), truth=_TRUTH, case=_memory),
    _Trial(kernel="short convolution", needs="C", fast=lambda *x: (short_conv(*x),), truth=_convolved, case=_windows),
    _Trial(kernel="phases", needs="C", fast=_drawn, truth=_drawn_truth, case=_phases),
    _Trial(kernel="coupling", needs="C", fast=_moved_fast, truth=_moved, case=_pairs(35)),
    _Trial(
        kernel="coupling, decoding",
        needs="C",
        fast=_moved_fast,
        truth=_moved,
        case=_pairs(1),  # few rows have a kernel of their own
        differentiated=False,
    ),
)
