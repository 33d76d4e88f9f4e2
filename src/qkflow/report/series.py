"""Learning curves of several seeds as a line with a band."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qkflow.experiment.stats.curves import Curve

MOST = 200
"""Points of a drawn curve; longer ones are thinned evenly."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """The mean over seeds at each evaluation, with the least and the greatest."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    runs: list[int]
    """How many seeds each point has."""

    @classmethod
    def empty(cls) -> Band:
        """No points at all."""
        return cls(x=[], mean=[], low=[], high=[], runs=[])

    def after(self, part: float) -> list[float]:
        """The ends of the band once this part of its length is over."""
        begin = part * self.x[-1] if self.x else 0.0
        points = zip(self.x, self.low, self.high, strict=True)
        return [end for x, low, high in points if x >= begin for end in (low, high)]


def by_evaluation(curves: Sequence[Curve], x: str) -> Band:
    """The curves of one arm together: the n-th evaluations of all seeds make a point.

    >>> run = Curve(seed=0, tokens=(10, 20), seconds=(1.0, 2.0), bits_per_byte=(4.0, 2.0))
    >>> again = Curve(seed=1, tokens=(10, 20), seconds=(1.0, 3.0), bits_per_byte=(5.0, 3.0))
    >>> band = by_evaluation([run, again], "seconds")
    >>> band.x, band.mean, band.low
    ([1.0, 2.5], [4.5, 2.5], [4.0, 2.0])
    """
    return _band([(list(getattr(curve, x)), list(curve.bits_per_byte)) for curve in curves])


def differences(arm: Sequence[Curve], baseline: Sequence[Curve], x: str) -> Band:
    """The arm minus the baseline of the same seed, at the arm's evaluations; the baseline is read between its own."""
    base = {curve.seed: curve for curve in baseline if len(curve.tokens)}
    found = []
    for curve in arm:
        if curve.seed not in base:
            continue
        places, losses = np.asarray(getattr(base[curve.seed], x), float), np.asarray(base[curve.seed].bits_per_byte)
        here = np.asarray(getattr(curve, x), float)
        apart = np.asarray(curve.bits_per_byte) - np.interp(here, places, losses)
        apart[(here < places[0] * (1 - 1e-9)) | (here > places[-1] * (1 + 1e-9))] = np.nan
        found.append((here.tolist(), apart.tolist()))
    return _band(found)


def usual(values: Sequence[float], room: float) -> list[float] | None:
    """A range that holds the values with some room; None where they are not two.

    >>> usual([1.0, 2.0], 0.1)
    [0.9, 2.1]
    """
    known = [value for value in values if math.isfinite(value)]
    if not known or min(known) == max(known):
        return None
    space = room * (max(known) - min(known))
    return [min(known) - space, max(known) + space]


def _band(curves: Sequence[tuple[list[Any], list[float]]]) -> Band:
    band = Band.empty()
    longest = max((len(x) for x, _ in curves), default=0)
    for point in _thin(longest):
        at = [(x[point], y[point]) for x, y in curves if point < len(x) and math.isfinite(y[point])]
        if not at:
            continue
        ys = [y for _, y in at]
        band.x.append(_round(sum(x for x, _ in at) / len(at)))
        band.mean.append(_round(sum(ys) / len(ys)))
        band.low.append(_round(min(ys)))
        band.high.append(_round(max(ys)))
        band.runs.append(len(at))
    return band


def _thin(points: int) -> list[int]:
    return sorted({round(n) for n in np.linspace(0, points - 1, min(points, MOST))}) if points else []


def _round(value: float) -> float:
    return float(f"{value:.7g}")
