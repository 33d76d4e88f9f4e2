r"""Paired differences over seeds and documents that cross, and their error for new seeds *and* new documents.

A run's loss is a ratio, all its bits over all the bytes. With d_ij the bits that the arm took more than the baseline on
document j under seed i, b_j the document's bytes and B their sum:

    d_i = \sum_j d_ij / B        m = mean_i d_i        s^2 = var_i d_i
    z_ij = (d_ij - b_j d_i) / B                         what document j does to d_i (a ratio, linearised)
    V_doc = k \sum_j (mean_i z_ij)^2                    V_int = k \sum_ij (z_ij - mean_i z_ij)^2 / (n (n - 1))
    error^2 = s^2 / n + V_c                             V_c = max(0, V_doc - V_int)

s^2 / n holds the seeds and their interaction with the documents, V_doc the documents and the same interaction: V_c is
what the documents add. k makes V_doc unbiased for documents that differ alike per byte however unequal their sizes, and
its degrees of freedom are counted likewise: one long document among short ones is hardly more than one.

The interval is the wider of two: this error with the degrees of freedom of Welch and Satterthwaite, and the plain t
over seeds. In simulations at a nominal 5 %, the first alone errs in up to 9 % with two seeds (an s that is small by
luck leaves the documents' many degrees of freedom in charge), the second alone in 40 % and more where documents differ;
the wider of the two in 6 % at most, whether documents add nothing or everything.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Real

from qkflow.experiment.stats.t_dist import StdErr, combined, tail

Numbers = np.ndarray | np.floating
"""An array, or the scalar that numpy makes of one without dimensions."""


class Paired(NamedTuple):
    """Paired differences and their errors; every part may carry leading dimensions, one study each."""

    by_seed: np.ndarray
    mean: Numbers
    spread: Numbers
    error: Numbers
    freedom: Numbers
    interaction: Numbers
    """V_int."""

    @property
    def yardsticks(self) -> tuple[StdErr, StdErr]:
        """Seeds alone, and seeds with documents: an interval is the wider of theirs, a p value the larger."""
        seeds = self.by_seed.shape[-1]
        return (self.spread / math.sqrt(seeds), seeds - 1), (self.error, self.freedom)

    def p(self) -> Numbers:
        """Probability of a mean as far from zero in either direction if the truth were zero."""
        alone, both = (tail(np.abs(self.mean), one) for one in self.yardsticks)
        return 2 * np.maximum(alone, both)


def paired(
    arm: Float[np.ndarray, "*studies seeds documents"],
    baseline: Float[np.ndarray, "*studies seeds documents"],
    sizes: Real[np.ndarray, " documents"],
) -> Paired:
    """The equations above, for two seeds or more: nats of each document under each seed, and its bytes.

    >>> flat = np.full((3, 4), 10.0)
    >>> found = paired(flat + np.array([[1.0], [2.0], [3.0]]) * np.log(2), flat, np.full(4, 5))
    >>> found.by_seed.round(3).tolist(), found.spread.round(3).item(), found.freedom.item()
    ([0.2, 0.4, 0.6], 0.2, 2.0)
    """
    return crossed((arm.astype(np.float64) - baseline) / math.log(2), sizes)


def crossed(
    differences: Float[np.ndarray, "*studies seeds documents"], sizes: Real[np.ndarray, " documents"]
) -> Paired:
    """The same for differences in any unit, each of a whole document.

    >>> crossed(np.array([[1.0, 3.0], [3.0, 5.0]]), np.ones(2)).by_seed.tolist()
    [2.0, 4.0]
    """
    total, seeds = sizes.sum(), differences.shape[-2]
    by_seed = differences.sum(-1) / total
    spread = by_seed.std(-1, ddof=1)
    pulls = (differences - by_seed[..., None] * sizes) / total  # z
    common = pulls.mean(-2)
    k, freedom = _documents(sizes / total)
    alone = k * np.square(common).sum(-1)
    interaction = k * np.square(pulls - common[..., None, :]).sum((-1, -2)) / (seeds * (seeds - 1))
    error, freedom = combined(spread**2 / seeds, seeds - 1, np.maximum(0, alone - interaction), freedom)
    return Paired(by_seed, by_seed.mean(-1), spread, error, freedom, interaction)


def _documents(weights: Float[np.ndarray, " documents"]) -> tuple[float, float]:
    r"""The factor k that makes V_doc unbiased, and its degrees of freedom, if documents vary alike per byte.

    Then z = W (I - 1 w^T) c with independent c_j and W = diag(w), so z^T z has the mean tr G and the variance 2 tr G^2,
    G_jk = w_j w_k (\delta_jk - w_j - w_k + w^T w): freedom = (tr G)^2 / tr G^2, and k = w^T w / tr G. Equal sizes give
    D - 1 and D / (D - 1). One document says nothing about others: k = 0.
    """
    square = weights @ weights
    squares = weights**2
    trace = squares @ (1 - 2 * weights + square)
    if trace <= 1e-12:
        return 0.0, 1.0
    first, second = squares @ weights, squares @ squares
    off = square**4 - 4 * square**2 * first + 2 * square * second + 2 * first**2
    diagonal = squares**2 @ (1 + 2 * square - 4 * weights)
    freedom = trace**2 / (off + diagonal) if trace > 1e-5 else 1.0  # below, the sums have lost their digits
    return float(square / trace), float(np.clip(freedom, 1, len(weights) - 1))
