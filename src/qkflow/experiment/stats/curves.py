r"""Reading learning curves: how many tokens, and how many seconds, an arm needs to come where the baseline ends.

Both curves are read on the plateau of the learning rate, at the worse of their two losses at its end, which both have
reached: if the arm is ahead that is the baseline's end, and the ratio is below one; if it is behind, its own.

    ratio = x_arm(L) / x_baseline(L),      L = max(L_arm, L_baseline),      x tokens or seconds

A curve is made smooth and falling before it is read, since an evaluation that is low by chance would be "first" there:
each gives way to the straight line in log tokens through its neighbours within a third, and pools of neighbours that
rise stand at their mean; between them the loss is a straight line in log x. Swapping the arms inverts the ratio. Its
interval is Student's, on logarithms, over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qkflow.experiment.stats.t_dist import half_width


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The evaluations of one run, in the order of its steps. Times are training only."""

    seed: int
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    bits_per_byte: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class CostRatio:
    """Tokens and seconds to a loss that both arms reached, as a part of the baseline's; below one, the arm is faster.

    Read on the plateau of the learning rate, where both runs stand at the same rate; never inside a decay.
    """

    tokens: float | None
    """Tokens needed, over the baseline's: the geometric mean over seeds."""
    tokens_low: float | None
    """Lower end of the interval; None with one seed."""
    tokens_high: float | None
    seconds: float | None
    """Seconds needed, over the baseline's."""
    seconds_low: float | None
    seconds_high: float | None
    reached: int
    """Seeds whose arm came to the loss at the end of the baseline's plateau; the others are read at the arm's own."""
    seeds: int
    """Seeds read."""


def reach(
    arm: Sequence[Curve], baseline: Sequence[Curve], plateau: float = 0.8, *, level: float = 0.95
) -> CostRatio | None:
    """Read the curves of two arms against each other, seed by seed; None if no seed has two curves to read.

    The plateau ends with the last evaluation at or before `plateau` times a run's tokens.

    >>> tokens = (100, 200, 400, 500)
    >>> slow = Curve(seed=0, tokens=tokens, seconds=(1.0, 2.0, 4.0, 5.0), bits_per_byte=(3.0, 2.5, 2.0, 1.8))
    >>> fast = Curve(seed=0, tokens=tokens, seconds=(2.0, 4.0, 8.0, 10.0), bits_per_byte=(2.5, 2.0, 1.5, 1.4))
    >>> read = reach([fast], [slow])
    >>> round(read.tokens, 3), round(read.seconds, 3), read.reached
    (0.5, 1.0, 1)
    """
    theirs = {curve.seed: curve for curve in baseline}
    logs, reached = [], 0
    for curve in arm:
        ours, other = _falling(curve, plateau), None
        if curve.seed in theirs:
            other = _falling(theirs[curve.seed], plateau)
        if ours is None or other is None:
            continue
        target = max(ours[0][-1], other[0][-1])
        reached += bool(ours[0][-1] <= other[0][-1])
        logs.append([_where(ours[0], ours[i], target) - _where(other[0], other[i], target) for i in (1, 2)])
    if not logs:
        return None
    tokens, seconds = np.array(logs).T
    tokens_read, seconds_read = _interval(tokens, level), _interval(seconds, level)
    return CostRatio(
        tokens=tokens_read[0],
        tokens_low=tokens_read[1],
        tokens_high=tokens_read[2],
        seconds=seconds_read[0],
        seconds_low=seconds_read[1],
        seconds_high=seconds_read[2],
        reached=reached,
        seeds=len(logs),
    )


def _falling(curve: Curve, plateau: float) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Losses that strictly fall, with the log tokens and log seconds of each; None without two evaluations to read.

    Pool adjacent violators: a pool whose mean is not below the one before it joins it.
    """
    end = plateau * curve.tokens[-1] * (1 + 1e-9) if curve.tokens else 0.0
    read = [
        (loss, math.log(tokens), math.log(seconds))
        for tokens, seconds, loss in zip(curve.tokens, curve.seconds, curve.bits_per_byte, strict=True)
        if 0 < tokens <= end and seconds > 0
    ]
    if len(read) < 2:
        return None
    points = np.array(read)
    points[:, 0] = _smooth(points[:, 0], points[:, 1])
    pools: list[tuple[np.ndarray, int]] = []
    for point in points:
        mean, size = point, 1
        while pools and pools[-1][0][0] <= mean[0]:
            before, many = pools.pop()
            mean, size = (many * before + size * mean) / (many + size), many + size
        pools.append((mean, size))
    losses, tokens, seconds = np.array([mean for mean, _ in pools]).T
    return losses, tokens, seconds


def _smooth(losses: np.ndarray, logs: np.ndarray) -> np.ndarray:
    """Each loss on the least-squares line through those whose tokens are within a third; as it is if these are two."""
    smooth = losses.copy()
    for place, x in enumerate(logs):
        near = np.abs(logs - x) <= math.log(4 / 3)
        if near.sum() > 2:
            away = logs[near] - logs[near].mean()
            smooth[place] = losses[near].mean() + (away @ losses[near]) / (away @ away) * (x - logs[near].mean())
    return smooth


def _where(losses: np.ndarray, logs: np.ndarray, target: float) -> float:
    """Where a falling curve comes to the target; its first point if it starts below: no more can be said."""
    return float(np.interp(-target, -losses, logs))


def _interval(logs: np.ndarray, level: float) -> tuple[float, float | None, float | None]:
    mean, n = float(logs.mean()), len(logs)
    if n < 2:
        return math.exp(mean), None, None
    width = float(half_width(level, (logs.std(ddof=1) / math.sqrt(n), n - 1)))
    return math.exp(mean), math.exp(mean - width), math.exp(mean + width)
