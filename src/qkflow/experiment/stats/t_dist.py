"""Student's t with an error and its degrees of freedom: tails, half widths, and the sum of two errors.

A yardstick is a pair (error, freedom): what lies |x| from the truth is |x| / error on Student's t with that freedom.
Numbers or arrays alike; scipy is imported when a function is first called.
"""

from __future__ import annotations

from typing import Any

import numpy as np

StdErr = tuple[Any, Any]
"""A standard error and its degrees of freedom."""


def quantile(probability: Any, freedom: Any) -> Any:
    """The value that Student's t stays below with this probability.

    >>> round(float(quantile(0.975, 4)), 3)
    2.776
    """
    from scipy.special import stdtrit

    return stdtrit(freedom, probability)


def tail(distance: Any, yardstick: StdErr) -> Any:
    """P(T > distance / error); an error of zero leaves nothing to chance (0, and 1/2 at a distance of zero).

    >>> round(float(tail(2.776, (1.0, 4))), 3), float(tail(0.1, (0.0, 4)))
    (0.025, 0.0)
    """
    from scipy.special import stdtr

    error, freedom = yardstick
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(np.equal(distance, 0), 0.0, np.divide(distance, error))
    return stdtr(freedom, -t)


def half_width(level: float, yardstick: StdErr) -> Any:
    """Half the width of the interval of this confidence.

    >>> round(float(half_width(0.95, (0.01, 4))), 4)
    0.0278
    """
    error, freedom = yardstick
    return quantile((1 + level) / 2, freedom) * error


def combined(variance: Any, freedom: Any, other: Any, other_freedom: Any) -> StdErr:
    """The yardstick of a sum of two independent variances, by Welch and Satterthwaite.

        freedom = (v + w)^2 / (v^2 / f_v + w^2 / f_w)

    >>> error, freedom = combined(9.0, 4, 16.0, 8)
    >>> float(error), round(float(freedom), 3)
    (5.0, 11.962)
    """
    total = np.add(variance, other)
    blur = np.square(variance) / freedom + np.square(other) / other_freedom
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.sqrt(total), np.where(total > 0, np.square(total) / blur, freedom)
