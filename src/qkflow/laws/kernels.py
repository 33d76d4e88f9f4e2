"""Accuracy of the fast kernels on this machine: values and gradients against the naive forms in float64.

The inputs are hard: queries and keys share a direction with weight 0.95, and beta is close to 1, where fast forms lose
digits. The reference is computed from the same rounded inputs as the kernel.
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
from qkflow.ops.delta_rule import delta_rule, triton_error
from qkflow.ops.delta_rule.dispatch import INTERPRETED
from qkflow.ops.rotary import rotary_factors
from qkflow.ops.short_conv import short_conv
from qkflow.ops.symplectic import naive
from qkflow.ops.symplectic.reversible import drift_kick_reversible

Precision = Literal["float32", "float64", "bfloat16"]
Language = Literal["C", "Triton"]
Kernel = Callable[..., tuple[Tensor, ...]]
Inputs = Callable[[torch.Generator], Sequence[Tensor]]

KERNEL_TOLERANCES: dict[Precision, float] = {"float32": 1e-4, "float64": 1e-10, "bfloat16": 1e-2}
_DTYPES: dict[Precision, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
}
_COMMON = 0.95
"""Weight of the direction that queries and keys share."""
_MIN_SIZE = 1e-2
"""Errors are relative to the largest value of a tensor, but at least to this."""
_LEAPFROG_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class KernelCheck:
    """The errors of one kernel, relative to each tensor's largest value."""

    kernel: str
    precision: Precision
    values: float
    """Largest error of an output."""
    gradients: float | None
    """Largest error of a gradient; None if the kernel has no backward pass."""

    @property
    def ok(self) -> bool:
        """Whether all errors are within the tolerance; NaN is not.

        >>> KernelCheck(kernel="mine", precision="float32", values=2e-5, gradients=float("nan")).ok
        False
        """
        tolerance = KERNEL_TOLERANCES[self.precision]
        return all(error <= tolerance for error in (self.values, self.gradients) if error is not None)


@dataclass(frozen=True, kw_only=True)
class _Case:
    name: str
    language: Language | None
    """None for PyTorch."""
    kernel: Kernel
    reference: Kernel
    inputs: Inputs
    has_backward: bool = True

    @property
    def precisions(self) -> tuple[Precision, ...]:
        return ("float32", "bfloat16") if self.language == "Triton" else ("float32", "float64")


def default_device() -> torch.device:
    """A GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run_kernel_checks(device: torch.device | None = None) -> list[KernelCheck]:
    """Check every kernel that can run on a device (default: `default_device()`), in all its precisions.

    C kernels always run on the CPU.

    >>> all(result.ok for result in run_kernel_checks())
    True
    """
    device = default_device() if device is None else device
    is_available = {"C": build.load_error() is None, "Triton": triton_error(device) is None, None: True}
    return [
        _check(case, precision, torch.device("cpu") if case.language == "C" else device)
        for case in _CASES
        if is_available[case.language]
        for precision in case.precisions
    ]


def _check(case: _Case, precision: Precision, device: torch.device) -> KernelCheck:
    dtype = _DTYPES[precision]
    inputs = [x.to(dtype).to(device) for x in case.inputs(torch.Generator().manual_seed(0))]
    values, gradients = _run(case.kernel, inputs, dtype, case.has_backward)
    expected_values, expected_gradients = _run(case.reference, [x.double() for x in inputs], dtype, case.has_backward)
    return KernelCheck(
        kernel=case.name,
        precision=precision,
        values=_largest_error(values, expected_values),
        gradients=_largest_error(gradients, expected_gradients) if case.has_backward else None,
    )


def _run(
    kernel: Kernel, inputs: Sequence[Tensor], dtype: torch.dtype, has_backward: bool
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Outputs, and gradients of a random weighted sum of them; the weights are rounded to `dtype`."""
    if not has_backward:
        with torch.no_grad():
            return kernel(*inputs), ()
    g = torch.Generator().manual_seed(1)
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        outputs = kernel(*leaves)
    weights = [torch.randn(x.shape, generator=g, dtype=torch.float64).to(dtype).to(x) for x in outputs]
    return [x.detach() for x in outputs], torch.autograd.grad(outputs, leaves, weights)


def _largest_error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """NaN if any error is NaN."""
    pairs = zip(actual, expected, strict=True)
    return float(
        torch.stack([(a.double() - b).abs().max() / b.abs().max().clamp(min=_MIN_SIZE) for a, b in pairs]).max()
    )


def _noise(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


def _queries_keys(g: torch.Generator, *shape: int) -> tuple[Tensor, Tensor]:
    """Unit queries and keys, [b, t, h, k], with one common direction per head."""
    b, _, h, k = shape
    common = F.normalize(_noise(g, b, 1, h, k), dim=-1)
    q, k = (_COMMON * common + (1 - _COMMON) * F.normalize(_noise(g, *shape), dim=-1) for _ in range(2))
    return F.normalize(q, dim=-1), F.normalize(k, dim=-1)


# ---- delta rule


def _delta_inputs(g: torch.Generator) -> Sequence[Tensor]:
    t = 40 if INTERPRETED else 150  # several chunks and a partial one
    b, h, k, v = 1, 2, 64, 64
    q, key = _queries_keys(g, b, t, h, k)
    lam = (1.5 * _noise(g, b, t, h).sigmoid()).clamp(max=1.0)
    log_alpha = -0.01 * _noise(g, b, t, h).exp()
    return q, key, _noise(g, b, t, h, v), torch.full_like(lam, 0.99), log_alpha, lam, _noise(g, b, h, v, k)


def _delta(backend: str) -> Kernel:
    return lambda *inputs: delta_rule(*inputs, backend=backend)


def _delta_decoding(backend: str) -> Kernel:
    """Token by token, passing the state on."""

    def kernel(*inputs: Tensor) -> tuple[Tensor, ...]:
        *tokens, state = inputs
        outputs = []
        for i in range(inputs[0].shape[1]):
            o, state = delta_rule(*(x[:, i : i + 1] for x in tokens), state=state, backend=backend)
            outputs.append(o)
        return torch.cat(outputs, 1), state

    return kernel


# ---- short convolution


def _conv_inputs(g: torch.Generator) -> Sequence[Tensor]:
    common, taps = _noise(g, 1, 1, 24), 4
    x, state = (_COMMON * common + (1 - _COMMON) * _noise(g, 2, t, 24) for t in (70, taps - 1))
    return x, _noise(g, 24, taps), state


def _conv_reference(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, ...]:
    window = torch.cat([state, x], 1)
    return (F.silu(F.conv1d(window.mT, weight[:, None], groups=weight.shape[0]).mT),)


# ---- coupled dynamics


def _coupling_inputs(tokens: int) -> Inputs:
    def inputs(g: torch.Generator) -> Sequence[Tensor]:
        width, hidden = 24, 20
        q, k = _queries_keys(g, 2, tokens, 4, width)
        inner = _noise(g, hidden, width) / width**0.5, _noise(g, hidden)
        outer = _noise(g, width, hidden) / hidden**0.5, _noise(g, width)
        return q, k, *inner, *outer, torch.tensor(0.1, dtype=torch.float64)

    return inputs


def _coupling(q: Tensor, k: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, dt: Tensor) -> tuple[Tensor, ...]:
    coefficients = naive.drift_coefficients("leapfrog", _LEAPFROG_STEPS)
    return drift_kick_reversible(q, k, (w1, b1, w2, b2), dt, coefficients, "silu")


def _coupling_reference(
    q: Tensor, k: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, dt: Tensor
) -> tuple[Tensor, ...]:
    return naive.leapfrog(q, k, lambda q: naive.mlp_force(q, w1, b1, w2, b2), dt, _LEAPFROG_STEPS)


# ---- phases


def _phase_inputs(g: torch.Generator) -> Sequence[Tensor]:
    b, t, h, j = 2, 35, 2, 12
    theta = 3 * _noise(g, 1, 1, h, j) + _noise(g, b, t, h, j)
    first = torch.polar(torch.ones(b, 1, h, j, dtype=torch.float64), _noise(g, b, 1, h, j))
    return theta, _noise(g, b, t, h, j, 2), _noise(g, h, j), _noise(g, h, j), torch.view_as_real(first)


def _phases(theta: Tensor, mean: Tensor, along: Tensor, across: Tensor, first: Tensor) -> tuple[Tensor, ...]:
    points = kuramoto.points(theta)
    increment = kuramoto.phase_increment(theta, points, mean, along, across)
    return points, increment, *kuramoto.shift_points(theta, points, _phase_rotation(points), (first, first))


def _phases_reference(theta: Tensor, mean: Tensor, along: Tensor, across: Tensor, first: Tensor) -> tuple[Tensor, ...]:
    points, rotation = torch.polar(torch.ones_like(theta), theta), torch.view_as_complex(_phase_rotation(first))
    pull = torch.view_as_complex(mean) * points.conj()
    increment = along * pull.imag + across * pull.real
    shifted = [torch.cat([torch.view_as_complex(first), x[:, :-1]], 1) for x in (points * rotation, points)]
    return torch.view_as_real(points), increment, *map(torch.view_as_real, shifted)


def _phase_rotation(like: Tensor) -> Tensor:
    factors = rotary_factors(0, 35, heads=2, width=24, base=100.0, like=like)
    return (torch.view_as_real(factors) if factors.is_complex() else factors).contiguous()


def _delta_case(language: Language | None, backend: str, *, is_decoding: bool = False) -> _Case:
    return _Case(
        name=f"delta rule, {language or backend}{', decoding' if is_decoding else ''}",
        language=language,
        kernel=(_delta_decoding if is_decoding else _delta)(backend),
        reference=_delta("naive"),
        inputs=_delta_inputs,
        has_backward=not is_decoding,
    )


_CASES = (
    _delta_case("Triton", "triton"),
    _delta_case("Triton", "triton", is_decoding=True),
    _delta_case("C", "cpu"),
    _delta_case("C", "cpu", is_decoding=True),
    _delta_case(None, "chunked"),
    _Case(
        name="short convolution",
        language="C",
        kernel=lambda *x: (short_conv(*x),),
        reference=_conv_reference,
        inputs=_conv_inputs,
    ),
    _Case(name="phases", language="C", kernel=_phases, reference=_phases_reference, inputs=_phase_inputs),
    _Case(
        name="coupling",
        language="C",
        kernel=_coupling,
        reference=_coupling_reference,
        inputs=_coupling_inputs(tokens=35),
    ),
    _Case(
        name="coupling, decoding",
        language="C",
        kernel=_coupling,
        reference=_coupling_reference,
        inputs=_coupling_inputs(tokens=1),  # a few rows use another kernel
        has_backward=False,
    ),
)
