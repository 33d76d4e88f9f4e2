"""Stability of delta-rule memories: transitions, worst case, lemma and bound, and statistics of a model."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize
from torch.testing import assert_close

from qkflow.cli.probe_tables import memory_section
from qkflow.errors import UsageError
from qkflow.mechanisms.delta_rule import DeltaInputs, DeltaMechanism
from qkflow.models import Decoder, DecoderConfig
from qkflow.models.blocks import Block
from qkflow.ops.delta_rule import delta_rule
from qkflow.probes import (
    MemoryStats,
    coupling_stats,
    delta_rule_stats,
    memory_stats,
    safe_alpha,
    safe_lambda,
    worst_case,
)
from qkflow.probes.memory import (
    error_bound,
    operator_norms,
    product_norms,
    spectral_radii,
    step_distribution,
    step_sizes,
    trace_errors,
    worst_norms,
)

Gates = tuple[Tensor, Tensor, Tensor]
beta_values = st.floats(0, 2)
lam_values = st.one_of(st.floats(0, 1), st.floats(1, 10))


def pairs(shape: tuple[int, ...], seed: int, *, unit: bool = True) -> tuple[Tensor, Tensor]:
    q, k = torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (normalize(q, dim=-1), normalize(k, dim=-1)) if unit else (q, k)


def gates(shape: tuple[int, ...], seed: int) -> Gates:
    beta, decay, lam = torch.rand(3, *shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    return beta, -decay, lam


def without_values(
    q: Tensor, k: Tensor, beta: Tensor, log_alpha: Tensor | None = None, lam: Tensor | None = None
) -> DeltaInputs:
    return DeltaInputs(q, k, k, beta, log_alpha, None if lam is None else k + lam[..., None] * q)


def matrices(q: Tensor, k: Tensor, beta: Tensor, log_alpha: Tensor | None = None, lam: Tensor | None = None) -> Tensor:
    """The transition of each token, written out."""
    x = k if lam is None else k + lam[..., None] * q
    T = torch.eye(k.shape[-1], dtype=k.dtype) - beta[..., None, None] * x[..., :, None] * k[..., None, :]
    return T if log_alpha is None else log_alpha.exp()[..., None, None] * T


@given(width=st.integers(1, 6), seed=st.integers(0, 1000), unit=st.booleans(), decays=st.booleans())
@settings(deadline=None, max_examples=25)
def test_closed_forms_match_the_matrices(width: int, seed: int, unit: bool, decays: bool) -> None:
    q, k = pairs((2, 5, 3, width), seed, unit=unit)
    beta, log_alpha, lam = gates((2, 5, 3), seed)
    arguments = (q, k, 2 * beta, log_alpha if decays else None, 3 * lam)
    T = matrices(*arguments)
    assert_close(operator_norms(without_values(*arguments)), torch.linalg.matrix_norm(T, ord=2), rtol=1e-10, atol=1e-10)
    assert_close(
        spectral_radii(without_values(*arguments)), torch.linalg.eigvals(T).abs().amax(-1), rtol=1e-7, atol=1e-7
    )


@pytest.mark.parametrize("width", [1, 3, 12])  # 12 is more than a window of 4 tokens can span
@pytest.mark.parametrize("window", [1, 2, 4, 9])
def test_product_norms_match_explicit_products(width: int, window: int) -> None:
    q, k = pairs((2, 9, 3, width), 0)
    arguments = (q, k, *gates((2, 9, 3), 0))
    T = matrices(*arguments)
    actual = product_norms(without_values(*arguments), window)
    for number, start in enumerate(range(0, 10 - window, max(1, window // 2))):
        product = torch.eye(width, dtype=torch.float64)
        for i in range(start, start + window):
            product = product @ T[:, i]
        assert_close(actual[:, number], torch.linalg.matrix_norm(product, ord=2))
    assert actual.shape[1] == number + 1


def test_windows_with_nan_have_norm_nan() -> None:
    q, k = pairs((1, 4, 1, 3), 0)
    k[0, 0, 0, 0] = math.nan
    norms = product_norms(without_values(q, k, torch.ones(1, 4, 1, dtype=torch.float64)), 2).flatten()
    assert norms.isfinite().tolist() == [False, True, True]


@given(beta=beta_values, lam=lam_values, decay=st.floats(0, 2), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=25)
def test_no_transition_exceeds_the_worst_norm_of_its_gates(beta: float, lam: float, decay: float, seed: int) -> None:
    q, k = pairs((1, 500, 1, 3), seed)
    shorter = torch.rand(1, 500, 1, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    at = torch.ones(1, 500, 1, dtype=torch.float64)
    gates = beta * at, -decay * at, lam * at
    for length in (1, shorter):
        most = operator_norms(without_values(length * q, length * k, *gates)).max()
        assert most <= worst_norms(*gates)[0, 0, 0] * (1 + 1e-12)


@given(beta=beta_values, lam=st.one_of(lam_values, st.floats(-5, 0)), alpha=st.floats(0.1, 1), width=st.integers(2, 5))
@settings(deadline=None, max_examples=25)
def test_alternating_the_worst_tokens_reaches_the_worst_growth(
    beta: float, lam: float, alpha: float, width: int
) -> None:
    result = worst_case(beta, lam, alpha, width)
    assert_close(result.q.norm(dim=-1), torch.ones(2, dtype=torch.float64))
    assert_close(result.k.norm(dim=-1), torch.ones(2, dtype=torch.float64))
    at = torch.ones(2, dtype=torch.float64)
    first, second = matrices(result.q, result.k, beta * at, math.log(alpha) * at, lam * at)
    grown = float(torch.linalg.eigvals(first @ second).abs().max())
    assert grown == pytest.approx(result.growth**2, rel=1e-6)


def test_memory_can_grow_by_1_98_per_two_tokens_with_the_published_gates() -> None:
    result = worst_case(0.99, 1.0, width=4)
    assert result.growth**2 >= 1.98
    q, k = (x.repeat(20, 1).view(1, 40, 1, 4) for x in (result.q, result.k))
    at = torch.ones(1, 40, 1, dtype=torch.float64)
    start = torch.eye(4, dtype=torch.float64).view(1, 1, 4, 4)
    empty = torch.zeros(1, 40, 1, 4, dtype=torch.float64)
    rule = {"beta": 0.99 * at, "erase": q + k, "state": start}
    _, grown = delta_rule(q, k, empty, **rule, backend="naive")
    assert float(torch.linalg.matrix_norm(grown, ord=2)) == pytest.approx(result.growth**40)
    _, held = delta_rule(q, k, empty, **rule, log_alpha=math.log(safe_alpha(0.99, 1.0)) * at, backend="naive")
    assert float(torch.linalg.matrix_norm(held, ord=2)) == pytest.approx(1)


def test_grid_search_over_token_pairs_does_not_exceed_the_worst_case() -> None:
    angles = torch.arange(24, dtype=torch.float64) * (math.pi / 12)
    turned, q0, q1 = (x.flatten() for x in torch.meshgrid(angles, angles, angles, indexing="ij"))
    k = torch.stack([torch.zeros_like(turned), turned], 1)
    q, k = (torch.stack([x.cos(), x.sin()], -1) for x in (torch.stack([q0, q1], 1), k))
    for beta, lam in [(0.99, 1.0), (0.5, 0.3), (0.7, 0.9), (1.5, 0.5), (1.9, 1.0), (0.3, 5.0)]:
        at = torch.ones(len(q), 2, dtype=torch.float64)
        T = matrices(q, k, beta * at, None, lam * at)
        largest, bound = torch.linalg.eigvals(T[:, 0] @ T[:, 1]).abs().max(), worst_case(beta, lam).growth ** 2
        assert 0.98 * bound < largest < bound * (1 + 1e-9)


@given(beta=beta_values, alpha=st.floats(0.2, 1))
@settings(deadline=None, max_examples=25)
def test_safe_lambda_is_the_largest_without_growth(beta: float, alpha: float) -> None:
    lam = safe_lambda(beta, alpha)
    if math.isinf(lam) or lam > 1e6:
        assert beta < 1e-3
        return
    assert worst_case(beta, lam, alpha).growth == pytest.approx(1, abs=1e-6)
    assert alpha <= safe_alpha(beta, lam) * (1 + 1e-6)


@given(beta=beta_values)
@settings(deadline=None, max_examples=25)
def test_no_growth_without_lambda_and_no_safe_lambda_without_decay(beta: float) -> None:
    assert worst_case(beta, 0.0).growth == safe_alpha(beta, 0.0) == 1
    if beta > 0:
        assert safe_lambda(beta, 1.0) == 0


@pytest.mark.parametrize(
    ("gates", "message"),
    [
        ((2.1, 1.0), "beta must be from 0 to 2, got 2.1"),
        ((math.nan, 1.0), "beta must be"),
        ((1.0, math.inf), "lam must be finite"),
        ((1.0, 1.0, 1.5), "alpha must be from 0 to 1, got 1.5"),
        ((1.0, 1.0, 1.0, 1), "width must be at least 2, got 1"),
    ],
)
def test_invalid_gates_raise(gates: tuple[float, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        worst_case(*gates)  # pyright: ignore[reportArgumentType]


def test_memory_stays_bounded_over_30_000_random_tokens() -> None:
    rows, block, width = 3, 1000, 4
    random = torch.Generator().manual_seed(0)
    state, sizes, read = None, [], []
    for _ in range(30):
        q, k, v = torch.randn(3, rows, block, 1, width, generator=random, dtype=torch.float64)
        beta, lam = torch.rand(2, rows, block, 1, generator=random, dtype=torch.float64)
        q, k, v = (normalize(x, dim=-1) for x in (q, k, v))
        o, state = delta_rule(q, k, v, beta, erase=k + lam[..., None] * q, state=state, backend="chunked")
        sizes.append(float(state.norm(dim=(-2, -1)).max()))
        read.append(float(o.norm(dim=-1).max()))
    assert max(sizes) < 10
    assert max(read) < 10
    assert max(sizes[15:]) < 2 * max(sizes[:15])


HYBRID = ("standard", "deltanet", "gated-deltanet", "qdelta+hamiltonian:dt=0.2")
TOKENS = [72, 101, 108, 108, 111, 256, 10, 72, 101, 108]


def inputs(
    seed: int, *, t: int = 20, decays: bool = True, mixes: bool = True, width: int = 4, vector: bool = False
) -> DeltaInputs:
    random = torch.Generator().manual_seed(seed)
    q, k = normalize(torch.randn(2, 2, t, 3, width, generator=random, dtype=torch.float64), dim=-1)
    v = torch.randn(2, t, 3, 5, generator=random, dtype=torch.float64)
    beta, decay, lam = torch.rand(3, 2, t, 3, generator=random, dtype=torch.float64)
    decay = torch.rand(k.shape, generator=random, dtype=torch.float64) if vector else decay
    return DeltaInputs(q, k, v, beta, -decay if decays else None, k + lam[..., None] * q if mixes else None)


def alternating(t: int, beta: float, lam: float) -> DeltaInputs:
    """One row and head that alternates the two worst tokens."""
    result = worst_case(beta, lam, width=4)
    q, k = (x.repeat(t // 2, 1).view(1, t, 1, 4) for x in (result.q, result.k))
    at = torch.ones(1, t, 1, dtype=torch.float64)
    return DeltaInputs(q, k, torch.ones_like(q), beta * at, None, k + lam * q)


def model(mechanism: str | tuple[str, ...] = HYBRID, *, dropout: float = 0.0) -> Decoder:
    layers = len(mechanism) if isinstance(mechanism, tuple) else 1
    decoder = Decoder(DecoderConfig(width=32, layers=layers, heads=2, hidden=48, mechanism=mechanism, dropout=dropout))
    for parameter in decoder.parameters():  # blocks are zero at initialization
        torch.nn.init.normal_(parameter, std=0.2)
    return decoder


def verdict(layers: list[MemoryStats | None]) -> str:
    return memory_section(layers).verdict


@given(seed=st.integers(0, 10_000), decays=st.booleans(), mixes=st.booleans(), vector=st.booleans())
@settings(deadline=None, max_examples=25)
def test_errors_contract_by_one_minus_beta_a(seed: int, decays: bool, mixes: bool, vector: bool) -> None:
    delta = inputs(seed, decays=decays, mixes=mixes, vector=vector)
    run = trace_errors(delta)
    factor = 1 - step_sizes(delta)
    assert_close(run.after, factor[..., None] * run.before, rtol=0, atol=1e-12)
    assert delta_rule_stats(delta).deviation <= 1e-12


@given(seed=st.integers(0, 10_000), decays=st.booleans(), mixes=st.booleans(), t=st.integers(1, 30))
@settings(deadline=None, max_examples=25)
def test_error_bound_holds_with_and_without_decay(seed: int, decays: bool, mixes: bool, t: int) -> None:
    delta = inputs(seed, t=t, decays=decays, mixes=mixes)
    run = trace_errors(delta)
    bound = error_bound(run, (1 - step_sizes(delta)).abs())
    assert (run.after.norm(dim=-1) <= bound * (1 + 1e-12)).all()
    stats = delta_rule_stats(delta)
    assert stats.slack >= 1 - 1e-12
    assert_close(stats.bound, tuple(bound.mean((0, 2)).tolist()))


def test_error_bound_matches_the_published_formula() -> None:
    delta = inputs(0, decays=False)
    run, factors = trace_errors(delta), (1 - step_sizes(delta)).abs()
    rho = factors[:, 1:].amax(1)
    memory = torch.zeros(2, 3, 5, 4, dtype=torch.float64)
    x, moved = delta.erase, []
    assert x is not None
    for i in range(20):
        if i:  # the change of the value, and of the direction seen by the previous memory
            turned = (memory @ (x[:, i] - x[:, i - 1])[..., None]).squeeze(-1)
            moved.append((delta.v[:, i] - delta.v[:, i - 1] - turned).norm(dim=-1))
        memory = memory + (delta.beta[:, i, :, None] * run.before[:, i])[..., None] * delta.k[:, i, :, None]
    r = torch.stack(moved, 1).amax(1)
    for t, actual in enumerate(error_bound(run, factors).unbind(1)):
        start = run.after[:, 0].norm(dim=-1)
        assert_close(actual, rho**t * start + (1 - rho**t) / (1 - rho) * rho * r, rtol=1e-10, atol=1e-10)


def test_error_bound_is_tight_for_repeated_tokens() -> None:
    k, v = torch.tensor([1.0, 0.0]).expand(1, 6, 1, 2).double(), torch.ones(1, 6, 1, 1, dtype=torch.float64)
    stats = delta_rule_stats(DeltaInputs(k, k, v, torch.full((1, 6, 1), 0.5), None, None))
    assert stats.error == stats.bound == tuple(0.5**i for i in range(1, 7))
    assert (stats.rho, stats.slack, stats.norm, stats.allowed) == (0.5, 1, 1, 1)


def test_slack_is_infinite_when_errors_are_zero() -> None:
    k, one = torch.full((1, 3, 1, 4), 0.5), torch.ones(1, 3, 1)
    assert delta_rule_stats(DeltaInputs(k, k, one.unsqueeze(-1), one, None, None)).slack == math.inf


def test_memory_norm_and_errors_match_the_delta_rule() -> None:
    delta = inputs(3)
    run = trace_errors(delta)
    for t in (1, 7, 20):
        _, state = delta_rule(*(x[:, :t] for x in delta), backend="naive")  # pyright: ignore
        assert_close(run.memory[:, t - 1], state.norm(dim=(-2, -1)))
    assert delta.erase is not None
    assert_close(run.after[:, -1], delta.v[:, -1] - torch.einsum("nhvk,nhk->nhv", state, delta.erase[:, -1]))


def test_step_distribution_counts_steps_outside_0_and_2() -> None:
    actual = step_distribution(torch.tensor([[-0.5, 0.0, 0.5, 1.0, 1.5], [2.0, 1.9, 0.1, 0.2, 3.0]]))
    assert actual.outside == 0.4
    assert (actual.min, actual.max, actual.mean) == (-0.5, 3.0, pytest.approx(0.97))
    assert actual.quantiles[2] == pytest.approx(0.75)
    assert len(actual.quantiles) == 5


def test_products_can_grow_although_no_eigenvalue_exceeds_one() -> None:
    stats = delta_rule_stats(alternating(64, 0.99, 1.0))
    assert stats.radius <= 1 + 1e-12  # every eigenvalue of every transition
    assert stats.steps.outside == 0
    assert [each.tokens for each in stats.growth] == [2, 8, 64]
    assert [each.max for each in stats.growth] == pytest.approx([1.980198**1, 1.980198**4, 1.980198**32], rel=1e-4)
    assert stats.allowed == pytest.approx(1.980198**0.5)
    assert stats.memory[-1] > 1e8
    assert "products of transitions grow in 1 of them, up to a factor of 3.12e+09 over 64 tokens" in verdict(
        [None, stats]
    )
    assert "grows by a factor of 1.41 per token" in verdict([None, stats])


def test_products_do_not_grow_without_lambda() -> None:
    stats = delta_rule_stats(inputs(1, t=64, mixes=False, decays=False))
    assert all(each.max <= 1 + 1e-12 for each in stats.growth)
    assert verdict([stats]).startswith("On this text every token's error shrinks in all of 1 delta layer")
    assert "no product of transitions grows" in verdict([stats])
    assert "no queries and keys" in verdict([stats])


def test_allowed_growth_depends_on_gates_only() -> None:
    delta = inputs(1, decays=False)
    assert delta.erase is not None
    turned = delta._replace(erase=2 * delta.k - delta.erase)  # lambda keeps its size and changes its sign
    assert delta_rule_stats(delta).allowed == pytest.approx(delta_rule_stats(turned).allowed)
    assert delta_rule_stats(delta).norm != delta_rule_stats(turned).norm


def test_verdict_reports_growth_over_short_and_long_windows() -> None:
    delta = alternating(8, 0.99, 1.0)
    fading = delta._replace(log_alpha=torch.tensor([0.0] * 2 + [-1.0] * 6, dtype=torch.float64).view(1, 8, 1))
    two, eight = delta_rule_stats(fading).growth
    assert two.max > 1 > eight.max
    assert f"up to a factor of {two.max:.3g} over 2 tokens and {eight.max:.3g} over 8." in verdict(
        [delta_rule_stats(fading)]
    )


def test_verdict_counts_steps_outside_0_and_2() -> None:
    delta = inputs(1)
    verdict_text = verdict([delta_rule_stats(delta._replace(k=2 * delta.k)), delta_rule_stats(delta)])
    assert "% of the steps beta a are outside (0, 2), in 1 of 2 delta layers" in verdict_text


def test_verdict_reports_values_that_are_not_finite() -> None:
    delta = inputs(1)
    delta.v[0, 0, 0, 0] = math.nan
    assert "not finite" in verdict([delta_rule_stats(delta)])
    delta.k[0, 0, 0, 0] = math.inf
    assert "not finite" in verdict([delta_rule_stats(delta)])


def test_stats_use_the_inputs_of_each_layer() -> None:
    decoder = model()
    x = decoder.embedding(torch.tensor([TOKENS]))
    for block, actual in zip(decoder.blocks, memory_stats(decoder, TOKENS), strict=True):
        assert isinstance(block, Block)
        if isinstance(block.mechanism, DeltaMechanism):
            delta = block.mechanism.inputs(block.mechanism_norm(x))
            assert actual is not None
            assert actual.steps.mean == pytest.approx(step_sizes(delta).mean().item())
        else:
            assert actual is None
        x = block(x)[0]


def test_hybrid_stacks_have_stats_per_layer() -> None:
    standard, delta, gated, mixed = memory_stats(model(), TOKENS)
    assert standard is None
    assert delta is not None
    assert gated is not None
    assert mixed is not None
    assert delta.allowed == 1
    assert gated.allowed < 1
    assert mixed.norm >= mixed.radius
    assert [each.tokens for each in mixed.growth] == [2, 8]
    assert len(mixed.heads) == len(mixed.growth[0].heads) == 2
    assert len(mixed.error) == len(mixed.bound) == len(mixed.memory) == len(TOKENS)
    assert all(layer.deviation < 1e-12 for layer in (delta, gated, mixed))


def test_transitions_with_a_decay_per_channel_match_the_matrices() -> None:
    delta = inputs(4, t=9, vector=True)
    assert delta.log_alpha is not None
    assert delta.erase is not None
    rank_one = delta.beta[..., None, None] * delta.erase[..., :, None] * delta.k[..., None, :]
    T = torch.diag_embed(delta.log_alpha.exp()) @ (torch.eye(4, dtype=torch.float64) - rank_one)
    assert_close(operator_norms(delta), torch.linalg.matrix_norm(T, ord=2), rtol=1e-12, atol=1e-12)
    assert_close(spectral_radii(delta), torch.linalg.eigvals(T).abs().amax(-1), rtol=1e-12, atol=1e-12)
    pair = torch.linalg.matrix_norm(T[:, :-1] @ T[:, 1:], ord=2)
    assert_close(product_norms(delta, 2), pair, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mechanism", ["kda", "eda", "comba", "qdelta:erase=own"])
def test_every_delta_rule_mechanism_has_stats(mechanism: str) -> None:
    decoder = model(mechanism)
    (stats,) = memory_stats(decoder, TOKENS)
    assert stats is not None
    assert stats.deviation < 1e-12
    assert stats.norm >= stats.radius - 1e-12
    assert len(stats.error) == len(TOKENS) * decoder.blocks[0].mechanism.steps
    assert stats.growth[0].max <= stats.norm**2 * (1 + 1e-12)
    assert verdict([stats]).count(".") >= 1


def test_delta_layers_have_coupling_stats() -> None:
    *others, mixed = coupling_stats(model(), TOKENS)
    assert others == [None] * 3
    assert mixed is not None
    assert mixed.dynamics == "hamiltonian"
    assert mixed.strength.query_on_key > 0


def test_probing_leaves_the_model_unchanged() -> None:
    decoder = model(dropout=0.5).train()
    before = {name: value.clone() for name, value in decoder.state_dict().items()}
    state = torch.get_rng_state()
    assert memory_stats(decoder, TOKENS) == memory_stats(decoder, torch.tensor(TOKENS))  # no dropout
    assert decoder.training
    assert torch.equal(torch.get_rng_state(), state)
    assert_close(dict(decoder.state_dict()), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in decoder.parameters())


@pytest.mark.parametrize("tokens", [[], [257]])
def test_invalid_tokens_raise(tokens: list[int]) -> None:
    with pytest.raises(UsageError, match="one token from 0 to 256"):
        memory_stats(model("qdelta"), tokens)


def test_stats_of_a_single_token() -> None:
    (stats,) = memory_stats(model("qdelta"), [1])
    assert stats is not None
    assert stats.growth == ()
    assert stats.error == stats.bound
    assert verdict([stats]).count(".") >= 2
