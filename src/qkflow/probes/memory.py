r"""Stability of a delta-rule memory on a text, and in the worst case.

    a_t = k_t \cdot x_t,   T_t = A_t (I - \beta_t x_t k_t^\top),   A_t = diag(\alpha_t)
    S_t = S_{t-1} T_t + \beta_t v_t k_t^\top

x_t is the erase direction, k_t + \lambda_t q_t in Q-Delta; \alpha_t is a decay per head or per key channel. A mechanism
with several steps per token has the statistics of its steps.

**Errors.** A token reads the error n_t = v_t - S_{t-1} A_t x_t and leaves e_t = v_t - S_t x_t. Lemma, by expanding S_t:

    e_t = (1 - \beta_t a_t) n_t                       it shrinks if and only if \beta_t a_t is in (0, 2)             (1)

Theorem. Let d_t = n_t - e_{t-1} be the change of the target: of the value, of the direction, and by decay,
d_t = (v_t - v_{t-1}) - S_{t-1} (A_t x_t - x_{t-1}). If |1 - \beta_t a_t| <= \rho and |d_t| <= r for all t, then
|e_t| <= \rho (|e_{t-1}| + r) by the lemma, and so

    |e_t| <= \rho^t |e_0| + (1 - \rho^t) / (1 - \rho) \rho r                                                         (2)

The paper (https://arxiv.org/abs/2606.08804) proves both for \alpha = 1; in this form they hold with decay. That its r
is the largest |d_t| is our reading. Both concern the direction of the current token only. The rest of the memory
depends on products of transitions.

**One transition**, with a decay per head (with one per channel, both are computed from the matrix). Outside the plane
of x and k, T is \alpha. Inside it, T / \alpha has the determinant 1 - \beta a,
and the squares of its two singular values sum to 2 (1 - \beta a) + n^2 with n = \beta |x| |k|. So

    largest |eigenvalue| = \alpha \max(1, |1 - \beta a|),    |T| = \alpha (n + \sqrt{n^2 + 4 (1 - \beta a)}) / 2     (3)

With x = k, T is symmetric, |T| is its largest eigenvalue, and with unit keys no product grows. Otherwise |T|
exceeds it, and a product can grow although no eigenvalue of any factor exceeds one.

**Worst case** (ours), for x = k + \lambda q with unit q and k, that is with \lambda = |x - k|, and for the largest
decay of a token's channels. |T| depends on q \cdot k only. If \lambda |1 - \beta| <= 2 - \beta, as for all
gates up to one, it is largest at q \cdot k = -\lambda (1 - \beta) / (2 - \beta); otherwise at q = k or q = -k:

    |T|^2 <= \alpha^2 (1 + \beta \lambda^2 / (2 - \beta)),    otherwise |T| <= \alpha (|1 - \beta| + \beta \lambda)  (4)

No product grows faster than that per step, and one does: T^\top is a transition with the same gates, that of the key
x / |x| and the query (|x| k - x / |x|) / \lambda, which has length one. A text that alternates the two multiplies the
memory by T T^\top, whose norm and largest eigenvalue are |T|^2: 1.98 per two tokens at \beta = .99, \lambda = 1,
\alpha = 1. The bound increases with \beta and \lambda and holds for shorter q and k, so it covers all gates up to
these. Varying gates reach the product of their bounds: rotate each q and k so that the direction one token stretches
most is stretched most by the next. Without decay every \lambda > 0 allows growth.

| symbol             | variable      | shape       |
|--------------------|---------------|-------------|
| q_t, k_t           | `q`, `k`      | `[b t h k]` |
| \beta_t, \lambda_t | `beta`, `lam` | `[b t h]`   |
| x_t                | `erase`       | `[b t h k]` |
| log \alpha_t       | `log_alpha`   | `[b t h]` or `[b t h k]` |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from qkflow.errors import UsageError
from qkflow.mechanisms.base import Stream
from qkflow.mechanisms.coupling import QKMechanism
from qkflow.mechanisms.delta_rule import DeltaInputs, DeltaMechanism
from qkflow.models import Decoder
from qkflow.probes.attention import cpu_float64, mechanism_inputs
from qkflow.probes.diagnostics import Diagnostic, diagnostics

Queries = Float[Tensor, "b t h k"]
Values = Float[Tensor, "b t h v"]
Gates = Float[Tensor, "b t h"]

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""The quantiles of a `StepDistribution`."""
WINDOWS = (2, 8, 64)
"""Window lengths of the products of transitions."""
_HIGH_QUANTILE = 0.99
_GATES = {
    "beta": "beta, fraction of the error corrected",
    "log_alpha": "alpha, decay per token",
    "lam": "lambda, weight of the added direction",
    "gamma": "gamma, fraction erased before the write",
}


# Statistics on a text


@dataclass(frozen=True, kw_only=True)
class StepDistribution:
    """Distribution of beta a over tokens."""

    mean: float
    min: float
    quantiles: tuple[float, ...]
    """5, 25, 50, 75 and 95 %."""
    max: float
    outside: float
    """Fraction outside (0, 2), where an error does not shrink."""


@dataclass(frozen=True, kw_only=True)
class ProductNorms:
    """Operator norms of products of consecutive transitions."""

    tokens: int
    """Number of factors."""
    max: float
    """Over the text and all heads."""
    median: float
    heads: tuple[float, ...]
    """Maximum of each head."""


@dataclass(frozen=True, kw_only=True)
class MemoryStats:
    """The memory of one layer on one text."""

    steps: StepDistribution
    """beta a over all tokens and heads."""
    heads: tuple[StepDistribution, ...]
    """beta a in each head."""
    rho: float
    """The largest contraction factor |1 - beta a|."""
    rho_high: float
    """99 % quantile of the contraction factors."""
    deviation: float
    """Largest difference between the two sides of (1): rounding error."""
    error: tuple[float, ...]
    """|e_t| along the text, averaged over heads."""
    bound: tuple[float, ...]
    """The bound (2) along the text, averaged over heads."""
    slack: float
    """Median over tokens and heads of bound / error."""
    radius: float
    """Largest absolute eigenvalue of a transition."""
    norm: float
    """Largest operator norm of a transition."""
    allowed: float
    """Worst-case growth per step with these gates: geometric mean of (4) over the text, maximum over heads."""
    growth: tuple[ProductNorms, ...]
    """Products over each of `WINDOWS` that fits the text."""
    memory: tuple[float, ...]
    """Frobenius norm of S_t along the text, maximum over heads."""


class ErrorTrace(NamedTuple):
    """The errors along a text, in float64."""

    before: Values
    """n_t, before the token is written."""
    after: Values
    """e_t, after it is written."""
    memory: Gates
    """Frobenius norm of S_t."""


def memory_stats(model: Decoder, tokens: Sequence[int] | Int[Tensor, " t"]) -> list[MemoryStats | None]:
    """Return statistics of each layer's memory on one text; `None` for a layer without a delta rule.

    >>> from qkflow.models import DecoderConfig
    >>> config = DecoderConfig(width=32, layers=2, heads=2, hidden=64, mechanism=("standard", "qdelta"))
    >>> none, layer = memory_stats(Decoder(config), [72, 105, 33])
    >>> none, len(layer.heads), layer.steps.outside, layer.deviation < 1e-12, [norms.tokens for norms in layer.growth]
    (None, 2, 0.0, True, [2])
    """
    with torch.no_grad():
        return [
            delta_rule_stats(layer.inputs(x)) if isinstance(layer, DeltaMechanism) else None
            for layer, x in mechanism_inputs(model, tokens)
        ]


def delta_rule_stats(inputs: DeltaInputs) -> MemoryStats:
    """Return the same statistics for the inputs of a delta rule, over all rows.

    >>> k, v, half = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2), torch.ones(1, 1, 1, 1), torch.full((1, 1, 1), 0.5)
    >>> delta_rule_stats(DeltaInputs(k, k, v, half, None, None)).error
    (0.5,)
    """
    inputs = inputs.map(cpu_float64)
    trace, steps = trace_errors(inputs), step_sizes(inputs)
    factor = 1 - steps
    error, bound = trace.after.norm(dim=-1), error_bound(trace, factor.abs())
    ratio = (bound / error).where(error > 0, math.inf)
    lam = (inputs.direction - inputs.k).norm(dim=-1)
    slowest = inputs.log_alpha
    if slowest is not None and slowest.ndim == 4:
        slowest = slowest.amax(-1)
    allowed = worst_norms(inputs.beta, slowest, lam).log().mean((0, 1)).exp()
    return MemoryStats(
        steps=step_distribution(steps),
        heads=tuple(step_distribution(head) for head in steps.unbind(2)),
        rho=float(factor.abs().max()),
        rho_high=float(factor.abs().quantile(_HIGH_QUANTILE)),
        deviation=float((trace.after - factor.unsqueeze(-1) * trace.before).abs().max()),
        error=tuple(error.mean((0, 2)).tolist()),
        bound=tuple(bound.mean((0, 2)).tolist()),
        slack=float(ratio[:, min(1, ratio.shape[1] - 1) :].quantile(0.5, interpolation="lower")),
        radius=float(spectral_radii(inputs).max()),
        norm=float(operator_norms(inputs).max()),
        allowed=float(allowed.max()),
        growth=tuple(_product_stats(inputs, window) for window in WINDOWS if window <= steps.shape[1]),
        memory=tuple(trace.memory.amax((0, 2)).tolist()),
    )


def trace_errors(inputs: DeltaInputs) -> ErrorTrace:
    """Return the errors before and after each token, and the size of the memory, from an empty memory.

    >>> k, v, half = torch.ones(1, 2, 1, 1), torch.ones(1, 2, 1, 1), torch.full((1, 2, 1), 0.5)
    >>> trace = trace_errors(DeltaInputs(k, k, v, half, None, None))
    >>> trace.before.flatten().tolist(), trace.after.flatten().tolist(), trace.memory.flatten().tolist()
    ([1.0, 0.5], [0.5, 0.25], [0.5, 0.75])
    """
    _, k, v, beta, _, _ = inputs
    x, alpha = inputs.direction, _channel_decays(inputs)
    S = v.new_zeros(v.shape[0], v.shape[2], v.shape[3], k.shape[3])
    before, after, memory = [], [], []
    for i in range(k.shape[1]):
        S = S * alpha[:, i, :, None]
        before.append(v[:, i] - (S @ x[:, i, :, :, None]).squeeze(-1))
        S = S + (beta[:, i, :, None] * before[-1]).unsqueeze(-1) * k[:, i, :, None, :]
        after.append(v[:, i] - (S @ x[:, i, :, :, None]).squeeze(-1))
        memory.append(S.norm(dim=(-2, -1)))
    return ErrorTrace(torch.stack(before, 1), torch.stack(after, 1), torch.stack(memory, 1))


def error_bound(trace: ErrorTrace, factors: Gates) -> Gates:
    """Return the bound (2) of |e_t| in each row and head, given the contraction factors |1 - beta a|.

    >>> error = torch.tensor([1.0, 0.5]).view(1, 2, 1, 1)
    >>> error_bound(ErrorTrace(2 * error, error, error[..., 0]), torch.full((1, 2, 1), 0.5)).flatten().tolist()
    [1.0, 0.5]
    """
    bound = [trace.after[:, 0].norm(dim=-1)]
    if trace.after.shape[1] > 1:
        rho = factors[:, 1:].amax(1)
        r = (trace.before[:, 1:] - trace.after[:, :-1]).norm(dim=-1).amax(1)
        for _ in range(1, trace.after.shape[1]):  # the recursion, which also covers rho = 1
            bound.append(rho * (bound[-1] + r))
    return torch.stack(bound, 1)


def step_distribution(steps: Float[Tensor, "..."]) -> StepDistribution:
    """Return the distribution of beta a.

    >>> step_distribution(torch.tensor([0.5, 1.0, 3.0])).outside
    0.3333333333333333
    """
    steps = steps.double().flatten()
    quantiles = steps.quantile(torch.tensor(QUANTILES, dtype=torch.float64, device=steps.device))
    return StepDistribution(
        mean=float(steps.mean()),
        min=float(steps.min()),
        quantiles=tuple(quantiles.tolist()),
        max=float(steps.max()),
        outside=float(((steps <= 0) | (steps >= 2)).double().mean()),
    )


def _product_stats(inputs: DeltaInputs, window: int) -> ProductNorms:
    norms = product_norms(inputs, window)
    return ProductNorms(
        tokens=window,
        max=float(norms.max()),
        median=float(norms.quantile(0.5)),
        heads=tuple(norms.amax((0, 1)).tolist()),
    )


# Transitions


def _channel_decays(inputs: DeltaInputs) -> Float[Tensor, "b t h _"]:
    """Return alpha, [b t h k] or [b t h 1]."""
    if inputs.log_alpha is None:
        return torch.ones_like(inputs.beta).unsqueeze(-1)
    return inputs.log_alpha.exp() if inputs.has_vector_decay else inputs.log_alpha.exp().unsqueeze(-1)


def _transitions(inputs: DeltaInputs, i: int) -> Float[Tensor, "b h k k"]:
    """Return T of token i."""
    rank_one = inputs.direction[:, i, :, :, None] * inputs.k[:, i, :, None, :]
    eye = torch.eye(inputs.k.shape[-1], dtype=inputs.k.dtype, device=inputs.k.device)
    return _channel_decays(inputs)[:, i, :, :, None] * (eye - inputs.beta[:, i, :, None, None] * rank_one)


def step_sizes(inputs: DeltaInputs) -> Gates:
    r"""Return \beta a: the fraction of its error that each token corrects."""
    return inputs.beta * (inputs.k * inputs.direction).sum(-1)


def spectral_radii(inputs: DeltaInputs) -> Gates:
    """Return the largest absolute eigenvalue of each transition, equation (3)."""
    if inputs.has_vector_decay:
        steps = range(inputs.k.shape[1])
        return torch.stack([torch.linalg.eigvals(_transitions(inputs, i)).abs().amax(-1) for i in steps], 1)
    inside = (1 - step_sizes(inputs)).abs()
    return _decayed(inside if inputs.k.shape[-1] == 1 else inside.clamp_min(1), inputs.log_alpha)


def operator_norms(inputs: DeltaInputs) -> Gates:
    """Return the largest singular value of each transition, equation (3).

    >>> q, k = torch.eye(2).view(2, 1, 1, 1, 2)
    >>> one = torch.ones(1, 1, 1)
    >>> inputs = DeltaInputs(q, k, k, one, None, one)
    >>> round(operator_norms(inputs).item(), 4), spectral_radii(inputs).item()
    (1.4142, 1.0)
    """
    if inputs.k.shape[-1] == 1:
        return spectral_radii(inputs)
    if inputs.has_vector_decay:
        steps = range(inputs.k.shape[1])
        return torch.stack([torch.linalg.matrix_norm(_transitions(inputs, i), ord=2) for i in steps], 1)
    x, k = inputs.direction, inputs.k
    n = inputs.beta * x.norm(dim=-1) * k.norm(dim=-1)
    distance = (normalize(x, dim=-1) - normalize(k, dim=-1)).square().sum(-1)
    # n^2 + 4 (1 - beta a) without cancellation where it is close to zero
    return _decayed((n + ((n - 2).square() + 2 * n * distance).sqrt()) / 2, inputs.log_alpha)


def product_norms(inputs: DeltaInputs, window: int) -> Float[Tensor, "b w h"]:
    """Return the largest singular value of products of `window` transitions, for windows that overlap by half."""

    def windows(x: Tensor) -> Tensor:
        return x.unfold(1, window, max(1, window // 2))  # [b t h ...] to [b w h ... i]

    beta = windows(inputs.beta)
    vectors = (inputs.direction, inputs.k, _channel_decays(inputs))
    x, k, alpha = (rearrange(windows(y), "b w h k i -> b w h i k") for y in vectors)
    if (
        2 * window < k.shape[-1] and not inputs.has_vector_decay
    ):  # outside the span of these vectors the product is the decay
        basis = torch.linalg.qr(torch.cat([x, k], -2).mT)[0]
        x, k = x @ basis, k @ basis
    product = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device).expand(*k.shape[:3], -1, -1)
    for i in range(window):
        product = product * alpha[..., i, None, :]
        product = product - beta[..., i, None, None] * (product @ x[..., i, :, None]) * k[..., i, None, :]
    is_finite = product.isfinite().all(-1).all(-1)
    norms = torch.linalg.matrix_norm(product.where(is_finite[..., None, None], 0), ord=2)
    return norms.where(is_finite, math.nan)


# Worst case


def worst_norms(
    beta: Float[Tensor, "*shape"],
    log_alpha: Float[Tensor, "*shape"] | None = None,
    lam: Float[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """Return the bound (4) of the operator norm over all queries and keys of length at most one.

    >>> round(worst_norms(torch.tensor([0.99]), lam=torch.tensor([1.0])).square().item(), 3)
    1.98
    """
    lam = torch.zeros_like(beta) if lam is None else lam.abs()
    inner, outer = (1 + beta * lam.square() / (2 - beta)).sqrt(), (1 - beta).abs() + beta * lam
    worst = torch.where(lam * (1 - beta).abs() <= 2 - beta, inner, outer)
    return _decayed(worst.where(lam > 0, 1), log_alpha)


@dataclass(frozen=True, kw_only=True, eq=False)
class WorstCase:
    """Two tokens whose alternation makes a memory grow as fast as any text can with these gates."""

    growth: float
    """Growth factor per step."""
    q: Float[Tensor, "2 k"]
    """Unit queries."""
    k: Float[Tensor, "2 k"]
    """Unit keys."""


def worst_case(beta: float, lam: float, alpha: float = 1.0, width: int = 2) -> WorstCase:
    """Return the two tokens that make a memory with gates up to these grow fastest.

    >>> round(worst_case(0.99, 1.0).growth ** 2, 2), worst_case(0.99, 0.0).growth
    (1.98, 1.0)
    """
    _check_gates(beta=beta, alpha=alpha)
    if width < 2:
        raise UsageError(f"width must be at least 2, got {width}")
    growth = alpha * _worst_norm(beta, lam)
    q, k = torch.zeros(2, width, dtype=torch.float64), torch.zeros(2, width, dtype=torch.float64)
    size, rest = abs(lam), 2 - beta
    cosine = 1.0 if rest == 0 else max(-1.0, min(1.0, -size * (1 - beta) / rest))
    k[0, 0] = 1
    q[0, :2] = math.copysign(1, lam) * torch.tensor([cosine, math.sqrt(1 - cosine**2)], dtype=torch.float64)
    x = k[0] + lam * q[0]
    k[1] = x / x.norm()
    q[1] = ((lam + 2 * q[0] @ k[0]) * k[0] - q[0]) / x.norm()  # (|x| k - x / |x|) / lam without the division
    return WorstCase(growth=growth, q=q, k=k)


def safe_alpha(beta: float, lam: float) -> float:
    """Return the largest alpha with which no text whose gates are at most these makes a memory grow.

    >>> round(safe_alpha(0.99, 1.0), 4), safe_alpha(0.99, 0.0)
    (0.7106, 1.0)
    """
    _check_gates(beta=beta)
    return 1 / _worst_norm(beta, lam)


def safe_lambda(beta: float, alpha: float) -> float:
    """Return the largest lambda with which no text makes a memory with this decay grow; 0 without decay.

    >>> round(safe_lambda(0.99, 0.9), 4), safe_lambda(0.99, 1.0)
    (0.4892, 0.0)
    """
    _check_gates(beta=beta, alpha=alpha)
    if beta == 0 or alpha == 0:
        return math.inf
    growth, rest = 1 / alpha, abs(1 - beta)
    if growth * rest <= 1:
        return math.sqrt((growth**2 - 1) * (2 - beta) / beta)
    return (growth - rest) / beta


def _worst_norm(beta: float, lam: float) -> float:
    if not math.isfinite(lam):
        raise UsageError(f"lam must be finite, got {lam}")
    return float(worst_norms(torch.tensor(beta, dtype=torch.float64), lam=torch.tensor(lam, dtype=torch.float64)))


def _check_gates(*, beta: float, alpha: float = 1.0) -> None:
    for name, value, largest in (("beta", beta, 2), ("alpha", alpha, 1)):
        if not 0 <= value <= largest:
            raise UsageError(f"{name} must be from 0 to {largest}, got {value}")


def _decayed(x: Float[Tensor, "*shape"], log_alpha: Float[Tensor, "*shape"] | None) -> Float[Tensor, "*shape"]:
    return x if log_alpha is None else x * log_alpha.exp()


@diagnostics.register(DeltaMechanism)
def _diagnostics(mechanism: DeltaMechanism, x: Stream) -> tuple[Diagnostic, ...]:
    """Return the diagnostics of the coupling, and the mean gates of each head."""
    gates = {name: gate.detach().double() for name, gate in mechanism.gates(x).items()}
    if (log_alpha := gates.get("log_alpha")) is not None:
        gates["log_alpha"] = log_alpha.exp().view(*x.shape[:2], mechanism.heads, -1).mean(-1)
    means = {_GATES.get(name, name): tuple(gate.mean((0, 1)).tolist()) for name, gate in gates.items()}
    figure = Diagnostic(
        title="gates of each head",
        kind="bars",
        x=tuple(f"head {head + 1}" for head in range(mechanism.heads)),
        series=tuple(means),
        values=tuple(means.values()),
        y_label="mean over tokens",
        note="At beta 0 nothing is written, at alpha 1 nothing decays, at lambda 0 nothing is added to the key.",
    )
    return (*diagnostics.dispatch(QKMechanism)(mechanism, x), figure)
