"""Processor seconds until 80 % of studies give the correct verdict, against the design of version 0.1.

    python benchmarks/power.py
    python benchmarks/power.py --calibration tests/unit/experiment/stats/*.npz
    python benchmarks/power.py --calibration new.npz --against old.npz      the regimes differ, too

Studies are replayed on calibration runs (`benchmarks/calibration.py`): three arms and the baseline are drawn from the
residuals of real runs, and an effect is planted as a fraction of the loss, in one arm or, with alternating signs, in
all of them. A study is correct if every planted arm gets the right one of `better` and `worse`.

0.1     t test per arm, Holm's correction, one look at 4 % after a fixed number of seeds: the fewest that give 80 %
known   one z test per arm at 5 %, Bonferroni's correction, if the spread over seeds were known: what the best prior
        could reach with one look
new     rounds of seeds (`plan_rounds`) for the number of seeds with the smallest expected cost among those that give
        80 %; arms that are decided stop, and a study stops when its planted arms are decided

The cost is the expected number of runs until 80 % are correct, times the processor seconds of a run.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist

import numpy as np
from rich.console import Console
from rich.table import Table

from qkflow.experiment.stats.multiplicity import holm_adjusted
from qkflow.experiment.stats.paired import crossed
from qkflow.experiment.stats.prior import Prior
from qkflow.experiment.stats.rounds import plan_rounds
from qkflow.experiment.stats.simulation import (
    BETTER,
    WORSE,
    Calibration,
    draw_differences,
    judge_studies,
    read_calibration,
)

RECORDS = Path(__file__).parent.parent / "tests" / "unit" / "experiment" / "stats"
ARMS = 3
CHUNK = 250
EFFECTS = {0.005: 0.75, 0.01: 0.5, 0.02: 1 / 3}
"""Planted effects, as a fraction of the loss, with the target of the cost relative to 0.1."""


def main() -> None:
    """Print a table for each calibration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", type=Path, nargs="+", default=sorted(RECORDS.glob("*.npz")))
    parser.add_argument("--against", type=Path, help="the calibration that 0.1 is replayed on; by default the same")
    parser.add_argument("--studies", type=int, default=1000)
    parser.add_argument("--freedom", type=float, default=3.0, help="degrees of freedom of the prior")
    parser.add_argument("--most-seeds", type=int, default=60)
    args = parser.parse_args()
    for path in args.calibration:
        new = read_calibration(path)
        old = new if args.against is None else read_calibration(args.against)
        show(new, old, args)


def show(new: Calibration, old: Calibration, args: argparse.Namespace) -> None:
    """Print the costs of both designs."""
    loss = float(new.losses.mean())
    title = (
        f"{new.name}: {loss:.3f} bits per byte, spread of a difference {new.spread:.2%}, {new.nats.shape[2]} documents"
    )
    columns = ("planted", "effect", "seeds 0.1", "runs 0.1", "runs known", "seeds new", "runs new", "CPU s 0.1")
    table = Table(*columns, "CPU s new", "ratio", "target", title=title)
    for planted, name in (([0], "one arm"), ([0, 1, 2], "all arms")):
        for effect, target in EFFECTS.items():
            fixed = fixed_seeds(old, effect, planted, args)
            same_runs = fixed if new is old else fixed_seeds(new, effect, planted, args)
            seeds, new_runs = planned_cost(new, effect, planted, same_runs, args)
            old_runs = fixed * (ARMS + 1)
            seconds = [run_seconds(old) * old_runs, run_seconds(new) * new_runs]
            counts = [f"{fixed}", f"{old_runs}", f"{known_spread(new, effect)}", f"{seeds}", f"{new_runs:.1f}"]
            ratio = f"{seconds[1] / seconds[0]:.2f}"
            table.add_row(name, f"{effect:.1%}", *counts, *(f"{x:.0f}" for x in seconds), ratio, f"{target:.2f}")
    Console(width=120).print(table)


def known_spread(calibration: Calibration, effect: float) -> int:
    """The runs of z tests at 5 % over all arms with a power of 80 %, with at least two seeds."""
    quantile = NormalDist().inv_cdf
    seeds = ((quantile(1 - 0.05 / ARMS / 2) + quantile(0.8)) * calibration.spread / effect) ** 2
    return (ARMS + 1) * max(2, math.ceil(seeds))


def run_seconds(calibration: Calibration) -> float:
    """Processor seconds of a run; 1 if they were not recorded."""
    return float(calibration.record.get("cpu_seconds", 1.0))


def chunks(
    calibration: Calibration, effect: float, planted: list[int], seeds: int, studies: int
) -> Iterator[np.ndarray]:
    """Differences of studies with a planted effect: better in even arms, worse in odd ones."""
    rng = np.random.default_rng(0)
    signs = np.array([(-1.0 if arm % 2 == 0 else 1.0) if arm in planted else 0.0 for arm in range(ARMS)])
    shift = effect * float(calibration.losses.mean()) * signs[:, None, None] * calibration.bytes
    for begin in range(0, studies, CHUNK):
        count = min(CHUNK, studies - begin)
        yield draw_differences(calibration, rng, studies=count, arms=ARMS, seeds=seeds) + shift


def fixed_seeds(calibration: Calibration, effect: float, planted: list[int], args: argparse.Namespace) -> int:
    """The fewest seeds with which 80 % of the studies of version 0.1 are correct."""
    most = args.most_seeds
    correct = np.zeros(most + 1)
    for differences in chunks(calibration, effect, planted, most, args.studies):
        for seeds in range(2, most + 1):
            errors = crossed(differences[:, :, :seeds], calibration.bytes)
            adjusted = holm_adjusted(np.asarray(errors.p()))[:, planted]
            is_right = np.sign(np.asarray(errors.mean)[:, planted]) == [-1 if arm % 2 == 0 else 1 for arm in planted]
            correct[seeds] += ((adjusted < 0.04) & is_right).all(1).sum()
    enough = np.flatnonzero(correct >= 0.8 * args.studies)
    return int(enough[0]) if len(enough) else most


def planned_cost(
    calibration: Calibration, effect: float, planted: list[int], fixed: int, args: argparse.Namespace
) -> tuple[int, float]:
    """The planned seeds with the smallest expected number of runs among plans that give 80 %, and that number."""
    best = (0, math.inf)
    for seeds in sorted({max(2, round(fixed * share)) for share in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25)}):
        runs = expected_runs(calibration, effect, planted, seeds, args)
        best = min(best, (seeds, runs), key=lambda plan: plan[1])
    return best


def expected_runs(
    calibration: Calibration, effect: float, planted: list[int], seeds: int, args: argparse.Namespace
) -> float:
    """The expected runs of studies planned for so many seeds, up to the round by which 80 % are correct."""
    prior = Prior(spread=calibration.spread, freedom=args.freedom)
    rule = plan_rounds(seeds, is_limited=True, prior=prior)
    codes, rounds = [], []
    for differences in chunks(calibration, effect, planted, seeds, args.studies):
        outcomes = judge_studies(differences, calibration.bytes, loss=float(calibration.losses.mean()), rule=rule)
        codes.append(outcomes.codes)
        rounds.append(np.where(outcomes.rounds == 0, len(rule.seeds_by_round), outcomes.rounds))
    code, stop = np.concatenate(codes), np.concatenate(rounds)
    want = [BETTER if arm % 2 == 0 else WORSE for arm in planted]
    is_right = (code[:, planted] == want).all(1)
    counts = np.array((0, *rule.seeds_by_round))
    last = stop[:, planted].max(1)
    for round in range(1, len(counts)):
        if (is_right & (last <= round)).mean() >= 0.8:
            end = np.minimum(last, round)
            return float((counts[end] + counts[np.minimum(stop, end[:, None])].sum(1)).mean())
    return math.inf


if __name__ == "__main__":
    main()
