r"""What a study can see: the chance to find a true difference, the smallest one it finds, the seeds it takes.

"Found" is a verdict in the right direction. With n seeds whose paired differences spread by a *known* sigma, and
documents that add an error c which no seed removes, the mean is normal and its interval has a random half width w(s):

    power(e) = E_s \Phi((e - w(s)) / v),    v^2 = sigma^2 / n + c^2,    s^2 = sigma^2 \chi^2_{n-1} / (n - 1)      (1)

For c = 0 this is the noncentral t. A study that has run has its own error instead, (m - e) / error ~ t_f: it announces

    power(e) = P(t_f > q - e / error),      q the quantile of its interval                                       (2)
    smallest = (q + t_f's quantile at 0.8) error                                                                 (3)

(2) is the chance given the width that its interval came to have. Put in place of sigma in (1), the estimated spread of
three seeds says 64 % on average where half are found, and averaged over the uncertainty of that spread it says 70 %
where 80 % are; (2) is within six points at every power and three seeds, within one at 80 %, and exact for (3).
"""

from __future__ import annotations

import functools
import math

import numpy as np

from qkflow.experiment.stats.t_dist import StdErr, combined, half_width, quantile, tail

FOUND = 0.8
"""The power that `smallest` speaks of: four studies in five."""

RELATIVE_SPREAD = 0.0082
"""Standard deviation of the paired differences of two arms over seeds, as a part of the baseline's loss.

Measured by `benchmarks/calibration.py` on standard against standard: 24 data seeds with 3 starts each, 100 thousand
parameters, 819 thousand tokens of python-stdlib, 2.470 bits per byte; sqrt(2 x mean variance over starts) / mean loss.
It stands in where two seeds have no spread worth the name; other sizes and corpora have others.
"""

_NODES = 200


def power(effect: float, *, spread: float, seeds: int, alpha: float, documents: float = 0.0) -> float:
    """The chance to find a true difference if the spread over seeds is known: equation (1).

    >>> round(power(0.02, spread=0.01, seeds=5, alpha=0.05), 3)
    0.909
    """
    if not effect >= 0:
        raise ValueError(f"effect must be a size, zero or more, got {effect}")
    return _found(effect, *_widths(spread=spread, seeds=seeds, alpha=alpha, documents=documents))


def smallest_effect(*, spread: float, seeds: int, alpha: float, documents: float = 0.0) -> float:
    """The true difference that is found four times in five if the spread over seeds is known.

    >>> effect = smallest_effect(spread=0.01, seeds=5, alpha=0.05)
    >>> round(effect, 4), round(power(effect, spread=0.01, seeds=5, alpha=0.05), 3)
    (0.0168, 0.8)
    """
    widths, error = _widths(spread=spread, seeds=seeds, alpha=alpha, documents=documents)
    low, high = 0.0, float(widths.max()) + 2 * error  # at the widest interval there is, 98 % are found
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _found(middle, widths, error) < FOUND else (low, middle)
    return high


def _widths(*, spread: float, seeds: int, alpha: float, documents: float) -> tuple[np.ndarray, float]:
    """Half widths that intervals come to have, each as likely as the next, and the error of the mean: w(s) and v."""
    if seeds < 2:
        raise ValueError(f"power needs at least 2 seeds, got {seeds}: one has no spread")
    if not (min(spread, documents) >= 0 and max(spread, documents) > 0 and 0 < alpha < 1):
        raise ValueError(
            f"power needs a spread or documents above 0 and alpha in (0, 1), got {spread}, {documents} and {alpha}"
        )
    variance = spread**2 / seeds
    seen = variance * _chi_squares(seeds - 1) / (seeds - 1)
    widths = half_width(1 - alpha, (np.sqrt(seen), seeds - 1))
    if documents > 0:
        widths = np.maximum(widths, half_width(1 - alpha, combined(seen, seeds - 1, documents**2, math.inf)))
    return widths, math.sqrt(variance + documents**2)


@functools.cache
def _chi_squares(freedom: int) -> np.ndarray:
    """The middles of equally likely parts of chi squared."""
    from scipy.special import chdtri

    return chdtri(freedom, 1 - (np.arange(_NODES) + 0.5) / _NODES)


def _found(effect: float, widths: np.ndarray, error: float) -> float:
    from scipy.special import ndtr

    return float(ndtr((effect - widths) / error).mean())


def seeds_needed(
    effect: float, *, spread: float, alpha: float, documents: float = 0.0, chance: float = FOUND, most: int = 1000
) -> int | None:
    """The fewest seeds that find a true difference with this chance; None if `most` are not enough.

    >>> seeds_needed(0.02, spread=0.01, alpha=0.05), seeds_needed(0.001, spread=0.01, alpha=0.05, documents=0.01)
    (5, None)
    """

    def enough(seeds: int) -> bool:
        return power(effect, spread=spread, seeds=seeds, alpha=alpha, documents=documents) >= chance

    few, many = 1, 2
    while not enough(many):
        if many >= most:
            return None
        few, many = many, min(2 * many, most)
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if enough(middle) else (middle, many)
    return many


def announced_power(effect: float, *yardsticks: StdErr, alpha: float) -> float:
    """The chance that a study with these errors finds a true difference: equation (2), the least over its yardsticks.

    >>> round(announced_power(0.02, (0.005, 4), alpha=0.05), 3)
    0.856
    """
    return min(float(tail(half_width(1 - alpha, one) - effect, one)) for one in yardsticks)


def announced_smallest(*yardsticks: StdErr, alpha: float) -> float:
    """The true difference that a study with these errors finds four times in five: equation (3).

    >>> round(announced_smallest((0.005, 4), alpha=0.05), 4)
    0.0186
    """
    return max(float(half_width(1 - alpha, one) + quantile(FOUND, one[1]) * one[0]) for one in yardsticks)
