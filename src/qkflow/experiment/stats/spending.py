r"""The error rate of each round of a study whose seeds accumulate (Lan and DeMets 1983).

A study is judged after rounds with n_1 < n_2 < ... seeds, and round k may spend pi_k of the error rate. The sum of the
differences is a random walk S_k with variance n_k. A two-sided test at level a_k in round k has the boundary b_k:

    a_k = 2 \Phi(-b_k / sqrt(n_k)),       P(|S_k| >= b_k, |S_j| < b_j for all j < k) = pi_k

The rounds share their first seeds, so a study that errs in one round often errs in the next one too: the levels a_k sum
to more than the error that is spent, here to about 1.5 times as much. The density of S_k between the boundaries is
carried from round to round by Gauss quadrature, as in Armitage, McPherson and Rowe (1969).

K. K. G. Lan and D. L. DeMets, Discrete sequential boundaries for clinical trials, Biometrika 70 (1983).
P. Armitage, C. K. McPherson and B. C. Rowe, Repeated significance tests on accumulating data, JRSS A 132 (1969).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

_NODES = 80


@functools.cache
def round_levels(seeds: tuple[int, ...], spent: tuple[float, ...]) -> tuple[float, ...]:
    """The level a_k of each round, given the seeds by the end of the round and the error pi_k it may spend.

    >>> [round(level, 4) for level in round_levels((5, 10), (0.025, 0.025))]
    [0.025, 0.0336]
    """
    from scipy.special import ndtr

    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    levels: list[float] = []
    u, mass = np.zeros(1), np.ones(1)  # before the first seed the sum is 0
    for k, (n, error) in enumerate(zip(seeds, spent, strict=True)):
        step = float(np.sqrt(n - seeds[k - 1])) if k else float(np.sqrt(n))

        def crossing(b: float, u: np.ndarray = u, mass: np.ndarray = mass, step: float = step) -> float:
            """P(|S_k| >= b), given the probability mass at the nodes u of round k - 1."""
            return float((mass * (ndtr((u - b) / step) + ndtr((-u - b) / step))).sum())

        boundary = _boundary(crossing, error, n)
        levels.append(float(2 * ndtr(-boundary / np.sqrt(n))))
        inside = boundary * nodes
        density = (mass * np.exp(-((inside[:, None] - u) ** 2) / (2 * step**2))).sum(1) / (np.sqrt(2 * np.pi) * step)
        u, mass = inside, density * weights * boundary
    return tuple(levels)


def _boundary(crossing: Callable[[float], float], error: float, n: int) -> float:
    """The boundary that is crossed with this probability, by bisection."""
    low, high = 0.0, 40 * float(np.sqrt(n))
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if crossing(middle) > error else (low, middle)
    return high
