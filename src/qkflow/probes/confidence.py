r"""How much of a model's attention lies on the words that the answer rests on, and how few it attends to.

    mass     m = \sum_{s \in rationale} a_s                  a: the shares of attention, see `pooling`
    AC(tau)  the percentage of instances with m >= tau       our definition: the published one is not known
    entropy  H = -\sum_s a_s \log a_s  in nats               exp(H): as many tokens, attended to evenly, have it too

Instances without a rationale have no mass (not a number), and count in no AC. The area under AC, from 0 to 1, is the
mean mass: a curve says more than its value at 0.5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from qkflow.probes.pooling import shares

_ROUNDING = 1e-6
"""A mass this little below tau reaches it: half of an even attention, in single precision, may be less than a half."""

Numbers = Float[Tensor, " n"] | Float[np.ndarray, " n"] | Sequence[float]


def mass(attention: Float[Tensor, "b t"], rationale: Bool[Tensor, "b t"]) -> Float[Tensor, " b"]:
    """The part of each row's attention that lies on its rationale; not a number where there is none.

    >>> mass(torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[True, False, True]])).item()
    0.699999988079071
    >>> mass(torch.zeros(1, 2), torch.tensor([[True, False]])).item()
    0.0
    """
    within = shares(attention).where(rationale, 0).sum(-1)
    return within.masked_fill(~rationale.any(-1), math.nan)


def confidence(mass: Numbers, tau: float = 0.5) -> float:
    """AC(tau): the percentage of instances with at least this mass, of those that have one.

    >>> confidence([0.2, 0.5, 0.7, 0.9, math.nan], tau=0.5)
    75.0
    """
    return float(confidence_curve(mass, [tau])[0])


def confidence_curve(mass: Numbers, taus: Sequence[float] | Float[np.ndarray, " k"]) -> Float64[np.ndarray, " k"]:
    """AC at each tau.

    >>> confidence_curve([0.2, 0.5, 0.9], [0.0, 0.5, 1.0]).round(1).tolist()
    [100.0, 66.7, 0.0]
    """
    known = np.asarray(mass, dtype=np.float64)
    known = known[~np.isnan(known)]
    found = reached(known[:, None], np.asarray(taus, dtype=np.float64))
    return 100 * found.mean(0) if len(known) else np.full(len(taus), math.nan)


def reached(mass: np.ndarray, tau: float | np.ndarray) -> np.ndarray:
    """Whether each mass is at least tau, up to rounding.

    >>> reached(np.array([0.4, 0.4999999, 0.9]), 0.5).tolist()
    [False, True, True]
    """
    return mass >= tau - _ROUNDING


def entropy(attention: Float[Tensor, "b t"]) -> Float[Tensor, " b"]:
    """The entropy of each row's shares in nats; not a number for a row of zeros, which attends to nothing.

    >>> entropy(torch.tensor([[0.0, 1.0], [0.5, 0.5]])).exp().tolist()
    [1.0, 2.0]
    """
    part = shares(attention)
    found = -torch.xlogy(part, part).sum(-1) + 0.0  # no negative zero
    return found.masked_fill((part == 0).all(-1), math.nan)


def effective_tokens(attention: Float[Tensor, "b t"]) -> Float[Tensor, " b"]:
    """How many tokens each row attends to: as many as it would take if all had the same share.

    >>> effective_tokens(torch.tensor([[0.25, 0.25, 0.25, 0.25, 0.0]])).item()
    4.0
    """
    return entropy(attention).exp()
