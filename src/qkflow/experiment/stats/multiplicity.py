r"""P values adjusted for several arms: the chance that any of them errs stays at the level of one.

Holm (1979) multiplies the smallest p value by the number of arms, the next one by one less, and so on. It holds
whatever the dependence. All arms here share the baseline, so their errors are positively correlated, and the step-down
max-t procedure of Dunnett (1955) and Dunnett and Tamhane (1991) needs less: it replaces m p by

    P(min_b p_b <= p) = 1 - E_z \prod_b P(|T_b| < c_b | Z_0 = z),       c_b the two-sided quantile of p
    T_b = Z_b / S_b,    Z_b = l_b Z_0 + sqrt(1 - l_b^2) e_b,    f_b S_b^2 ~ chi^2_{f_b}

over the arms b that are still to be tested. Z_0 is the error of the baseline and l_b^2 its share in the variance of arm
b's difference. Every arm has its own degrees of freedom f_b. The integrals over Z_0 and S_b are Gauss quadratures; each
arm's conditional probabilities are scaled so that their mean is exactly p. The adjusted p value is the smaller of this
one and Holm's.

Three approximations, all on the side of larger p values: shares are at most 1/2 (a baseline that spreads as much as the
arm; a larger share would mean a stronger correlation), the S_b are independent (they share the baseline's runs too),
and hypotheses that are not tested (arms whose runs failed, or that have a verdict) count as independent.

C. W. Dunnett, A multiple comparison procedure for comparing several treatments with a control, JASA 50 (1955).
C. W. Dunnett and A. C. Tamhane, Step-down multiple tests for comparing treatments with a control in unbalanced one-way
layouts, Statistics in Medicine 10 (1991).   S. Holm, A simple sequentially rejective multiple test procedure,
Scandinavian Journal of Statistics 6 (1979).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from qkflow.experiment.stats.t_dist import quantile

MAX_SHARE = 0.5
"""The largest share of the baseline in the variance of a difference that the correlation may use."""

_NORMAL_NODES, _SPREAD_NODES = 24, 32


def holm(p_values: Sequence[float | None]) -> tuple[float | None, ...]:
    """P values after Holm's correction. A missing one counts as a comparison and stays missing.

    >>> holm([0.01, 0.04, None, 0.03])
    (0.04, 0.09, None, 0.09)
    """
    known = np.array([p for p in p_values if p is not None], dtype=np.float64)
    adjusted = iter(holm_adjusted(known, others=len(p_values) - len(known)).tolist())
    return tuple(None if p is None else next(adjusted) for p in p_values)


def holm_adjusted(p: Float[np.ndarray, "*studies arms"], others: Any = 0) -> Float[np.ndarray, "*studies arms"]:
    """Holm's adjusted p values along the last axis. `others` counts hypotheses of the family without a p value.

    >>> holm_adjusted(np.array([0.01, 0.04, 0.03]), others=1).tolist()
    [0.04, 0.09, 0.09]
    """
    order = np.argsort(p, axis=-1, kind="stable")
    remaining = np.arange(p.shape[-1], 0, -1) + np.asarray(others)[..., None]
    return _unsort(np.minimum(1.0, remaining * np.take_along_axis(p, order, -1)), order)


def max_t_adjusted(
    p: Float[np.ndarray, "*studies arms"],
    freedom: Float[np.ndarray, "*studies arms"],
    share: Float[np.ndarray, "*studies arms"],
    others: Any = 0,
) -> Float[np.ndarray, "*studies arms"]:
    """Step-down max-t adjusted p values along the last axis, at most Holm's.

    `share` is the share of the baseline in the variance of each arm's difference, `others` as in `holm_adjusted`.

    >>> p = np.array([0.02, 0.02, 0.5])
    >>> independent = max_t_adjusted(p, np.full(3, 4.0), np.zeros(3))
    >>> shared = max_t_adjusted(p, np.full(3, 4.0), np.full(3, 0.5))
    >>> independent.round(4).tolist(), shared.round(4).tolist(), holm_adjusted(p).round(4).tolist()
    ([0.0588, 0.0588, 0.5], [0.0573, 0.0573, 0.5], [0.06, 0.06, 0.5])
    """
    bound = holm_adjusted(p, others)
    order = np.argsort(p, axis=-1, kind="stable")
    p_sorted, f, squared = (np.take_along_axis(np.asarray(x, np.float64), order, -1) for x in (p, freedom, share))
    load = np.sqrt(np.clip(squared, 0.0, MAX_SHARE))
    z_weights = _normal_nodes()[1]
    adjusted = np.empty_like(p_sorted)
    with np.errstate(all="ignore"):  # anything that is not finite falls back to Holm
        for k in range(p.shape[-1]):
            threshold = p_sorted[..., k, None]
            reject = _conditional(threshold, f[..., k:], load[..., k:])
            none = ((1 - reject).prod(-2) * z_weights).sum(-1) * (1 - threshold[..., 0]) ** others
            adjusted[..., k] = 1 - none
    adjusted = _unsort(adjusted, order)
    return np.where(np.isfinite(adjusted), np.clip(adjusted, p, bound), bound)


def _conditional(p: np.ndarray, freedom: np.ndarray, load: np.ndarray) -> np.ndarray:
    """P(p_b <= p | Z_0) at the quadrature nodes: [..., arms, nodes]."""
    from scipy.special import chdtri, gammaln, ndtr

    z, z_weights = _normal_nodes()
    x, x_weights = _unit_nodes()
    c = -quantile(p / 2, freedom)[..., None]
    f = freedom[..., None]
    s_max = np.minimum(np.sqrt(chdtri(f, 1e-13) / f), 10 / c)  # beyond, |T| > c has no chance
    s = s_max * x
    log_density = np.log(2) + f / 2 * np.log(f / 2) - gammaln(f / 2) + (f - 1) * np.log(s) - f * s**2 / 2
    weight = np.exp(log_density) * s_max * x_weights
    rest = np.sqrt(1 - load**2)[..., None, None]
    shift = load[..., None, None] * z[:, None]
    cs = (c * s)[..., None, :]
    tails = ndtr((-cs - shift) / rest) + ndtr((-cs + shift) / rest)
    reject = (tails * weight[..., None, :]).sum(-1)
    reject *= (np.broadcast_to(p, freedom.shape) / (reject * z_weights).sum(-1))[..., None]
    return np.minimum(reject, 1.0)


@functools.cache
def _normal_nodes() -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of a mean over |Z|, Z standard normal: functions of Z_0 here are even."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NORMAL_NODES)
    half = nodes > 0
    return nodes[half], weights[half] / weights[half].sum()


@functools.cache
def _unit_nodes() -> tuple[np.ndarray, np.ndarray]:
    nodes, weights = np.polynomial.legendre.leggauss(_SPREAD_NODES)
    return (nodes + 1) / 2, weights / 2


def _unsort(stepwise: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Adjusted p values never fall along the steps; returned in the order of the arms."""
    adjusted = np.empty_like(stepwise)
    np.put_along_axis(adjusted, order, np.maximum.accumulate(stepwise, axis=-1), -1)
    return adjusted
