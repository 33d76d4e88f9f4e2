r"""Learning curves: the tokens and the seconds an arm needs to reach the baseline's loss.

Both curves are read on the plateau of the learning rate, at the higher of their two losses at its end, which both have
reached. If the arm is ahead, this is the baseline's final loss and the ratio is below one; otherwise it is the arm's.

    ratio = x_arm(L) / x_baseline(L),      L = max(L_arm, L_baseline),      x tokens or seconds

A curve is smoothed and made monotone before it is read, because an evaluation that is low by chance would otherwise
reach the loss first. Each loss is replaced by a local line fit in log tokens through its neighbours within a third,
then pool-adjacent-violators makes the losses fall. Between points the loss is linear in log x. Swapping the arms
inverts the ratio. The interval over seeds is Student's, on logarithms.
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
    losses: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class CostRatio:
    """Tokens and seconds to a loss that both arms reached, relative to the baseline. Below one, the arm is faster.

    Read on the plateau of the learning rate, where both runs have the same rate, never inside a decay.
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
    """Seeds whose arm reached the baseline's loss at the end of the plateau; the others are read at the arm's loss."""
    seeds: int
    """Seeds with two curves."""


def cost_ratio(
    arm: Sequence[Curve], baseline: Sequence[Curve], plateau: float = 0.8, *, level: float = 0.95
) -> CostRatio | None:
    """Compare the curves of two arms, seed by seed; None if no seed has two curves to read.

    The plateau ends with the last evaluation at or before `plateau` times a run's tokens.

    >>> tokens = (100, 200, 400, 500)
    >>> slow = Curve(seed=0, tokens=tokens, seconds=(1.0, 2.0, 4.0, 5.0), losses=(3.0, 2.5, 2.0, 1.8))
    >>> fast = Curve(seed=0, tokens=tokens, seconds=(2.0, 4.0, 8.0, 10.0), losses=(2.5, 2.0, 1.5, 1.4))
    >>> ratio = cost_ratio([fast], [slow])
    >>> round(ratio.tokens, 3), round(ratio.seconds, 3), ratio.reached
    (0.5, 1.0, 1)
    """
    baseline_by_seed = {curve.seed: curve for curve in baseline}
    log_ratios, reached = [], 0
    for curve in arm:
        ours, theirs = _monotone(curve, plateau), None
        if curve.seed in baseline_by_seed:
            theirs = _monotone(baseline_by_seed[curve.seed], plateau)
        if ours is None or theirs is None:
            continue
        target = max(ours[0][-1], theirs[0][-1])
        reached += bool(ours[0][-1] <= theirs[0][-1])
        log_ratios.append([_log_x(ours[0], ours[i], target) - _log_x(theirs[0], theirs[i], target) for i in (1, 2)])
    if not log_ratios:
        return None
    tokens, seconds = (_interval(logs, level) for logs in np.array(log_ratios).T)
    return CostRatio(
        tokens=tokens[0],
        tokens_low=tokens[1],
        tokens_high=tokens[2],
        seconds=seconds[0],
        seconds_low=seconds[1],
        seconds_high=seconds[2],
        reached=reached,
        seeds=len(log_ratios),
    )


def _monotone(curve: Curve, plateau: float) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Strictly falling losses with their log tokens and log seconds; None with fewer than two evaluations."""
    end = plateau * curve.tokens[-1] * (1 + 1e-9) if curve.tokens else 0.0
    evaluations = [
        (loss, math.log(tokens), math.log(seconds))
        for tokens, seconds, loss in zip(curve.tokens, curve.seconds, curve.losses, strict=True)
        if 0 < tokens <= end and seconds > 0
    ]
    if len(evaluations) < 2:
        return None
    points = np.array(evaluations)
    points[:, 0] = _smooth(points[:, 0], points[:, 1])
    pools: list[tuple[np.ndarray, int]] = []  # pool adjacent violators: (mean, size)
    for point in points:
        mean, size = point, 1
        while pools and pools[-1][0][0] <= mean[0]:
            last_mean, last_size = pools.pop()
            mean, size = (last_size * last_mean + size * mean) / (last_size + size), last_size + size
        pools.append((mean, size))
    losses, tokens, seconds = np.array([mean for mean, _ in pools]).T
    return losses, tokens, seconds


def _smooth(losses: np.ndarray, logs: np.ndarray) -> np.ndarray:
    """Each loss on the least-squares line through the points whose tokens are within a third, if there are three."""
    smooth = losses.copy()
    for index, x in enumerate(logs):
        near = np.abs(logs - x) <= math.log(4 / 3)
        if near.sum() > 2:
            centred = logs[near] - logs[near].mean()
            slope = (centred @ losses[near]) / (centred @ centred)
            smooth[index] = losses[near].mean() + slope * (x - logs[near].mean())
    return smooth


def _log_x(losses: np.ndarray, logs: np.ndarray, target: float) -> float:
    """Where a falling curve reaches the target; its first point if it starts below."""
    return float(np.interp(-target, -losses, logs))


def _interval(logs: np.ndarray, level: float) -> tuple[float, float | None, float | None]:
    mean, n = float(logs.mean()), len(logs)
    if n < 2:
        return math.exp(mean), None, None
    width = float(half_width(level, (logs.std(ddof=1) / math.sqrt(n), n - 1)))
    return math.exp(mean), math.exp(mean - width), math.exp(mean + width)
