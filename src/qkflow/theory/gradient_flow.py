r"""The reduced gradient flow of the QK and OV circuits (arXiv 2608.06776).

A text has m informative and n uninformative tokens. QK raises the scores of the informative tokens by mu_QK; OV raises
the logit of the right one of M classes by mu_OV for each unit of attention on them. Both start at 0.

    \alpha = m e^{\mu_QK} / (m e^{\mu_QK} + n)           attention on the informative tokens               (1)
    L      = log(1 + (M-1) e^{-z}),   z = \alpha \mu_OV                                                    (2)
    \mu_OV' = \eta \alpha / (b (e^z + M-1))                                                                (3)
    \mu_QK' = r \eta (M-1) \alpha (1-\alpha) \mu_OV / (M b^2 (e^z + M-1))                                  (4)

Time grows like 1 / L, so (3) and (4) are stiff in time. Their quotient contains neither e^z nor eta, and z increases
monotonically from 0. With z as the independent variable nothing is stiff, the final loss is reached exactly, and time
is integrated as a third variable.

    d\mu_QK / d\mu_OV = r (M-1) (1-\alpha) \mu_OV / (M b) =: p                                              (5)
    d\mu_OV / dz = 1 / (\alpha + \alpha (1-\alpha) \mu_OV p),   dt / d\mu_OV = b (e^z + M-1) / (\eta \alpha)   (6)

(5) is separable. This gives an exact invariant and, with Wright's omega (\omega + log \omega = x), the attention:

    (m/n) (e^{\mu_QK} - 1) + \mu_QK = r (M-1) / (2 M b) \mu_OV^2 =: s                                       (7)
    \alpha = \omega / (1 + \omega),   \omega = wrightomega(m/n + log(m/n) + s)                              (8)

`integrate_flow` uses only (5) and (6), `alpha_at` only (2) and (8), so each verifies the other.

| symbol   | here            |
|----------|-----------------|
| m, n     | `informative`, `uninformative` |
| M        | `classes`       |
| eta, r   | `eta` of OV, and the ratio of the QK rate to it |
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Float

from qkflow.errors import NotFiniteError, UsageError

Curve = Float[np.ndarray, " points"]
MIN_LOSS = 1e-300
"""Below this loss, e^z overflows."""


@dataclass(frozen=True, kw_only=True)
class FlowConfig:
    """Constants of the flow; the defaults are those of the authors' notebook."""

    informative: int = 5
    """Number of informative tokens."""
    uninformative: int = 50
    """Number of uninformative tokens."""
    classes: int = 20
    """Number of classes."""
    b: float = 50.0
    """Slowdown of both circuits relative to the gradient of a single logit; it enters QK twice."""
    r: float = 1.0
    """Ratio of the QK learning rate to the OV learning rate."""
    eta: float = 1.0
    """Learning rate of OV; it only rescales time."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, minimum = getattr(self, field.name), 2 if field.name == "classes" else 0
            if not math.isfinite(value) or value < minimum or value == 0:
                raise UsageError(f"{field.name} must be {'at least 2' if minimum else 'above 0'}, got {value}")


@dataclass(frozen=True, kw_only=True, eq=False)
class FlowPath:
    """A solution of the flow, evenly spaced in z (late points are evenly spaced in log loss)."""

    time: Curve
    mu_qk: Curve
    mu_ov: Curve
    alpha: Curve
    """Attention on the informative tokens."""
    loss: Curve


def integrate_flow(config: FlowConfig, *, loss: float = 1e-4, points: int = 256) -> FlowPath:
    """Integrate the flow until the loss is `loss`, with an adaptive Runge-Kutta method of order 8.

    >>> path = integrate_flow(FlowConfig(r=10.0), loss=1e-8)
    >>> round(float(path.alpha[0]), 4), round(float(path.alpha[-1]), 4), f"{path.loss[-1]:.3g}"
    (0.0909, 0.9754, '1e-08')
    """
    from scipy.integrate import solve_ivp

    if points < 2:
        raise UsageError(f"points must be at least 2, got {points}")
    if (z_end := _z_at_loss(config, loss)) == 0:
        raise UsageError(f"loss must be below log(classes), the initial loss, got {loss}")
    grid = np.linspace(0.0, z_end, points)
    M, b, odds = config.classes, config.b, config.informative / config.uninformative

    def derivatives(z: float, y: np.ndarray) -> list[float]:
        mu_qk, mu_ov, _ = y.tolist()
        weight = odds * math.exp(mu_qk)
        alpha, beta = weight / (1 + weight), 1 / (1 + weight)  # (1); beta = 1 - alpha without cancellation
        p = config.r * (M - 1) * beta * mu_ov / (M * b)  # (5)
        dmu_ov = 1 / (alpha + alpha * beta * mu_ov * p)  # (6)
        return [p * dmu_ov, dmu_ov, b * (math.exp(z) + M - 1) / (config.eta * alpha) * dmu_ov]

    # DOP853 has dense output of order 7, so the invariant holds to 1e-8 between its steps as well
    solution = solve_ivp(
        derivatives, (0.0, z_end), [0.0, 0.0, 0.0], method="DOP853", t_eval=grid, rtol=1e-11, atol=1e-12
    )
    if not solution.success:
        raise NotFiniteError(f"the flow could not be integrated to a loss of {loss}: {solution.message}")
    mu_qk, mu_ov, time = solution.y
    weight = odds * np.exp(mu_qk)
    return FlowPath(
        time=time, mu_qk=mu_qk, mu_ov=mu_ov, alpha=weight / (1 + weight), loss=np.log1p((M - 1) * np.exp(-grid))
    )


def invariant_error(config: FlowConfig, mu_qk: Curve, mu_ov: Curve) -> Curve:
    """Return the error of (7): relative where its sides exceed 1, absolute elsewhere. It is 0 along the flow.

    >>> path = integrate_flow(FlowConfig())
    >>> bool(abs(invariant_error(FlowConfig(), path.mu_qk, path.mu_ov)).max() < 1e-8)
    True
    """
    left = config.informative / config.uninformative * np.expm1(mu_qk) + mu_qk
    right = _s_coefficient(config) * mu_ov**2
    return (left - right) / np.maximum(1.0, right)


def alpha_at(config: FlowConfig, loss: float) -> float:
    """Return the attention on the informative tokens at a given loss, from (2) and (8).

    >>> [round(alpha_at(FlowConfig(r=r), 1e-4), 3) for r in (0.01, 0.1, 1.0, 10.0, 100.0)]
    [0.149, 0.287, 0.591, 0.922, 0.993]
    """
    from scipy.optimize import root_scalar

    z = _z_at_loss(config, loss)
    if z == 0:
        return _alpha_closed_form(config, 0.0)
    mu_max = z / _alpha_closed_form(config, 0.0)  # alpha never decreases, so mu_OV = z / alpha is in [z, mu_max]
    result = root_scalar(
        lambda mu: _alpha_closed_form(config, mu) * mu - z,
        bracket=(z, mu_max),
        method="brentq",
        xtol=1e-14 * mu_max,
        rtol=1e-14,
    )
    return _alpha_closed_form(config, float(result.root))


def _z_at_loss(config: FlowConfig, loss: float) -> float:
    """Invert (2)."""
    start = math.log(config.classes)
    if not MIN_LOSS <= loss <= start:
        raise UsageError(f"loss must be from {MIN_LOSS} to log(classes) = {start:.4g}, the initial loss; got {loss}")
    return max(0.0, math.log(config.classes - 1) - math.log(math.expm1(loss)))


def _alpha_closed_form(config: FlowConfig, mu_ov: float) -> float:
    """Return alpha by (8)."""
    from scipy.special import wrightomega

    odds = config.informative / config.uninformative
    omega = float(wrightomega(odds + math.log(odds) + _s_coefficient(config) * mu_ov**2))
    return omega / (1 + omega)


def _s_coefficient(config: FlowConfig) -> float:
    """Return s / mu_OV^2 of (7)."""
    return config.r * (config.classes - 1) / (2 * config.classes * config.b)
