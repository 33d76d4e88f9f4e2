"""Looking at delta memories: the lemma, the theorem's bound, and what a model's layers show."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize
from torch.testing import assert_close

from qkflow.cli.probe_stability import verdict
from qkflow.errors import UsageError
from qkflow.mechanisms.delta import DeltaInputs, DeltaMechanism
from qkflow.models import Decoder, DecoderConfig
from qkflow.models.blocks import Block
from qkflow.ops.delta_rule import delta_rule
from qkflow.probes import energies, stability, stability_of, worst_case
from qkflow.probes.stability import spread, track, tracking_bound
from qkflow.probes.transitions import step_sizes

HYBRID = ("standard", "deltanet", "gated-deltanet", "qdelta+hamiltonian:dt=0.2")
TOKENS = [72, 101, 108, 108, 111, 256, 10, 72, 101, 108]


def inputs(seed: int, *, t: int = 20, decays: bool = True, mixes: bool = True, width: int = 4) -> DeltaInputs:
    random = torch.Generator().manual_seed(seed)
    q, k = normalize(torch.randn(2, 2, t, 3, width, generator=random, dtype=torch.float64), dim=-1)
    v = torch.randn(2, t, 3, 5, generator=random, dtype=torch.float64)
    beta, decay, lam = torch.rand(3, 2, t, 3, generator=random, dtype=torch.float64)
    return DeltaInputs(q, k, v, beta, -decay if decays else None, lam if mixes else None)


def alternating(t: int, beta: float, lam: float) -> DeltaInputs:
    """One row and head that reads the worst two tokens in turn."""
    found = worst_case(beta, lam, width=4)
    q, k = (x.repeat(t // 2, 1).view(1, t, 1, 4) for x in (found.q, found.k))
    at = torch.ones(1, t, 1, dtype=torch.float64)
    return DeltaInputs(q, k, torch.ones_like(q), beta * at, None, lam * at)


def model(mechanism: str | tuple[str, ...] = HYBRID, *, dropout: float = 0.0) -> Decoder:
    layers = len(mechanism) if isinstance(mechanism, tuple) else 1
    made = Decoder(DecoderConfig(width=32, layers=layers, heads=2, hidden=48, mechanism=mechanism, dropout=dropout))
    for parameter in made.parameters():  # blocks begin at zero: let every layer matter
        torch.nn.init.normal_(parameter, std=0.2)
    return made


@given(seed=st.integers(0, 10_000), decays=st.booleans(), mixes=st.booleans())
@settings(deadline=None, max_examples=25)
def test_an_error_contracts_by_one_minus_beta_a(seed: int, decays: bool, mixes: bool) -> None:
    given = inputs(seed, decays=decays, mixes=mixes)
    run = track(*given)
    factor = 1 - step_sizes(given.q, given.k, given.beta, given.lam)
    assert_close(run.left, factor[..., None] * run.found, rtol=0, atol=1e-12)
    assert stability_of(given).deviation <= 1e-12


@given(seed=st.integers(0, 10_000), decays=st.booleans(), mixes=st.booleans(), t=st.integers(1, 30))
@settings(deadline=None, max_examples=25)
def test_the_bound_holds_with_decay_and_without(seed: int, decays: bool, mixes: bool, t: int) -> None:
    given = inputs(seed, t=t, decays=decays, mixes=mixes)
    run = track(*given)
    bound = tracking_bound(run, (1 - step_sizes(given.q, given.k, given.beta, given.lam)).abs())
    assert (run.left.norm(dim=-1) <= bound * (1 + 1e-12)).all()
    seen = stability_of(given)
    assert seen.slack >= 1 - 1e-12
    assert_close(seen.bound, tuple(bound.mean((0, 2)).tolist()))


def test_the_bound_is_the_published_formula() -> None:
    given = inputs(0, decays=False)
    run, factors = track(*given), (1 - step_sizes(given.q, given.k, given.beta, given.lam)).abs()
    rho = factors[:, 1:].amax(1)
    memory = torch.zeros(2, 3, 5, 4, dtype=torch.float64)
    x, moved = given.k + given.lam[..., None] * given.q, []  # pyright: ignore[reportOptionalSubscript]
    for i in range(20):
        if i:  # the change of value, and of direction as the memory of the token before sees it
            seen = (memory @ (x[:, i] - x[:, i - 1])[..., None]).squeeze(-1)
            moved.append((given.v[:, i] - given.v[:, i - 1] - seen).norm(dim=-1))
        memory = memory + (given.beta[:, i, :, None] * run.found[:, i])[..., None] * given.k[:, i, :, None]
    r = torch.stack(moved, 1).amax(1)
    for t, got in enumerate(tracking_bound(run, factors).unbind(1)):
        start = run.left[:, 0].norm(dim=-1)
        assert_close(got, rho**t * start + (1 - rho**t) / (1 - rho) * rho * r, rtol=1e-10, atol=1e-10)


def test_a_text_of_one_kind_of_token_meets_its_bound() -> None:
    k, v = torch.tensor([1.0, 0.0]).expand(1, 6, 1, 2).double(), torch.ones(1, 6, 1, 1, dtype=torch.float64)
    seen = stability_of(DeltaInputs(k, k, v, torch.full((1, 6, 1), 0.5), None, None))
    assert seen.error == seen.bound == tuple(0.5**i for i in range(1, 7))
    assert (seen.rho, seen.slack, seen.norm, seen.allowed) == (0.5, 1, 1, 1)


def test_the_slack_is_a_number_where_nothing_is_left_of_an_error() -> None:
    k, one = torch.full((1, 3, 1, 4), 0.5), torch.ones(1, 3, 1)
    assert stability_of(DeltaInputs(k, k, one.unsqueeze(-1), one, None, None)).slack == math.inf


def test_memory_and_errors_are_those_of_the_delta_rule() -> None:
    given = inputs(3)
    run = track(*given)
    for t in (1, 7, 20):
        _, state = delta_rule(*(x[:, :t] for x in given), backend="naive")  # pyright: ignore
        assert_close(run.memory[:, t - 1], state.norm(dim=(-2, -1)))
    x = given.k + given.lam[..., None] * given.q  # pyright: ignore[reportOptionalSubscript]
    assert_close(run.left[:, -1], given.v[:, -1] - torch.einsum("nhvk,nhk->nhv", state, x[:, -1]))


def test_a_spread_tells_steps_that_do_not_contract() -> None:
    got = spread(torch.tensor([[-0.5, 0.0, 0.5, 1.0, 1.5], [2.0, 1.9, 0.1, 0.2, 3.0]]))
    assert got.outside == 0.4
    assert (got.least, got.most, got.mean) == (-0.5, 3.0, pytest.approx(0.97))
    assert got.quantiles[2] == pytest.approx(0.75)
    assert len(got.quantiles) == 5


def test_products_tell_what_single_tokens_do_not() -> None:
    seen = stability_of(alternating(64, 0.99, 1.0))
    assert seen.radius <= 1 + 1e-12  # every eigenvalue of every transition
    assert seen.steps.outside == 0
    assert [each.tokens for each in seen.growth] == [2, 8, 64]
    assert [each.most for each in seen.growth] == pytest.approx([1.980198**1, 1.980198**4, 1.980198**32], rel=1e-4)
    assert seen.allowed == pytest.approx(1.980198**0.5)
    assert seen.memory[-1] > 1e8
    assert "products of transitions grow in 1 of them, up to 3.12e+09 times over 64 tokens" in verdict([None, seen])
    assert "at worst grow 1.41 times a token" in verdict([None, seen])


def test_the_delta_rule_itself_cannot_grow() -> None:
    seen = stability_of(inputs(1, t=64, mixes=False, decays=False))
    assert all(each.most <= 1 + 1e-12 for each in seen.growth)
    assert verdict([seen]).startswith("On this text every token's error shrinks in each of 1 delta layer")
    assert "no product of transitions grows" in verdict([seen])
    assert "no queries and keys" in verdict([seen])


def test_what_gates_allow_does_not_depend_on_the_text() -> None:
    given = inputs(1, decays=False)
    turned = given._replace(q=given.q.flip(1))
    assert stability_of(given).allowed == stability_of(turned).allowed > 1
    assert stability_of(given).norm != stability_of(turned).norm


def test_a_growth_that_passes_is_told_with_what_is_left_of_it() -> None:
    given = alternating(8, 0.99, 1.0)
    fading = given._replace(log_alpha=torch.tensor([0.0] * 2 + [-1.0] * 6, dtype=torch.float64).view(1, 8, 1))
    two, eight = stability_of(fading).growth
    assert two.most > 1 > eight.most
    assert f"up to {two.most:.3g} times over 2 tokens and {eight.most:.3g} over 8." in verdict([stability_of(fading)])


def test_a_verdict_counts_steps_that_do_not_contract() -> None:
    given = inputs(1)
    said = verdict([stability_of(given._replace(k=2 * given.k)), stability_of(given)])
    assert "% of the steps beta a lie outside (0, 2), in 1 of 2 delta layers" in said


def test_a_verdict_claims_nothing_of_figures_that_are_not_finite() -> None:
    given = inputs(1)
    given.v[0, 0, 0, 0] = math.nan
    assert "not finite" in verdict([stability_of(given)])
    given.k[0, 0, 0, 0] = math.inf
    assert "not finite" in verdict([stability_of(given)])


def test_each_layer_is_looked_at_on_what_its_own_rule_is_given() -> None:
    made = model()
    x = made.embedding(torch.tensor([TOKENS]))
    for block, got in zip(made.blocks, stability(made, TOKENS), strict=True):
        assert isinstance(block, Block)
        if isinstance(block.mechanism, DeltaMechanism):
            given = block.mechanism.inputs(block.mechanism_norm(x))
            assert got is not None
            assert got.steps.mean == pytest.approx(step_sizes(given.q, given.k, given.beta, given.lam).mean().item())
        else:
            assert got is None
        x = block(x)[0]


def test_a_hybrid_stack_shows_what_each_layer_has() -> None:
    standard, delta, gated, mixed = stability(model(), TOKENS)
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


def test_the_coupling_of_a_delta_layer_is_looked_at_too() -> None:
    *others, mixed = energies(model(), TOKENS)
    assert others == [None] * 3
    assert mixed is not None
    assert mixed.dynamics == "hamiltonian"
    assert mixed.strength.query_on_key > 0


def test_the_model_is_left_as_it_was() -> None:
    made = model(dropout=0.5).train()
    before = {name: value.clone() for name, value in made.state_dict().items()}
    state = torch.get_rng_state()
    assert stability(made, TOKENS) == stability(made, torch.tensor(TOKENS))  # no dropout while looking
    assert made.training
    assert torch.equal(torch.get_rng_state(), state)
    assert_close(dict(made.state_dict()), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in made.parameters())


@pytest.mark.parametrize("tokens", [[], [257]])
def test_tokens_that_are_none_are_refused(tokens: list[int]) -> None:
    with pytest.raises(UsageError, match="one token from 0 to 256"):
        stability(model("qdelta"), tokens)


def test_one_token_is_enough() -> None:
    (seen,) = stability(model("qdelta"), [1])
    assert seen is not None
    assert seen.growth == ()
    assert seen.error == seen.bound
    assert verdict([seen]).count(".") >= 2
