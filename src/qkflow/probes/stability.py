r"""Whether a delta memory is stable on a text: how errors shrink, how they are bounded, and what transitions amount to.

    x_t = k_t + \lambda_t q_t,   a_t = k_t \cdot x_t
    S_t = \alpha_t S_{t-1} (I - \beta_t x_t k_t^\top) + \beta_t v_t k_t^\top

A token finds the error n_t = v_t - \alpha_t S_{t-1} x_t and leaves e_t = v_t - S_t x_t. **Lemma**, by writing S_t out:

    e_t = (1 - \beta_t a_t) n_t                       it shrinks if and only if \beta_t a_t is in (0, 2)

**Theorem.** Let d_t = n_t - e_{t-1} be what the target moves by, as the memory sees it: the change of value and of
direction, and what is forgotten, d_t = (v_t - v_{t-1}) - S_{t-1} (\alpha_t x_t - x_{t-1}). If |1 - \beta_t a_t| <= \rho
and |d_t| <= r for t = 1, 2, ..., then |e_t| <= \rho (|e_{t-1}| + r) by the lemma, and so

    |e_t| <= \rho^t |e_0| + (1 - \rho^t) / (1 - \rho) \rho r

The paper (https://arxiv.org/abs/2606.08804) has both for \alpha = 1; as written here they hold with decay too. That
its r is the largest |d_t| is our reading. Both speak of the direction of the token at hand alone. What becomes of all
else that a memory holds is a matter of products of transitions: `qkflow.probes.transitions`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkflow.mechanisms.base import Mechanism, Stream
from qkflow.mechanisms.delta import DeltaInputs, DeltaMechanism
from qkflow.models import Decoder
from qkflow.probes.maps import read_inputs
from qkflow.probes.transitions import mixed, operator_norms, product_norms, spectral_radii, step_sizes, worst_norms

Queries = Float[Tensor, "b t h k"]
Values = Float[Tensor, "b t h v"]
Gates = Float[Tensor, "b t h"]

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""The quantiles of a `Spread`."""
HIGH = 0.99
"""The share of tokens whose contraction factor is at most `rho_high`."""
WINDOWS = (2, 8, 64)
"""Tokens over which transitions are multiplied, where the text is that long."""


class Tracking(NamedTuple):
    """The errors along a text, in float64."""

    found: Values
    """n_t, before the token is written."""
    left: Values
    """e_t, after it."""
    memory: Gates
    """|S_t|, the root of the sum of squares."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How the steps beta a are distributed."""

    mean: float
    """Over tokens."""
    least: float
    """The smallest."""
    quantiles: tuple[float, ...]
    """5, 25, 50, 75 and 95 % of the tokens lie below."""
    most: float
    """The largest."""
    outside: float
    """The share outside (0, 2), where an error does not shrink."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What so many transitions in a row do to a memory: operator norms of their product."""

    tokens: int
    """How many are multiplied."""
    most: float
    """The largest over the text and all heads."""
    median: float
    """Half of the windows lie below."""
    heads: tuple[float, ...]
    """The largest of each head."""


@dataclass(frozen=True, kw_only=True)
class StabilityLook:
    """The memory of one layer on one text."""

    steps: Spread
    """beta a over all tokens and heads."""
    heads: tuple[Spread, ...]
    """beta a in each head."""
    rho: float
    """The largest contraction factor |1 - beta a|."""
    rho_high: float
    """99 % of the contraction factors are at most this."""
    deviation: float
    """How far the lemma's two sides are apart: rounding, if all is well."""
    error: tuple[float, ...]
    """|e_t| along the text, the mean over heads."""
    bound: tuple[float, ...]
    """The theorem's bound along the text, the mean over heads."""
    slack: float
    """How many times its error the bound is: the median over tokens and heads."""
    radius: float
    """The largest absolute eigenvalue of a transition."""
    norm: float
    """The largest operator norm of a transition."""
    allowed: float
    """By how much a step can stretch a memory on average with these gates, at worst over queries and keys and heads."""
    growth: tuple[Growth, ...]
    """Products of 2, 8 and 64 transitions, as far as the text goes."""
    memory: tuple[float, ...]
    """|S_t| along the text, in the head where it is the largest."""


def stability(model: Decoder, tokens: Sequence[int] | Int[Tensor, " t"]) -> list[StabilityLook | None]:
    """The memory of each layer on one text; `None` for a layer without a delta rule.

    >>> from qkflow.models import DecoderConfig
    >>> mixed = DecoderConfig(width=32, layers=2, heads=2, hidden=64, mechanism=("standard", "qdelta"))
    >>> none, layer = stability(Decoder(mixed), [72, 105, 33])
    >>> none, len(layer.heads), layer.steps.outside, layer.deviation < 1e-12, [each.tokens for each in layer.growth]
    (None, 2, 0.0, True, [2])
    """
    with torch.no_grad():
        return [_look(layer, x) for layer, x in read_inputs(model, tokens)]


def stability_of(inputs: DeltaInputs) -> StabilityLook:
    """The same for what goes into a delta rule, over all rows.

    >>> k, v, half = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2), torch.ones(1, 1, 1, 1), torch.full((1, 1, 1), 0.5)
    >>> stability_of(DeltaInputs(k, k, v, half, None, None)).error
    (0.5,)
    """
    q, k, v, beta, log_alpha, lam = (None if x is None else x.detach().cpu().double() for x in inputs)
    if q is None or k is None or v is None or beta is None:
        raise TypeError("only the gates log_alpha and lam can be missing")
    gates = beta, log_alpha, lam
    steps, run = step_sizes(q, k, beta, lam), track(q, k, v, *gates)
    factor = 1 - steps
    error, bound = run.left.norm(dim=-1), tracking_bound(run, factor.abs())
    ratio = (bound / error).where(error > 0, math.inf)
    allowed = worst_norms(*gates).log().mean((0, 1)).exp()
    return StabilityLook(
        steps=spread(steps),
        heads=tuple(spread(head) for head in steps.unbind(2)),
        rho=float(factor.abs().max()),
        rho_high=float(factor.abs().quantile(HIGH)),
        deviation=float((run.left - factor.unsqueeze(-1) * run.found).abs().max()),
        error=tuple(error.mean((0, 2)).tolist()),
        bound=tuple(bound.mean((0, 2)).tolist()),
        slack=float(ratio[:, min(1, ratio.shape[1] - 1) :].quantile(0.5, interpolation="lower")),
        radius=float(spectral_radii(q, k, *gates).max()),
        norm=float(operator_norms(q, k, *gates).max()),
        allowed=float(allowed.max()),
        growth=tuple(_growth(product_norms(q, k, *gates, window=w), w) for w in WINDOWS if w <= k.shape[1]),
        memory=tuple(run.memory.amax((0, 2)).tolist()),
    )


def track(
    q: Queries, k: Queries, v: Values, beta: Gates, log_alpha: Gates | None = None, lam: Gates | None = None
) -> Tracking:
    """The errors that each token finds and leaves, and the size of the memory, token by token from an empty one.

    >>> k, v, half = torch.ones(1, 2, 1, 1), torch.ones(1, 2, 1, 1), torch.full((1, 2, 1), 0.5)
    >>> run = track(k, k, v, half)
    >>> run.found.flatten().tolist(), run.left.flatten().tolist(), run.memory.flatten().tolist()
    ([1.0, 0.5], [0.5, 0.25], [0.5, 0.75])
    """
    k, v, beta, x = k.double(), v.double(), beta.double(), mixed(q.double(), k.double(), lam)
    alpha = torch.ones_like(beta) if log_alpha is None else log_alpha.double().exp()
    S = v.new_zeros(v.shape[0], v.shape[2], v.shape[3], k.shape[3])
    found, left, memory = [], [], []
    for i in range(k.shape[1]):
        S = alpha[:, i, :, None, None] * S
        found.append(v[:, i] - (S @ x[:, i, :, :, None]).squeeze(-1))
        S = S + (beta[:, i, :, None] * found[-1]).unsqueeze(-1) * k[:, i, :, None, :]
        left.append(v[:, i] - (S @ x[:, i, :, :, None]).squeeze(-1))
        memory.append(S.norm(dim=(-2, -1)))
    return Tracking(torch.stack(found, 1), torch.stack(left, 1), torch.stack(memory, 1))


def tracking_bound(run: Tracking, factors: Gates) -> Gates:
    """The theorem's bound of |e_t| in each row and head, from the contraction factors |1 - beta a|.

    >>> error = torch.tensor([1.0, 0.5]).view(1, 2, 1, 1)
    >>> tracking_bound(Tracking(2 * error, error, error[..., 0]), torch.full((1, 2, 1), 0.5)).flatten().tolist()
    [1.0, 0.5]
    """
    bound = [run.left[:, 0].norm(dim=-1)]
    if run.left.shape[1] > 1:
        rho = factors[:, 1:].amax(1)
        r = (run.found[:, 1:] - run.left[:, :-1]).norm(dim=-1).amax(1)
        for _ in range(1, run.left.shape[1]):  # the sum as it is made, which serves for rho = 1 as well
            bound.append(rho * (bound[-1] + r))
    return torch.stack(bound, 1)


def spread(steps: Float[Tensor, "..."]) -> Spread:
    """How steps beta a are distributed.

    >>> spread(torch.tensor([0.5, 1.0, 3.0])).outside
    0.3333333333333333
    """
    steps = steps.double().flatten()
    levels = steps.quantile(torch.tensor(QUANTILES, dtype=torch.float64, device=steps.device))
    return Spread(
        mean=float(steps.mean()),
        least=float(steps.min()),
        quantiles=tuple(levels.tolist()),
        most=float(steps.max()),
        outside=float(((steps <= 0) | (steps >= 2)).double().mean()),
    )


def _growth(norms: Float[Tensor, "b w h"], window: int) -> Growth:
    return Growth(
        tokens=window,
        most=float(norms.max()),
        median=float(norms.quantile(0.5)),
        heads=tuple(norms.amax((0, 1)).tolist()),
    )


def _look(layer: Mechanism, x: Stream) -> StabilityLook | None:
    return stability_of(layer.inputs(x)) if isinstance(layer, DeltaMechanism) else None
