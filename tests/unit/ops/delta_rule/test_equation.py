"""Every backend of the delta rule equals the published recurrence, for any split into chunks."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qkflow.ops.delta_rule import delta_rule

OPTIONS = ("log_alpha", "erase", "state")
CHUNKS = (1, 2, 3, 5, 8, 16, 31, 32, 33, 64, 100, 127, 128)


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("rho", [0.0, 0.95])
@pytest.mark.parametrize(
    ("t", "key", "value"),
    [
        (1, 1, 1),
        (2, 3, 5),
        (7, 16, 3),
        (17, 5, 17),
        (63, 4, 3),
        (64, 33, 16),
        (65, 3, 33),
        (130, 16, 16),
        (33, 64, 64),
        (3, 256, 9),
        (3, 9, 300),
    ],
)
def test_values_and_gradients_match_the_published_equation(
    helpers: Any, backend: str, t: int, key: int, value: int, rho: float, vector: bool
) -> None:
    options = {"key": key, "value": value, "rho": rho, "vector": vector}
    helpers.assert_agree(
        helpers.results(helpers.make_inputs(t, **options), backend=backend), helpers.expected(t, **options)
    )


@pytest.mark.parametrize("vector", [False, True])
def test_the_widest_heads_across_a_chunk_boundary(helpers: Any, fast: str, vector: bool) -> None:
    options = {"rows": 1, "heads": 1, "key": 256, "value": 256, "vector": vector}
    expected = helpers.results(helpers.make_inputs(66, **options), backend="naive")
    helpers.assert_agree(helpers.results(helpers.make_inputs(66, **options), backend=fast), expected)


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize(
    "without", [tuple(x for x, out in zip(OPTIONS, outs, strict=True) if out) for outs in product([0, 1], repeat=3)]
)
def test_every_optional_input_may_be_omitted(
    helpers: Any, backend: str, without: tuple[str, ...], scale: float | None, vector: bool
) -> None:
    options: dict[str, Any] = {"without": without, "rho": 0.95, "separate": True, "vector": vector}
    actual = helpers.results(helpers.make_inputs(21, **options), scale=scale, backend=backend, chunk=8)
    helpers.assert_agree(actual, helpers.expected(21, scale, **options))


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_chunk_size_changes_nothing(helpers: Any, fast: str, chunk: int, vector: bool) -> None:
    options = {"rows": 1, "rho": 0.95, "vector": vector}
    actual = helpers.results(helpers.make_inputs(150, **options), backend=fast, chunk=chunk)
    helpers.assert_agree(actual, helpers.expected(150, **options))


def test_the_transposed_index_order_is_detected(helpers: Any) -> None:
    """The official kernel has k_i in row i and x_j in column j; in the published equation it is the other way round."""
    inputs = helpers.make_inputs(64, rows=1, heads=3, key=16, value=16)
    expected = helpers.published(**inputs)[0]
    for chunk in (4, 8, 16, 32):
        assert _relative_error(_chunked(**inputs, chunk=chunk, swapped=False), expected) < 1e-12
        assert _relative_error(_chunked(**inputs, chunk=chunk, swapped=True), expected) > 0.05
    small, large = (_chunked(**inputs, chunk=chunk, swapped=True) for chunk in (4, 32))
    assert _relative_error(small, large) > 0.05


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def _chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_alpha: Tensor,
    erase: Tensor,
    state: Tensor,
    chunk: int,
    swapped: bool,
) -> Tensor:
    """The chunked form with X K^T or K X^T in the linear system; nothing else differs."""
    S, outputs = state, []
    for i in range(0, q.shape[1], chunk):
        Q, K, V = (x[:, i : i + chunk].transpose(1, 2) for x in (q, k, v))
        b, g = (x[:, i : i + chunk].transpose(1, 2)[..., None] for x in (beta, log_alpha))
        X, G = erase[:, i : i + chunk].transpose(1, 2), g.cumsum(-2)
        D = (G - G.mT).exp().tril()
        pairs = (K @ X.mT if swapped else X @ K.mT) * D
        system = torch.eye(chunk, dtype=q.dtype) + b * pairs.tril(-1)
        U = torch.linalg.solve(system, b * (V - G.exp() * X @ S.mT))
        outputs.append((G.exp() * Q @ S.mT + (Q @ K.mT * D) @ U).transpose(1, 2))
        S = G[..., -1:, :].exp() * S + U.mT @ ((G[..., -1:, :] - G).exp() * K)
    return torch.cat(outputs, 1) * q.shape[-1] ** -0.5


@given(
    t=st.integers(2, 40),
    at=st.floats(0, 1),
    chunk=st.sampled_from([1, 7, 16, 64]),
    state=st.booleans(),
    vector=st.booleans(),
)
@settings(deadline=None, max_examples=15)
def test_a_split_sequence_equals_the_whole(
    helpers: Any, backend: str, t: int, at: float, chunk: int, state: bool, vector: bool
) -> None:
    cut = 1 + round(at * (t - 2))
    inputs = helpers.make_inputs(t, rho=0.95, vector=vector, without=() if state else ("state",))
    call = partial(delta_rule, backend=backend, chunk=chunk)
    helpers.assert_agree(helpers.results(inputs, partial(_pieces, call, [cut, t - cut])), helpers.results(inputs, call))


@pytest.mark.parametrize("key", [4, 21])
@pytest.mark.parametrize("vector", [False, True])
def test_decoding_equals_the_whole(helpers: Any, backend: str, vector: bool, key: int) -> None:
    options = {"rho": 0.95, "vector": vector, "key": key}
    inputs = helpers.make_inputs(19, **options)
    actual = helpers.results(inputs, partial(_pieces, partial(delta_rule, backend=backend), [1] * 19))
    helpers.assert_agree(actual, helpers.expected(19, **options))
    with torch.inference_mode():
        o, final = _pieces(partial(delta_rule, backend=backend), [1] * 19, **inputs)
    helpers.assert_agree({"o": o, "final": final}, {name: actual[name] for name in ("o", "final")})


def _pieces(call: Any, sizes: list[int], state: Tensor | None = None, **tokens: Tensor) -> tuple[Tensor, Tensor]:
    outputs: list[Tensor] = []
    for piece in zip(*(x.split(sizes, 1) for x in tokens.values()), strict=True):
        o, state = call(**dict(zip(tokens, piece, strict=True)), state=state)
        outputs.append(o)
    assert state is not None
    return torch.cat(outputs, 1), state


@pytest.mark.parametrize("without", [(), ("log_alpha",), ("erase",), ("log_alpha", "erase")])
def test_writing_contracts_the_error_by_the_stated_factor(helpers: Any, backend: str, without: tuple[str, ...]) -> None:
    r"""v_t - S_t x_t = (1 - \beta_t a_t)(v_t - \alpha_t S_{t-1} x_t) with a_t = k_t \cdot x_t."""
    inputs = helpers.make_inputs(12, without=without, rho=0.5)
    before = inputs.pop("state")
    for i in range(12):
        token = {name: x[:, i : i + 1] for name, x in inputs.items()}
        _, after = delta_rule(**token, state=before, backend=backend)
        k, v, beta = (inputs[name][:, i] for name in ("k", "v", "beta"))
        x = k if "erase" in without else inputs["erase"][:, i]
        alpha = 1.0 if "log_alpha" in without else inputs["log_alpha"][:, i, :, None, None].exp()
        left, right = v - _read(after, x), v - _read(alpha * before, x)
        factor = 1 - beta * (k * x).sum(-1)
        torch.testing.assert_close(left, factor[..., None] * right, rtol=0, atol=1e-12)
        before = after


def _read(S: Tensor, x: Tensor) -> Tensor:
    return (S @ x[..., None])[..., 0]


def test_the_state_stays_bounded_over_100_000_tokens(helpers: Any, fast: str) -> None:
    """For random tokens only: for some sequences, the memory grows without bound unless it decays."""
    state, largest = None, 0.0
    for seed in range(20):
        inputs = helpers.make_inputs(
            5_000, rows=1, key=8, value=4, seed=seed, dtype=torch.float32, without=("log_alpha", "state")
        )
        _, state = delta_rule(**inputs, state=state, backend=fast)
        largest = max(largest, float(state.norm(dim=(-1, -2)).max()))
    assert 1 < largest < 100


@pytest.mark.parametrize("vector", [False, True])
def test_a_log_decay_of_zero_equals_no_decay(helpers: Any, backend: str, vector: bool) -> None:
    inputs = helpers.make_inputs(70, rho=0.95, vector=vector)
    zero = helpers.results({**inputs, "log_alpha": torch.zeros_like(inputs["log_alpha"])}, backend=backend)
    del inputs["log_alpha"], zero["log_alpha"]
    helpers.assert_agree(zero, helpers.results(inputs, backend=backend), tolerance=1e-12)


@pytest.mark.parametrize("vector", [False, True])
def test_erasing_along_the_key_is_the_default(helpers: Any, backend: str, vector: bool) -> None:
    inputs = helpers.make_inputs(70, rho=0.95, vector=vector, without=("erase",))
    explicit = helpers.results({**inputs, "erase": inputs["k"]}, backend=backend)
    explicit["k"] += explicit.pop("erase")
    helpers.assert_agree(explicit, helpers.results(inputs, backend=backend), tolerance=1e-12)


@pytest.mark.parametrize("strength", [0.0, 1.0, 2.0])
def test_the_limits_of_beta_are_correct(helpers: Any, backend: str, strength: float) -> None:
    inputs = helpers.make_inputs(70, without=("erase",))
    inputs["beta"] = torch.full_like(inputs["beta"], strength)
    helpers.assert_agree(helpers.results(inputs, backend=backend), helpers.results(inputs, helpers.published))


def test_beta_zero_leaves_the_state_unchanged(helpers: Any, backend: str) -> None:
    inputs = helpers.make_inputs(5, without=("log_alpha",))
    inputs["beta"] = torch.zeros_like(inputs["beta"])
    assert torch.equal(delta_rule(**inputs, backend=backend)[1], inputs["state"])


@pytest.mark.parametrize("vector", [False, True])
def test_inputs_are_not_modified(helpers: Any, backend: str, vector: bool) -> None:
    inputs = helpers.make_inputs(70, vector=vector)
    before = {name: x.clone() for name, x in inputs.items()}
    helpers.results(inputs, backend=backend)
    assert all(torch.equal(x, before[name]) for name, x in inputs.items())


def test_equal_decays_of_all_channels_equal_a_decay_per_head(helpers: Any, backend: str) -> None:
    inputs = helpers.make_inputs(70, rho=0.95)
    by_channel = {**inputs, "log_alpha": inputs["log_alpha"][..., None].expand_as(inputs["k"])}
    actual = helpers.results(by_channel, backend=backend)
    actual["log_alpha"] = actual["log_alpha"].sum(-1)
    helpers.assert_agree(actual, helpers.results(inputs, backend=backend), tolerance=1e-12)


@pytest.mark.parametrize(("t", "vector"), [(2, False), (70, False), (70, True)])
def test_a_weight_of_the_query_equals_its_direction(helpers: Any, backend: str, t: int, vector: bool) -> None:
    """The direction is k + lambda q, in values and in the gradients of q, k and lambda."""
    inputs = helpers.make_inputs(t, rho=0.95, vector=vector)
    inputs["erase"] = torch.linspace(0, 1, inputs["beta"].numel(), dtype=torch.float64).view_as(inputs["beta"])

    def explicit(q: Tensor, k: Tensor, erase: Tensor, **rest: Tensor) -> tuple[Tensor, Tensor]:
        return helpers.published(q, k, erase=k + erase[..., None] * q, **rest)

    helpers.assert_agree(helpers.results(inputs, backend=backend), helpers.results(inputs, explicit))
    with torch.no_grad():  # a few tokens without gradients run another kernel
        o, final = delta_rule(**inputs, backend=backend)
    helpers.assert_agree({"o": o, "final": final}, dict(zip(("o", "final"), explicit(**inputs), strict=True)))
