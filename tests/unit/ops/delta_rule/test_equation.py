"""The laws of the delta rule, for every form of it: it is the published recurrence, however it is cut."""

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

OPTIONS = ("log_alpha", "lam", "state")
CHUNKS = (1, 2, 3, 5, 8, 16, 31, 32, 33, 64, 100, 127, 128)


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
    bench: Any, backend: str, t: int, key: int, value: int, rho: float
) -> None:
    made = {"key": key, "value": value, "rho": rho}
    bench.agree(bench.outcome(bench.case(t, **made), backend=backend), bench.truth(t, **made))


def test_the_widest_heads_across_a_chunk_boundary(bench: Any, fast: str) -> None:
    made = {"rows": 1, "heads": 1, "key": 256, "value": 256}
    want = bench.outcome(bench.case(66, **made), backend="naive")
    bench.agree(bench.outcome(bench.case(66, **made), backend=fast), want)


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize(
    "without", [tuple(x for x, out in zip(OPTIONS, outs, strict=True) if out) for outs in product([0, 1], repeat=3)]
)
def test_every_optional_input_may_be_omitted(
    bench: Any, backend: str, without: tuple[str, ...], scale: float | None
) -> None:
    made: dict[str, Any] = {"without": without, "rho": 0.95, "apart": True}
    got = bench.outcome(bench.case(21, **made), scale=scale, backend=backend, chunk=8)
    bench.agree(got, bench.truth(21, scale, **made))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_chunk_size_changes_nothing(bench: Any, fast: str, chunk: int) -> None:
    got = bench.outcome(bench.case(150, rows=1, rho=0.95), backend=fast, chunk=chunk)
    bench.agree(got, bench.truth(150, rows=1, rho=0.95))


def test_the_transposed_index_order_is_detected(bench: Any) -> None:
    """The official kernel has k_i in row i and x_j in column j; the published equation has it the other way round."""
    given = bench.case(64, rows=1, heads=3, key=16, value=16)
    want = bench.published(**given)[0]
    for chunk in (4, 8, 16, 32):
        assert _off(_by_chunks(**given, chunk=chunk, swapped=False), want) < 1e-12
        assert _off(_by_chunks(**given, chunk=chunk, swapped=True), want) > 0.05
    small, large = (_by_chunks(**given, chunk=chunk, swapped=True) for chunk in (4, 32))
    assert _off(small, large) > 0.05


def _off(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def _by_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_alpha: Tensor,
    lam: Tensor,
    state: Tensor,
    chunk: int,
    swapped: bool,
) -> Tensor:
    """Chunk by chunk, with X K^T or with K X^T in the system that is solved; nothing else differs."""
    S, outputs = state, []
    for i in range(0, q.shape[1], chunk):
        Q, K, V = (x[:, i : i + chunk].transpose(1, 2) for x in (q, k, v))
        b, g, mix = (x[:, i : i + chunk].transpose(1, 2)[..., None] for x in (beta, log_alpha, lam))
        X, G = K + mix * Q, g.cumsum(-2)
        D = (G - G.mT).exp().tril()
        pairs = (K @ X.mT if swapped else X @ K.mT) * D
        system = torch.eye(chunk, dtype=q.dtype) + b * pairs.tril(-1)
        U = torch.linalg.solve(system, b * (V - G.exp() * X @ S.mT))
        outputs.append((G.exp() * Q @ S.mT + (Q @ K.mT * D) @ U).transpose(1, 2))
        S = G[..., -1:, :].exp() * S + U.mT @ ((G[..., -1:, :] - G).exp() * K)
    return torch.cat(outputs, 1) * q.shape[-1] ** -0.5


@given(t=st.integers(2, 40), at=st.floats(0, 1), chunk=st.sampled_from([1, 7, 16, 64]), state=st.booleans())
@settings(deadline=None, max_examples=15)
def test_a_split_sequence_equals_the_whole(
    bench: Any, backend: str, t: int, at: float, chunk: int, state: bool
) -> None:
    cut = 1 + round(at * (t - 2))
    given = bench.case(t, rho=0.95, without=() if state else ("state",))
    call = partial(delta_rule, backend=backend, chunk=chunk)
    bench.agree(bench.outcome(given, partial(_pieces, call, [cut, t - cut])), bench.outcome(given, call))


def test_decoding_equals_the_whole(bench: Any, backend: str) -> None:
    given = bench.case(19, rho=0.95)
    got = bench.outcome(given, partial(_pieces, partial(delta_rule, backend=backend), [1] * 19))
    bench.agree(got, bench.truth(19, rho=0.95))
    with torch.inference_mode():
        o, final = _pieces(partial(delta_rule, backend=backend), [1] * 19, **given)
    bench.agree({"o": o, "final": final}, {name: got[name] for name in ("o", "final")})


def _pieces(call: Any, sizes: list[int], state: Tensor | None = None, **tokens: Tensor) -> tuple[Tensor, Tensor]:
    outputs: list[Tensor] = []
    for parts in zip(*(x.split(sizes, 1) for x in tokens.values()), strict=True):
        o, state = call(**dict(zip(tokens, parts, strict=True)), state=state)
        outputs.append(o)
    assert state is not None
    return torch.cat(outputs, 1), state


@pytest.mark.parametrize("without", [(), ("log_alpha",), ("lam",), ("log_alpha", "lam")])
def test_writing_contracts_the_error_by_the_stated_factor(bench: Any, backend: str, without: tuple[str, ...]) -> None:
    r"""v_t - S_t x_t = (1 - \beta_t a_t)(v_t - \alpha_t S_{t-1} x_t) with a_t = k_t \cdot x_t."""
    given = bench.case(12, without=without, rho=0.5)
    before = given.pop("state")
    for i in range(12):
        token = {name: x[:, i : i + 1] for name, x in given.items()}
        _, after = delta_rule(**token, state=before, backend=backend)
        q, k, v, beta = (given[name][:, i] for name in ("q", "k", "v", "beta"))
        x = k if "lam" in without else k + given["lam"][:, i, :, None] * q
        alpha = 1.0 if "log_alpha" in without else given["log_alpha"][:, i, :, None, None].exp()
        left, right = v - _read(after, x), v - _read(alpha * before, x)
        factor = 1 - beta * (k * x).sum(-1)
        torch.testing.assert_close(left, factor[..., None] * right, rtol=0, atol=1e-12)
        before = after


def _read(S: Tensor, x: Tensor) -> Tensor:
    return (S @ x[..., None])[..., 0]


def test_the_state_stays_bounded_over_100_000_tokens(bench: Any, fast: str) -> None:
    """Of random tokens only: there are sequences over which it grows without a bound, and decay alone ends them."""
    state, largest = None, 0.0
    for seed in range(20):
        given = bench.case(
            5_000, rows=1, key=8, value=4, seed=seed, dtype=torch.float32, without=("log_alpha", "state")
        )
        _, state = delta_rule(**given, state=state, backend=fast)
        largest = max(largest, float(state.norm(dim=(-1, -2)).max()))
    assert 1 < largest < 100


@pytest.mark.parametrize("name", ["lam", "log_alpha"])
def test_a_zero_gate_equals_no_gate(bench: Any, backend: str, name: str) -> None:
    given = bench.case(70, rho=0.95)
    zero = bench.outcome({**given, name: torch.zeros_like(given[name])}, backend=backend)
    absent = bench.outcome({x: y for x, y in given.items() if x != name}, backend=backend)
    del zero[name]
    bench.agree(zero, absent, within=1e-12)


@pytest.mark.parametrize("strength", [0.0, 1.0, 2.0])
def test_the_limits_of_beta_are_correct(bench: Any, backend: str, strength: float) -> None:
    given = bench.case(70, without=("lam",))
    given["beta"] = torch.full_like(given["beta"], strength)
    bench.agree(bench.outcome(given, backend=backend), bench.outcome(given, bench.published))


def test_beta_zero_leaves_the_state_unchanged(bench: Any, backend: str) -> None:
    given = bench.case(5, without=("log_alpha",))
    given["beta"] = torch.zeros_like(given["beta"])
    assert torch.equal(delta_rule(**given, backend=backend)[1], given["state"])


def test_inputs_are_not_modified(bench: Any, backend: str) -> None:
    given = bench.case(70)
    before = {name: x.clone() for name, x in given.items()}
    bench.outcome(given, backend=backend)
    assert all(torch.equal(x, before[name]) for name, x in given.items())
