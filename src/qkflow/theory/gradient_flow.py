r"""The reduced gradient flow of two circuits: how fast a model looks against how fast it learns what to say.

Of a text's tokens m are informative and n are not; QK raises the score of the informative ones by mu_QK, OV raises the
right one of M classes by mu_OV for what is attended to; both begin at 0 (arXiv 2608.06776).

    \alpha = m e^{\mu_QK} / (m e^{\mu_QK} + n)           the attention on informative tokens               (1)
    L      = log(1 + (M-1) e^{-z}),   z = \alpha \mu_OV                                                    (2)
    \mu_OV' = \eta \alpha / (b (e^z + M-1))                                                                (3)
    \mu_QK' = r \eta (M-1) \alpha (1-\alpha) \mu_OV / (M b^2 (e^z + M-1))                                  (4)

Time grows like 1 / L, so (3) and (4) are not followed in time. Their quotient has neither e^z nor eta in it, and z
rises all the way from 0: with z as the clock nothing is stiff, L is reached exactly, and time is integrated beside.

    d\mu_QK / d\mu_OV = r (M-1) (1-\alpha) \mu_OV / (M b) =: p                                              (5)
    d\mu_OV / dz = 1 / (\alpha + \alpha (1-\alpha) \mu_OV p),   dt / d\mu_OV = b (e^z + M-1) / (\eta \alpha)   (6)

(5) separates, which gives an exact invariant and, by Wright's omega (\omega + log \omega = x), the attention itself:

    (m/n) (e^{\mu_QK} - 1) + \mu_QK = r (M-1) / (2 M b) \mu_OV^2 =: s                                       (7)
    \alpha = \omega / (1 + \omega),   \omega = wrightomega(m/n + log(m/n) + s)                              (8)

`flow` integrates (5) and (6) and knows nothing of (7); `alpha_at` has only (2) and (8). So each checks the other.

| symbol   | here            |
|----------|-----------------|
| m, n     | `informative`, `uninformative` |
| M        | `classes`       |
| eta, r   | `eta` of OV, and how many times as fast QK learns |
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Float

from qkflow.errors import NotFiniteError, UsageError

Curve = Float[np.ndarray, " points"]
_LEAST = 1e-300
"""Below this loss e^z is no number any more."""


@dataclass(frozen=True, kw_only=True)
class FlowConfig:
    """The constants of the flow, as the authors' notebook has them."""

    informative: int = 5
    """Tokens of a text that tell the class."""
    uninformative: int = 50
    """Tokens that do not."""
    classes: int = 20
    """Classes, equally frequent."""
    b: float = 50.0
    """How much slower both circuits learn than the gradient of a single logit; QK feels it twice."""
    r: float = 1.0
    """How many times as fast QK learns as OV."""
    eta: float = 1.0
    """The rate of OV: it stretches time and changes nothing else."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 2 if field.name == "classes" else 0
            if not math.isfinite(value) or value < least or value == 0:
                raise UsageError(f"{field.name} must be {'at least 2' if least else 'above 0'}, got {value}")


@dataclass(frozen=True, kw_only=True, eq=False)
class FlowPath:
    """The flow from its start to a loss: evenly spaced in z, so that late points are evenly spaced in log loss."""

    time: Curve
    mu_qk: Curve
    mu_ov: Curve
    alpha: Curve
    """The attention on informative tokens."""
    loss: Curve


def flow(config: FlowConfig, *, loss: float = 1e-4, points: int = 256) -> FlowPath:
    """The flow until the loss has fallen to `loss`, by an adaptive Runge-Kutta method of order 8.

    >>> path = flow(FlowConfig(r=10.0), loss=1e-8)
    >>> round(float(path.alpha[0]), 4), round(float(path.alpha[-1]), 4), f"{path.loss[-1]:.3g}"
    (0.0909, 0.9754, '1e-08')
    """
    from scipy.integrate import solve_ivp

    if points < 2:
        raise UsageError(f"a path has at least 2 points, got {points}")
    if (end := _depth(config, loss)) == 0:
        raise UsageError(f"loss must be below log(classes), where the flow begins, got {loss}")
    grid = np.linspace(0.0, end, points)
    M, b, odds = config.classes, config.b, config.informative / config.uninformative

    def slope(z: float, at: np.ndarray) -> list[float]:
        mu_qk, mu_ov, _ = at.tolist()
        weight = odds * math.exp(mu_qk)
        alpha, rest = weight / (1 + weight), 1 / (1 + weight)  # (1), and 1 - alpha with all its digits
        p = config.r * (M - 1) * rest * mu_ov / (M * b)  # (5)
        ov = 1 / (alpha + alpha * rest * mu_ov * p)  # (6)
        return [p * ov, ov, b * (math.exp(z) + M - 1) / (config.eta * alpha) * ov]

    # DOP853: the dense output between its steps is of order 7, and the invariant asks for 1e-8 there too
    found = solve_ivp(slope, (0.0, end), [0.0, 0.0, 0.0], method="DOP853", t_eval=grid, rtol=1e-11, atol=1e-12)
    if not found.success:
        raise NotFiniteError(f"the flow could not be followed to a loss of {loss}: {found.message}")
    mu_qk, mu_ov, time = found.y
    weight = odds * np.exp(mu_qk)
    return FlowPath(
        time=time, mu_qk=mu_qk, mu_ov=mu_ov, alpha=weight / (1 + weight), loss=np.log1p((M - 1) * np.exp(-grid))
    )


def invariant(config: FlowConfig, mu_qk: Curve, mu_ov: Curve) -> Curve:
    """By how much (7) is missed, as a part of its sides (or as it is, where they are below 1): 0 along the flow.

    >>> bool(abs(invariant(FlowConfig(), (path := flow(FlowConfig())).mu_qk, path.mu_ov)).max() < 1e-8)
    True
    """
    left = config.informative / config.uninformative * np.expm1(mu_qk) + mu_qk
    right = _spent(config) * mu_ov**2
    return (left - right) / np.maximum(1.0, right)


def alpha_at(config: FlowConfig, loss: float) -> float:
    """The attention on informative tokens when the loss has fallen to `loss`, from (2) and (8).

    >>> [round(alpha_at(FlowConfig(r=r), 1e-4), 3) for r in (0.01, 0.1, 1.0, 10.0, 100.0)]
    [0.149, 0.287, 0.591, 0.922, 0.993]
    """
    from scipy.optimize import root_scalar

    z = _depth(config, loss)
    if z == 0:
        return _closed(config, 0.0)
    most = z / _closed(config, 0.0)  # alpha never falls, so mu_OV = z / alpha is between z and this
    found = root_scalar(
        lambda mu: _closed(config, mu) * mu - z, bracket=(z, most), method="brentq", xtol=1e-14 * most, rtol=1e-14
    )
    return _closed(config, float(found.root))


def _depth(config: FlowConfig, loss: float) -> float:
    """The z at which the loss is `loss`."""
    start = math.log(config.classes)
    if not _LEAST <= loss <= start:
        raise UsageError(f"loss must be from {_LEAST} to log(classes) = {start:.4g}, where the flow begins; got {loss}")
    return max(0.0, math.log(config.classes - 1) - math.log(math.expm1(loss)))


def _closed(config: FlowConfig, mu_ov: float) -> float:
    """Equation (8)."""
    from scipy.special import wrightomega

    odds = config.informative / config.uninformative
    omega = float(wrightomega(odds + math.log(odds) + _spent(config) * mu_ov**2))
    return omega / (1 + omega)


def _spent(config: FlowConfig) -> float:
    return config.r * (config.classes - 1) / (2 * config.classes * config.b)
