"""Transitions of a delta memory: closed forms against matrices, products, and the worst that can happen."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize
from torch.testing import assert_close

from qkflow.errors import UsageError
from qkflow.ops.delta_rule import delta_rule
from qkflow.probes import safe_alpha, safe_lambda, worst_case
from qkflow.probes.transitions import operator_norms, product_norms, spectral_radii, worst_norms

Gates = tuple[Tensor, Tensor, Tensor]
beta_values = st.floats(0, 2)
lam_values = st.one_of(st.floats(0, 1), st.floats(1, 10))


def pairs(shape: tuple[int, ...], seed: int, *, unit: bool = True) -> tuple[Tensor, Tensor]:
    q, k = torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (normalize(q, dim=-1), normalize(k, dim=-1)) if unit else (q, k)


def gates(shape: tuple[int, ...], seed: int) -> Gates:
    beta, decay, lam = torch.rand(3, *shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    return beta, -decay, lam


def matrices(q: Tensor, k: Tensor, beta: Tensor, log_alpha: Tensor | None = None, lam: Tensor | None = None) -> Tensor:
    """Every token's transition, written out."""
    x = k if lam is None else k + lam[..., None] * q
    T = torch.eye(k.shape[-1], dtype=k.dtype) - beta[..., None, None] * x[..., :, None] * k[..., None, :]
    return T if log_alpha is None else log_alpha.exp()[..., None, None] * T


@given(width=st.integers(1, 6), seed=st.integers(0, 1000), unit=st.booleans(), decays=st.booleans())
@settings(deadline=None, max_examples=25)
def test_the_closed_forms_are_what_the_matrices_have(width: int, seed: int, unit: bool, decays: bool) -> None:
    q, k = pairs((2, 5, 3, width), seed, unit=unit)
    beta, log_alpha, lam = gates((2, 5, 3), seed)
    given = (q, k, 2 * beta, log_alpha if decays else None, 3 * lam)
    T = matrices(*given)
    assert_close(operator_norms(*given), torch.linalg.matrix_norm(T, ord=2), rtol=1e-10, atol=1e-10)
    assert_close(spectral_radii(*given), torch.linalg.eigvals(T).abs().amax(-1), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("width", [1, 3, 12])  # 12 is more than a window of 4 tokens can span
@pytest.mark.parametrize("window", [1, 2, 4, 9])
def test_a_products_norm_is_that_of_the_matrices_multiplied_in_the_texts_order(width: int, window: int) -> None:
    q, k = pairs((2, 9, 3, width), 0)
    given = (q, k, *gates((2, 9, 3), 0))
    T = matrices(*given)
    got = product_norms(*given, window=window)
    for number, start in enumerate(range(0, 10 - window, max(1, window // 2))):
        product = torch.eye(width, dtype=torch.float64)
        for i in range(start, start + window):
            product = product @ T[:, i]
        assert_close(got[:, number], torch.linalg.matrix_norm(product, ord=2))
    assert got.shape[1] == number + 1


@pytest.mark.parametrize("window", [0, 6])
def test_a_window_longer_than_the_text_is_refused(window: int) -> None:
    q, k = pairs((1, 5, 1, 3), 0)
    with pytest.raises(UsageError, match=f"1 to the text's 5 tokens, got {window}"):
        product_norms(q, k, torch.ones(1, 5, 1), window=window)


def test_what_is_not_finite_stays_so() -> None:
    q, k = pairs((1, 4, 1, 3), 0)
    k[0, 0, 0, 0] = math.nan
    norms = product_norms(q, k, torch.ones(1, 4, 1, dtype=torch.float64), window=2).flatten()
    assert norms.isfinite().tolist() == [False, True, True]


@given(beta=beta_values, lam=lam_values, decay=st.floats(0, 2), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=25)
def test_no_transition_exceeds_the_worst_of_its_gates(beta: float, lam: float, decay: float, seed: int) -> None:
    q, k = pairs((1, 500, 1, 3), seed)
    shorter = torch.rand(1, 500, 1, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    at = torch.ones(1, 500, 1, dtype=torch.float64)
    gates = beta * at, -decay * at, lam * at
    for length in (1, shorter):
        most = operator_norms(length * q, length * k, *gates).max()
        assert most <= worst_norms(*gates)[0, 0, 0] * (1 + 1e-12)


@given(beta=beta_values, lam=st.one_of(lam_values, st.floats(-5, 0)), alpha=st.floats(0.1, 1), width=st.integers(2, 5))
@settings(deadline=None, max_examples=25)
def test_alternating_the_two_worst_tokens_grows_as_said(beta: float, lam: float, alpha: float, width: int) -> None:
    found = worst_case(beta, lam, alpha, width)
    assert_close(found.q.norm(dim=-1), torch.ones(2, dtype=torch.float64))
    assert_close(found.k.norm(dim=-1), torch.ones(2, dtype=torch.float64))
    at = torch.ones(2, dtype=torch.float64)
    first, second = matrices(found.q, found.k, beta * at, math.log(alpha) * at, lam * at)
    grown = float(torch.linalg.eigvals(first @ second).abs().max())
    assert grown == pytest.approx(found.growth**2, rel=1e-6)


def test_the_published_gates_let_a_memory_grow_1_98_times_every_two_tokens() -> None:
    found = worst_case(0.99, 1.0, width=4)
    assert found.growth**2 >= 1.98
    q, k = (x.repeat(20, 1).view(1, 40, 1, 4) for x in (found.q, found.k))
    at = torch.ones(1, 40, 1, dtype=torch.float64)
    start = torch.eye(4, dtype=torch.float64).view(1, 1, 4, 4)
    empty = torch.zeros(1, 40, 1, 4, dtype=torch.float64)
    rule = {"beta": 0.99 * at, "lam": at, "state": start}
    _, grown = delta_rule(q, k, empty, **rule, backend="naive")
    assert float(torch.linalg.matrix_norm(grown, ord=2)) == pytest.approx(found.growth**40)
    _, held = delta_rule(q, k, empty, **rule, log_alpha=math.log(safe_alpha(0.99, 1.0)) * at, backend="naive")
    assert float(torch.linalg.matrix_norm(held, ord=2)) == pytest.approx(1)


def test_a_search_over_alternating_pairs_finds_nothing_worse() -> None:
    angles = torch.arange(24, dtype=torch.float64) * (math.pi / 12)
    turned, q0, q1 = (x.flatten() for x in torch.meshgrid(angles, angles, angles, indexing="ij"))
    k = torch.stack([torch.zeros_like(turned), turned], 1)
    q, k = (torch.stack([x.cos(), x.sin()], -1) for x in (torch.stack([q0, q1], 1), k))
    for beta, lam in [(0.99, 1.0), (0.5, 0.3), (0.7, 0.9), (1.5, 0.5), (1.9, 1.0), (0.3, 5.0)]:
        at = torch.ones(len(q), 2, dtype=torch.float64)
        T = matrices(q, k, beta * at, None, lam * at)
        found, said = torch.linalg.eigvals(T[:, 0] @ T[:, 1]).abs().max(), worst_case(beta, lam).growth ** 2
        assert 0.98 * said < found < said * (1 + 1e-9)


@given(beta=beta_values, alpha=st.floats(0.2, 1))
@settings(deadline=None, max_examples=25)
def test_a_safe_lambda_is_the_largest_that_does_not_grow(beta: float, alpha: float) -> None:
    lam = safe_lambda(beta, alpha)
    if math.isinf(lam) or lam > 1e6:
        assert beta < 1e-3
        return
    assert worst_case(beta, lam, alpha).growth == pytest.approx(1, abs=1e-6)
    assert alpha <= safe_alpha(beta, lam) * (1 + 1e-6)


@given(beta=beta_values)
@settings(deadline=None, max_examples=25)
def test_without_lambda_nothing_grows_and_without_decay_no_lambda_is_safe(beta: float) -> None:
    assert worst_case(beta, 0.0).growth == safe_alpha(beta, 0.0) == 1
    if beta > 0:
        assert safe_lambda(beta, 1.0) == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((2.1, 1.0), "beta must be from 0 to 2, got 2.1"),
        ((math.nan, 1.0), "beta must be"),
        ((1.0, math.inf), "lam must be finite"),
        ((1.0, 1.0, 1.5), "alpha must be from 0 to 1, got 1.5"),
        ((1.0, 1.0, 1.0, 1), "width 2 or more, got 1"),
    ],
)
def test_gates_that_are_none_are_refused(given: tuple[float, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        worst_case(*given)  # pyright: ignore[reportArgumentType]


def test_memories_stay_bounded_over_100_000_random_tokens() -> None:
    rows, block, width = 3, 1000, 4
    random = torch.Generator().manual_seed(0)
    state, sizes, read = None, [], []
    for _ in range(100):
        q, k, v = torch.randn(3, rows, block, 1, width, generator=random, dtype=torch.float64)
        beta, lam = torch.rand(2, rows, block, 1, generator=random, dtype=torch.float64)
        q, k, v = (normalize(x, dim=-1) for x in (q, k, v))
        o, state = delta_rule(q, k, v, beta, lam=lam, state=state, backend="chunked")
        sizes.append(float(state.norm(dim=(-2, -1)).max()))
        read.append(float(o.norm(dim=-1).max()))
    assert max(sizes) < 10
    assert max(read) < 10
    assert max(sizes[50:]) < 2 * max(sizes[:50])
