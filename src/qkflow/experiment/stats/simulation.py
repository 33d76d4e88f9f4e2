"""Error rates and power by simulation: many studies, drawn from real runs and judged at once by the rule of a study."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Real

from qkflow.experiment.stats.paired import crossed
from qkflow.experiment.stats.rounds import Rule, run_tests

OPEN, BETTER, WORSE, EQUIVALENT = range(4)
KINDS = ("undecided", "better", "worse", "equivalent")
"""The verdict of each code."""


class Outcomes(NamedTuple):
    """The verdicts of many studies."""

    codes: Int[np.ndarray, "studies arms"]
    """Index into `KINDS`."""
    rounds: Int[np.ndarray, "studies arms"]
    """The round that decided the arm; 0 if none did."""

    def by(self, round: int) -> np.ndarray:
        """The verdicts that were known after a round."""
        return np.where(self.rounds <= round, self.codes, OPEN)


def judge_studies(
    differences: Float[np.ndarray, "studies arms seeds documents"],
    sizes: Real[np.ndarray, " documents"],
    *,
    loss: float,
    rule: Rule,
    rounds: int | None = None,
) -> Outcomes:
    """The outcomes of studies with these differences of each arm to the baseline, in the unit of `loss`.

    Studies end with the last round (or `rounds`) or the last round whose seeds they have.

    >>> differences = np.random.default_rng(0).normal([[[0.0]], [[9.0]]], 0.1, (2, 5, 1))[None]
    >>> outcomes = judge_studies(differences, np.ones(1), loss=9.0, rule=Rule(seeds_by_round=(5,), spending=(1.0,)))
    >>> [KINDS[code] for code in outcomes.codes[0]]
    ['undecided', 'worse']
    """
    studies, arms, seeds, _ = differences.shape
    codes, decided = np.zeros((studies, arms), int), np.zeros((studies, arms), int)
    for round, count in enumerate(rule.seeds_by_round[:rounds], 1):
        if count > seeds:
            break
        before = codes.copy()
        for state in np.unique(before, axis=0):
            is_open = state == OPEN
            if not is_open.any():
                continue
            group = np.flatnonzero((before == state).all(1))
            errors = crossed(differences[group][:, is_open, :count], sizes)
            tests = run_tests(
                errors,
                errors.by_seed,
                rule=rule,
                round=round,
                loss=np.full(len(group), loss),
                n_equivalent=int((state == EQUIVALENT).sum()),
                n_different=int(((state == BETTER) | (state == WORSE)).sum()),
            )
            verdicts = np.where(tests.is_equivalent, EQUIVALENT, OPEN)
            verdicts = np.where(tests.is_different, np.where(errors.mean < 0, BETTER, WORSE), verdicts)
            rows, columns = np.ix_(group, np.flatnonzero(is_open))
            codes[rows, columns] = verdicts
            decided[rows, columns] = np.where(verdicts != OPEN, round, 0)
    return Outcomes(codes, decided)


class Calibration(NamedTuple):
    """Runs that differ in nothing but seeds, as `benchmarks/calibration.py` records them."""

    name: str
    nats: Float[np.ndarray, "data_seeds starts documents"]
    bytes: Real[np.ndarray, " documents"]
    record: dict[str, Any]
    """The corpus and the training config."""

    @property
    def losses(self) -> np.ndarray:
        """Bits per byte of each run, [data seeds, starts]."""
        return self.nats.sum(-1) / math.log(2) / self.bytes.sum()

    @property
    def spread(self) -> float:
        """Standard deviation of the difference of two runs on the same data, as a fraction of the mean loss."""
        return math.sqrt(2 * self.losses.var(axis=1, ddof=1).mean()) / float(self.losses.mean())

    def residuals(self) -> np.ndarray:
        """Bits of each document of each run minus the mean over the starts of its data seed, [runs, documents].

        Scaled so that their variance is that of a run.
        """
        bits, starts = self.nats / math.log(2), self.nats.shape[1]
        centred = (bits - bits.mean(1, keepdims=True)) * math.sqrt(starts / (starts - 1))
        return centred.reshape(-1, bits.shape[-1])


def read_calibration(path: Path | str) -> Calibration:
    """Read a record of calibration runs."""
    path = Path(path)
    with np.load(path) as arrays:
        record = json.loads(str(arrays["record"]))
        return Calibration(path.stem, arrays["nats"].astype(np.float64), arrays["bytes"], record)


def draw_families(
    calibration: Calibration, rng: np.random.Generator, *, studies: int, seeds: int, pool: np.ndarray | None = None
) -> Float[np.ndarray, "studies arms seeds documents"]:
    """Differences of equal arms in bits per document: real runs, each at most once per study.

    A study draws data seeds; the starts of a data seed are the baseline and at most three arms in random order. `pool`
    are the data seeds to draw from, for intervals by resampling; a seed that occurs twice is drawn twice as often.
    """
    starts = calibration.nats.shape[1]
    arms = min(3, starts - 1)
    weights = np.ones(len(calibration.nats)) if pool is None else np.bincount(pool, minlength=len(calibration.nats))
    with np.errstate(divide="ignore"):
        keys = np.log(rng.random((studies, len(weights)))) / weights  # the largest: a weighted draw, none of them twice
    data = np.argsort(-keys, axis=1)[:, :seeds, None]
    order = np.argsort(rng.random((studies, seeds, starts)), axis=2)[..., : arms + 1]
    runs = np.moveaxis(calibration.nats[data, order], 2, 1) / math.log(2)
    return runs[:, 1:] - runs[:, :1]


def draw_differences(
    calibration: Calibration,
    rng: np.random.Generator,
    *,
    studies: int,
    arms: int,
    seeds: int,
    spreads: Sequence[float] | None = None,
    tails: float | None = None,
) -> Float[np.ndarray, "studies arms seeds documents"]:
    """Differences of arms that equal the baseline, in bits per document, drawn from the residuals of real runs.

    `spreads` multiplies the residuals of the baseline and of each arm. `tails` gives the residuals the heavy tails of
    Student's t with so many degrees of freedom, without changing their variance.
    """
    pool = calibration.residuals()
    runs = pool[rng.integers(0, len(pool), (studies, arms + 1, seeds))]
    if tails is not None:
        factors = np.sqrt((tails - 2) / rng.chisquare(tails, (studies, arms + 1, seeds)))
        runs = runs * factors[..., None]
    if spreads is not None:
        runs = runs * np.asarray(spreads, np.float64)[:, None, None]
    return runs[:, 1:] - runs[:, :1]
