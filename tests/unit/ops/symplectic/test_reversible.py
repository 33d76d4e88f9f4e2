"""The reversible form equals the naive one in values and gradients, and its memory does not grow with the steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from qkflow.ops.csrc import build
from qkflow.ops.symplectic import cpu
from qkflow.ops.symplectic.naive import Integrator, drift_coefficients, drift_kick, linear
from qkflow.ops.symplectic.reversible import Activation, drift_kick_reversible

NAMES = ("q", "k", "dt", "w1", "b1", "w2", "b2")
INTEGRATORS: tuple[Integrator, ...] = ("symplectic-euler", "leapfrog")
ACTIVATIONS: tuple[Activation, ...] = ("silu", "sigmoid")
Coefficients = tuple[float, ...]
Rule = Callable[[Sequence[Tensor], Coefficients, Activation], tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True, params=["torch", "native"])
def side(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run every test with and without the C kernels."""
    if request.param == "torch":
        monkeypatch.setattr(build, "is_loaded", lambda: False)
    elif build.load_error() is not None:
        pytest.skip(str(build.load_error()))
    return request.param


def inputs(*rows: int, width: int = 4, hidden: int = 6, seed: int = 0, rho: float = 0.0) -> list[Tensor]:
    """q, k, dt, w1, b1, w2, b2; with `rho`, queries and keys have a common direction."""
    g = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    common = noise(width)
    q, k = (rho * common + (1 - rho) * noise(*rows, width) for _ in range(2))
    dt = 0.1 + 0.05 * noise()
    weights = noise(hidden, width) / width**0.5, noise(hidden), noise(width, hidden) / hidden**0.5, noise(width)
    return [x.requires_grad_() for x in (q, k, dt, *weights)]


def plain(args: Sequence[Tensor], coefficients: Coefficients, activation: Activation) -> tuple[Tensor, Tensor]:
    q, k, dt, w1, b1, w2, b2 = args
    act = torch.nn.functional.silu if activation == "silu" else torch.sigmoid
    return drift_kick(q, k, lambda q: linear(act(linear(q, w1, b1)), w2, b2), dt, coefficients)


def fast(args: Sequence[Tensor], coefficients: Coefficients, activation: Activation) -> tuple[Tensor, Tensor]:
    q, k, dt, *force = args
    return drift_kick_reversible(q, k, (force[0], force[1], force[2], force[3]), dt, coefficients, activation)


def cut(integrator: Integrator, steps: int, folded: bool) -> Coefficients:
    """The drift coefficients; a folded first drift is 0."""
    coefficients = drift_coefficients(integrator, steps)
    return (0.0, *coefficients[1:]) if folded else coefficients


def gradients(form: Rule, args: list[Tensor], coefficients: Coefficients, activation: Activation) -> tuple[Tensor, ...]:
    outputs = form(args, coefficients, activation)
    g = torch.Generator().manual_seed(99)
    weights = [torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype) for x in outputs]
    return torch.autograd.grad(outputs, args, weights)


def agree(actual: Sequence[Tensor], expected: Sequence[Tensor], *, within: float = 1e-12) -> None:
    for name, a, b in zip(NAMES, actual, expected, strict=False):
        scale = max(1.0, float(b.detach().abs().max()))
        assert_close(a, b, rtol=0, atol=within * scale, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("integrator", INTEGRATORS)
@given(
    steps=st.integers(1, 7),
    n=st.sampled_from([1, 2, 9, 33, 130]),
    widths=st.sampled_from([(1, 1), (3, 5), (4, 6), (16, 16), (17, 33)]),
    seed=st.integers(0, 10**6),
    rho=st.sampled_from([0, 0.95]),
)
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_values_and_gradients_match_the_naive_form(
    integrator: Integrator,
    activation: Activation,
    folded: bool,
    steps: int,
    n: int,
    widths: tuple[int, int],
    seed: int,
    rho: float,
) -> None:
    args, coefficients = (
        inputs(n, width=widths[0], hidden=widths[1], seed=seed, rho=rho),
        cut(integrator, steps, folded),
    )
    agree(fast(args, coefficients, activation), plain(args, coefficients, activation))
    agree(gradients(fast, args, coefficients, activation), gradients(plain, args, coefficients, activation))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_and_non_finite_values_stay_in_their_row(activation: Activation) -> None:
    args, coefficients = inputs(40), cut("leapfrog", 2, False)
    with torch.no_grad():
        args[0][3], args[0][5], args[1][7] = 1e5, -1e5, torch.nan
    actual, expected = fast(args, coefficients, activation), plain(args, coefficients, activation)
    finite = torch.arange(40) != 7
    for a, b in zip(actual, expected, strict=True):
        assert_close(a[finite], b[finite], rtol=1e-12, atol=1e-12)
        assert a[7].isnan().all()
    args = inputs(40)
    with torch.no_grad():
        args[0][3], args[0][5] = 1e5, -1e5
    agree(gradients(fast, args, coefficients, activation), gradients(plain, args, coefficients, activation))


@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_unused_outputs_give_no_gradient(output: int, activation: Activation) -> None:
    for integrator, steps, folded in product(INTEGRATORS, (1, 2, 5), (False, True)):
        args, coefficients = inputs(5), cut(integrator, steps, folded)
        actual, expected = (
            torch.autograd.grad(form(args, coefficients, activation)[output].square().sum(), args, allow_unused=True)
            for form in (fast, plain)
        )
        zero = [torch.zeros_like(x) for x in args]
        agree(*([z if x is None else x for x, z in zip(grads, zero, strict=True)] for grads in (actual, expected)))


@pytest.mark.parametrize("integrator", INTEGRATORS)
def test_non_contiguous_inputs(integrator: Integrator) -> None:
    coefficients = cut(integrator, 3, False)
    strided = []
    for x in inputs(6):
        y = torch.stack([x.detach(), x.detach()], -1)[..., 0]
        strided.append((y.mT.contiguous().mT if y.ndim == 2 else y).requires_grad_())
    assert not strided[0].is_contiguous()
    agree(fast(strided, coefficients, "silu"), plain(inputs(6), coefficients, "silu"))
    agree(gradients(fast, strided, coefficients, "silu"), gradients(plain, inputs(6), coefficients, "silu"))
    outputs = fast(inputs(6), coefficients, "silu")
    one = torch.ones((), dtype=torch.float64)
    args = inputs(6)
    expanded = torch.autograd.grad(fast(args, coefficients, "silu"), args, [one.expand(x.shape) for x in outputs])
    agree(expanded, torch.autograd.grad(plain(args, coefficients, "silu"), args, [torch.ones_like(x) for x in outputs]))


@pytest.mark.parametrize("folded", [False, True])
def test_leading_dimensions_are_rows(folded: bool) -> None:
    args, coefficients = inputs(2, 5, 3), cut("symplectic-euler", 2, folded)
    agree(fast(args, coefficients, "silu"), plain(args, coefficients, "silu"))
    agree(gradients(fast, args, coefficients, "silu"), gradients(plain, args, coefficients, "silu"))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("integrator", INTEGRATORS)
def test_values_are_the_same_without_grad(integrator: Integrator, activation: Activation) -> None:
    for steps, folded in product((1, 4), (False, True)):
        args, coefficients = inputs(5), cut(integrator, steps, folded)
        expected = fast(args, coefficients, activation)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                agree(fast(args, coefficients, activation), expected, within=1e-14)


@pytest.mark.parametrize("folded", [False, True])
def test_inputs_outputs_and_gradients_are_not_modified(folded: bool) -> None:
    for integrator, steps in product(INTEGRATORS, (1, 3)):
        args, coefficients = inputs(5), cut(integrator, steps, folded)
        outputs = fast(args, coefficients, "silu")
        incoming = [torch.randn_like(x) for x in outputs]
        watched = [*args, *outputs, *incoming]
        before = [x.detach().clone() for x in watched]
        first = torch.autograd.grad(outputs, args, incoming, retain_graph=True)
        second = torch.autograd.grad(outputs, args, incoming)
        for a, b in zip((*watched, *first), (*before, *second), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_each_input_alone_can_require_grad(name: str) -> None:
    for steps, folded in product((1, 3), (False, True)):
        args, coefficients = inputs(5), cut("leapfrog", steps, folded)
        at = NAMES.index(name)
        expected = gradients(plain, args, coefficients, "silu")[at]
        frozen = [x.detach().requires_grad_(i == at) for i, x in enumerate(args)]
        outputs = fast(frozen, coefficients, "silu")
        g = torch.Generator().manual_seed(99)
        weights = [torch.randn(x.shape, generator=g, dtype=x.dtype) for x in outputs]
        used = [(x, w) for x, w in zip(outputs, weights, strict=True) if x.requires_grad]
        (actual,) = torch.autograd.grad([x for x, _ in used], frozen[at], [w for _, w in used])
        assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("integrator", INTEGRATORS)
@pytest.mark.parametrize(("steps", "folded"), [(1, False), (1, True), (3, False), (3, True)])
def test_first_and_second_derivatives_match_finite_differences(
    integrator: Integrator, activation: Activation, steps: int, folded: bool
) -> None:
    args, coefficients = inputs(2, width=2, hidden=3), cut(integrator, steps, folded)

    def form(*args: Tensor) -> tuple[Tensor, Tensor]:
        return fast(args, coefficients, activation)

    assert torch.autograd.gradcheck(form, args)
    assert torch.autograd.gradgradcheck(form, args)


@pytest.mark.parametrize(("size", "within"), [(1.0, 1e-5), (3.0, 1e-4), (10.0, 1e-2)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("integrator", INTEGRATORS)
def test_float32_reverses_seven_steps_accurately(
    integrator: Integrator, activation: Activation, size: float, within: float
) -> None:
    """`size` multiplies both matrices. With large ones the values grow, and reversing the steps loses precision.

    The gradient of dt is a sum whose terms cancel, so its tolerance is ten times as large.
    """
    coefficients, worst = cut(integrator, 7, False), dict.fromkeys(NAMES, 0.0)
    for seed in range(5):
        args = inputs(64, width=32, hidden=32, seed=seed)
        with torch.no_grad():
            args[2].fill_(0.1)
            args[3].mul_(size)
            args[5].mul_(size)
        single = [x.detach().float().requires_grad_() for x in args]
        exact = gradients(plain, [x.detach().double().requires_grad_() for x in single], coefficients, activation)
        for name, a, b in zip(NAMES, gradients(fast, single, coefficients, activation), exact, strict=True):
            worst[name] = max(worst[name], float((a - b).norm() / b.norm()))
    for name, error in worst.items():
        assert error < (10 * within if name == "dt" else within), name


@contextmanager
def saved_for_backward() -> Iterator[dict[int, int]]:
    """The bytes of each storage saved for backward, by its address."""
    saved_bytes: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        alive.append(x)
        saved_bytes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield saved_bytes


@pytest.mark.parametrize("integrator", INTEGRATORS)
def test_memory_does_not_grow_with_the_steps(integrator: Integrator) -> None:
    n, width, hidden = 100, 8, 12
    args = [x.detach().requires_grad_() for x in inputs(n, width=width, hidden=hidden)]
    weights = sum(x.numel() for x in args[2:])
    for steps in range(1, 8):
        with saved_for_backward() as saved_bytes:
            outputs = fast(args, cut(integrator, steps, False), "silu")
        assert sum(saved_bytes.values()) <= 8 * (2 * n * width + weights), (
            f"{steps} steps keep more than the last (q, k)"
        )
        with saved_for_backward() as more_saved_bytes:
            outputs = plain(args, cut(integrator, steps, False), "silu")
        assert sum(more_saved_bytes.values()) > 8 * steps * n * hidden
    del outputs


def test_without_a_drift_only_the_query_is_saved() -> None:
    n, width, hidden = 100, 8, 12
    args = [x.detach().requires_grad_() for x in inputs(n, width=width, hidden=hidden)]
    with saved_for_backward() as saved_bytes:
        outputs = fast(args, (0.0, 0.0), "silu")
    assert sum(saved_bytes.values()) <= 8 * (n * width + sum(x.numel() for x in args[2:]))
    del outputs


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_are_deterministic_per_thread_count(dtype: torch.dtype) -> None:
    if error := build.load_error():
        pytest.skip(error)
    n, width, hidden = 1001, 24, 20
    q, k, gq, gk = (torch.randn(n, width, dtype=dtype) for _ in range(4))
    inner, outer = torch.randn(hidden, width, dtype=dtype) / 5, torch.randn(width, hidden, dtype=dtype) / 5
    force = (inner, torch.randn(hidden, dtype=dtype), outer, torch.randn(width, dtype=dtype))
    dt, coefficients = torch.tensor(0.1, dtype=dtype), drift_coefficients("leapfrog", 3)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 2, 3):
            torch.set_num_threads(threads)
            moved = cpu.forward(q, k, dt, force, coefficients, "silu")
            results.append((*moved, *cpu.backward(*moved, gq, gk, dt, force, coefficients, "silu")))
    finally:
        torch.set_num_threads(before)
    one, two, again, three = results
    assert all(torch.equal(a, b) for a, b in zip(two, again, strict=True))
    tolerance = 1e-4 if dtype == torch.float32 else 1e-12
    for a, b, c in zip(one, two, three, strict=True):
        assert_close(a, b, rtol=tolerance, atol=tolerance)
        assert_close(a, c, rtol=tolerance, atol=tolerance)
