"""Accuracy of the fast kernels on this machine: values and gradients against the naive forms in float64.

The inputs are hard: queries and keys share a direction with weight 0.95, and beta is close to 1, where fast forms lose
digits. The reference is computed from the same rounded inputs as the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from qkflow.mechanisms.registry import mechanism
from qkflow.ops import few_rows, kuramoto, newton_schulz
from qkflow.ops.attention import attention, attention_naive
from qkflow.ops.attention import use_backend as use_attention
from qkflow.ops.csrc import build
from qkflow.ops.delta_rule import delta_rule, triton_error
from qkflow.ops.delta_rule import use_backend as use_delta
from qkflow.ops.delta_rule.dispatch import INTERPRETED
from qkflow.ops.linear import linear
from qkflow.ops.norm import add_rms_norm
from qkflow.ops.projection import project_heads
from qkflow.ops.rotary import rotary_factors
from qkflow.ops.short_conv import short_conv
from qkflow.ops.swiglu import swiglu
from qkflow.ops.symplectic import naive
from qkflow.ops.symplectic.reversible import drift_kick_reversible

Precision = Literal["float32", "float64", "bfloat16"]
Kernel = Callable[..., tuple[Tensor, ...]]

KERNEL_TOLERANCES: dict[Precision, float] = {"float32": 1e-4, "float64": 1e-10, "bfloat16": 1e-2}
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


class _Case(NamedTuple):
    name: str
    language: Literal["C", "Triton"] | None
    """None for PyTorch."""
    kernel: Kernel
    reference: Kernel
    inputs: Sequence[Tensor]
    has_backward: bool = True


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
    checks = []
    for case in (
        *_attention_cases(),
        *_delta_cases(),
        _conv_case(),
        _phase_case(),
        *_coupling_cases(),
        *_layer_cases(),
        *_decoding_cases(),
        _newton_schulz_case(),
    ):
        precisions: tuple[Precision, ...] = ("float32", "bfloat16" if case.language == "Triton" else "float64")
        if is_available[case.language]:
            case_device = torch.device("cpu") if case.language == "C" else device
            checks += [_check(case, precision, case_device) for precision in precisions]
    return checks


def _check(case: _Case, precision: Precision, device: torch.device) -> KernelCheck:
    dtype: torch.dtype = getattr(torch, precision)
    inputs = [x.to(dtype).to(device) for x in case.inputs]
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
    with torch.set_grad_enabled(has_backward):
        leaves = [x.detach().requires_grad_(has_backward) for x in inputs]
        outputs = kernel(*leaves)
    if not has_backward:
        return outputs, ()
    g = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=g, dtype=torch.float64).to(dtype).to(x) for x in outputs]
    return [x.detach() for x in outputs], torch.autograd.grad(outputs, leaves, weights)


def _largest_error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """NaN if any error is NaN."""
    pairs = zip(actual, expected, strict=True)
    return float(
        torch.stack([(a.double() - b).abs().max() / b.abs().max().clamp(min=_MIN_SIZE) for a, b in pairs]).max()
    )


# ---- inputs: every case draws its own, from the same seed


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _noise(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


def _queries_keys(g: torch.Generator, *shape: int) -> tuple[Tensor, Tensor]:
    """Unit queries and keys, [b, t, h, k], with one common direction per head."""
    b, _, h, k = shape
    common = F.normalize(_noise(g, b, 1, h, k), dim=-1)
    q, k = (_COMMON * common + (1 - _COMMON) * F.normalize(_noise(g, *shape), dim=-1) for _ in range(2))
    return F.normalize(q, dim=-1), F.normalize(k, dim=-1)


# ---- the kernels


def _attention_cases() -> list[_Case]:
    g, (b, t, h, k), window = _generator(), (2, 150, 4, 32), 100  # several tiles, some of them partly visible
    q, key = _queries_keys(g, b, t, h, k)
    inputs = 20 * q, key[:, :, ::2], _noise(g, b, t, h // 2, 2 * k)  # grouped queries, wide values

    def kernel(*inputs: Tensor) -> tuple[Tensor, ...]:
        return (attention(*inputs, causal=True, window=window, backend="cpu"),)

    def reference(*inputs: Tensor) -> tuple[Tensor, ...]:
        return (attention_naive(*inputs, causal=True, window=window),)

    few = q[:, -3:], *inputs[1:]  # a few queries use another kernel
    return [
        _Case("attention, C", "C", kernel, reference, inputs),
        _Case("attention, C, decoding", "C", kernel, reference, few, has_backward=False),
    ]


def _delta_cases() -> list[_Case]:
    g, t = _generator(), 40 if INTERPRETED else 150  # several chunks and a partial one
    b, h, k, v = 1, 2, 64, 64
    q, key = _queries_keys(g, b, t, h, k)
    lam = (1.5 * _noise(g, b, t, h).sigmoid()).clamp(max=1.0)
    log_alpha = -0.01 * _noise(g, b, t, h).exp()
    value, beta, erase = _noise(g, b, t, h, v), torch.full_like(lam, 0.99), key + lam.unsqueeze(-1) * q
    inputs = q, key, value, beta, log_alpha, erase, _noise(g, b, h, v, k)
    by_channel = (*inputs[:4], -0.01 * _noise(g, b, t, h, k).exp(), *inputs[5:])

    def whole(backend: str) -> Kernel:
        return lambda *inputs: delta_rule(*inputs, backend=backend)

    def decoding(backend: str) -> Kernel:
        """Token by token, passing the state on."""

        def kernel(*inputs: Tensor) -> tuple[Tensor, ...]:
            *tokens, state = inputs
            outputs = []
            for i in range(t):
                o, state = delta_rule(*(x[:, i : i + 1] for x in tokens), state=state, backend=backend)
                outputs.append(o)
            return torch.cat(outputs, 1), state

        return kernel

    reference = whole("naive")
    return [
        _Case("delta rule, Triton", "Triton", whole("triton"), reference, inputs),
        _Case("delta rule, Triton, decoding", "Triton", decoding("triton"), reference, inputs, has_backward=False),
        _Case("delta rule, C", "C", whole("cpu"), reference, inputs),
        _Case("delta rule, C, decoding", "C", decoding("cpu"), reference, inputs, has_backward=False),
        _Case("delta rule, chunked", None, whole("chunked"), reference, inputs),
        _Case("channel decay, C", "C", whole("cpu"), reference, by_channel),
        _Case("channel decay, C, decoding", "C", decoding("cpu"), reference, by_channel, has_backward=False),
        _Case("channel decay, chunked", None, whole("chunked"), reference, by_channel),
    ]


def _conv_case() -> _Case:
    g, taps = _generator(), 4
    common = _noise(g, 1, 1, 24)
    x, state = (_COMMON * common + (1 - _COMMON) * _noise(g, 2, t, 24) for t in (70, taps - 1))

    def reference(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        window = torch.cat([state, x], 1)
        return (F.silu(F.conv1d(window.mT, weight[:, None], groups=weight.shape[0]).mT),)

    return _Case(
        "short convolution", "C", lambda *inputs: (short_conv(*inputs),), reference, (x, _noise(g, 24, taps), state)
    )


def _coupling_cases() -> list[_Case]:
    def inputs(tokens: int) -> tuple[Tensor, ...]:
        g, width, hidden = _generator(), 24, 20
        q, k = _queries_keys(g, 2, tokens, 4, width)
        inner = _noise(g, hidden, width) / width**0.5, _noise(g, hidden)
        outer = _noise(g, width, hidden) / hidden**0.5, _noise(g, width)
        return q, k, torch.tensor(0.1, dtype=torch.float64), *inner, *outer

    def kernel(q: Tensor, k: Tensor, dt: Tensor, *force: Tensor) -> tuple[Tensor, ...]:
        w1, b1, w2, b2 = force
        coefficients = naive.drift_coefficients("leapfrog", _LEAPFROG_STEPS)
        return drift_kick_reversible(q, k, (w1, b1, w2, b2), dt, coefficients, "silu")

    def reference(q: Tensor, k: Tensor, dt: Tensor, *force: Tensor) -> tuple[Tensor, ...]:
        return naive.leapfrog(q, k, lambda q: naive.mlp_force(q, *force), dt, _LEAPFROG_STEPS)

    few = inputs(tokens=1)  # a few rows use another kernel
    return [
        _Case("coupling", "C", kernel, reference, inputs(tokens=35)),
        _Case("coupling, decoding", "C", kernel, reference, few, has_backward=False),
    ]


def _phase_case() -> _Case:
    g, (b, t, h, j) = _generator(), (2, 35, 2, 12)
    theta = 3 * _noise(g, 1, 1, h, j) + _noise(g, b, t, h, j)
    first = torch.polar(torch.ones(b, 1, h, j, dtype=torch.float64), _noise(g, b, 1, h, j))
    inputs = theta, _noise(g, b, t, h, j, 2), _noise(g, h, j), _noise(g, h, j), torch.view_as_real(first)

    def rotation(like: Tensor) -> Tensor:
        factors = rotary_factors(0, t, heads=h, width=2 * j, base=100.0, like=like)
        return (torch.view_as_real(factors) if factors.is_complex() else factors).contiguous()

    def kernel(theta: Tensor, mean: Tensor, tangential: Tensor, radial: Tensor, first: Tensor) -> tuple[Tensor, ...]:
        points = kuramoto.points(theta)
        increment = kuramoto.phase_increment(theta, points, mean, tangential, radial)
        return points, increment, *kuramoto.shift_points(theta, points, rotation(points), (first, first))

    def reference(theta: Tensor, mean: Tensor, tangential: Tensor, radial: Tensor, first: Tensor) -> tuple[Tensor, ...]:
        points = torch.polar(torch.ones_like(theta), theta)
        pull = torch.view_as_complex(mean) * points.conj()
        increment = tangential * pull.imag + radial * pull.real
        keys, first = points * torch.view_as_complex(rotation(first)), torch.view_as_complex(first)
        shifted = [torch.cat([first, x[:, :-1]], 1) for x in (keys, points)]
        return torch.view_as_real(points), increment, *map(torch.view_as_real, shifted)

    return _Case("phases", "C", kernel, reference, inputs)


def _layer_cases() -> list[_Case]:
    """The layers around a mechanism, in a training step."""
    g, (b, t, h, k, hidden) = _generator(), (2, 70, 4, 12, 52)
    d = h * k
    common = _noise(g, 1, 1, d)
    x, branch = (_COMMON * common + (1 - _COMMON) * _noise(g, b, t, d) for _ in range(2))
    weights = [_noise(g, d, d) / d**0.5 for _ in range(3)]
    gate, up = (_noise(g, hidden, d) / d**0.5 for _ in range(2))

    def project(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        factors = rotary_factors(0, t, heads=h, width=k, base=100.0, like=x)
        return project_heads(x, weights, (k, k, k), factors)

    def project_reference(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        q, key, v = ((x @ weight.T).unflatten(-1, (h, k)) for weight in weights)
        angles = torch.arange(t)[:, None, None] * 100.0 ** -(torch.arange(0, k, 2).double() / k)
        turn = torch.polar(torch.ones_like(angles), angles)
        q, key = (torch.view_as_complex(y.unflatten(-1, (-1, 2))) * turn for y in (q, key))
        return torch.view_as_real(q).flatten(-2), torch.view_as_real(key).flatten(-2), v

    def norm_reference(x: Tensor, branch: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        x = x + branch
        return x, x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    def swiglu_reference(x: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        return (F.silu(x @ gate.T) * (x @ up.T),)

    rows = x.flatten(0, 1)  # enough of them for the kernel, where it is used

    return [
        _Case("linear", "C", lambda *inputs: (linear(*inputs),), lambda x, w: (x @ w.T,), (rows, gate)),
        _Case("SwiGLU", "C", lambda *inputs: (swiglu(*inputs),), swiglu_reference, (x, gate, up)),
        _Case("RMS norm", "C", add_rms_norm, norm_reference, (x, branch, _noise(g, d))),
        _Case("projections", "C", project, project_reference, (x, *weights)),
    ]


def _decoding_cases() -> list[_Case]:
    """Whole layers, token by token, against the whole sequence; and the feed-forward branch of a few rows."""
    specs = {"attention": "standard", "differential": "differential", "coupled": "coupled"}
    specs |= {"Q-Delta": "qdelta", "Kuramoto": "kuramoto"}
    g, (b, d, hidden) = _generator(), (2, 48, 52)
    x, norm = _noise(g, b, 1, d), _noise(g, d)
    gate, up, output = _noise(g, hidden, d) / d**0.5, _noise(g, hidden, d) / d**0.5, _noise(g, d, hidden) / hidden**0.5

    def kernel(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, output: Tensor) -> tuple[Tensor, ...]:
        return few_rows.norm(x, norm, 1e-5), few_rows.add_swiglu(x, norm, 1e-5, gate, up, output)

    def reference(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, output: Tensor) -> tuple[Tensor, ...]:
        u = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm
        return u, x + (F.silu(u @ gate.T) * (u @ up.T)) @ output.T

    feed_forward = _Case(
        "feed-forward, C, decoding", "C", kernel, reference, (x, norm, gate, up, output), has_backward=False
    )
    return [*(_layer_case(f"{name} layer, C, decoding", spec) for name, spec in specs.items()), feed_forward]


def _layer_case(name: str, spec: str) -> _Case:
    g, (b, t, d) = _generator(), (2, 40, 48)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = mechanism(spec)(d, 4, 0, 1).eval()
    names = [name for name, _ in layer.named_parameters()]
    parameters = [p.detach().double() + 0.1 * _noise(g, *p.shape) for p in layer.parameters()]
    common = _noise(g, 1, 1, d)
    x = _COMMON * common + (1 - _COMMON) * _noise(g, b, t, d)

    def call(tokens: Sequence[Tensor], *parameters: Tensor) -> tuple[Tensor, ...]:
        outputs, state = [], None
        for part in tokens:
            y, state = functional_call(layer, dict(zip(names, parameters, strict=True)), (part, state))
            outputs.append(y)
        return (torch.cat(outputs, 1),)

    def reference(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        with use_attention("torch"), use_delta("naive"):
            return call((x,), *parameters)

    def kernel(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        return call(x.split(1, 1), *parameters)

    return _Case(name, "C", kernel, reference, (x, *parameters), has_backward=False)


def _newton_schulz_case() -> _Case:
    g = _generator()
    x = _COMMON * _noise(g, 1, 40, 1) + (1 - _COMMON) * _noise(g, 3, 40, 70)  # columns that share a direction

    def reference(x: Tensor) -> tuple[Tensor, ...]:
        x = x / (x.square().sum((1, 2), keepdim=True).sqrt() + 1e-7)
        for _ in range(newton_schulz.STEPS):
            gram = x @ x.mT
            a, b, c = newton_schulz.COEFFICIENTS
            x = a * x + (b * gram + c * gram @ gram) @ x
        return (x,)

    return _Case("Newton-Schulz, C", "C", lambda x: (newton_schulz.by_kernel(x),), reference, (x,), has_backward=False)
