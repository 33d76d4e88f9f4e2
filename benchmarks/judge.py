"""False and true verdicts of `qkflow.judge` on tables whose true effects are known.

    python benchmarks/judge.py                  1,000 studies per row, about 15 minutes
    python benchmarks/judge.py --studies 100

Three arms against a baseline. A run's loss is 2, plus an effect of its seed that all arms share (standard deviation
0.05, except in `unpaired`, where no seed is shared), plus noise of its own (0.01, with the exceptions of the row).

false       studies of equal arms with a "better" or "worse" for any arm
equivalent  studies with an "equivalent" for any arm where every true difference is the margin (0.02)
found       arms with the right one of "better" and "worse" where the true differences are 0.02, -0.02 and 0.02
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

import qkflow

NOISE = 0.01
EFFECT = 0.02
SIGNS = (1, -1, 1)
BLOCKS = 20


class Case(NamedTuple):
    """How losses are drawn."""

    name: str
    noise: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    """Relative noise of the baseline and the arms."""
    heavy_tails: bool = False
    is_paired: bool = True
    blocks: int = 1
    looks: int = 1
    """Times that the table is judged while it grows; `seeds` of the last."""


CASES = (
    Case("equal noise"),
    Case("one arm with 4 times the noise", noise=(1, 4, 1, 1)),
    Case("baseline with 4 times the noise", noise=(4, 1, 1, 1)),
    Case("heavy tails (t with 3 degrees of freedom)", heavy_tails=True),
    Case("unpaired", is_paired=False),
    Case(f"{BLOCKS} blocks", blocks=BLOCKS),
    Case("three looks", looks=3),
)


def main() -> None:
    """Print the rates of each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 5, 10])
    args = parser.parse_args()
    table = Table("case", "seeds", "false", "equivalent", "found")
    for case in CASES:
        for seeds in args.seeds:
            rates = measure(case, seeds, args.studies)
            table.add_row(case.name, str(seeds), *(f"{rate:.1%}" for rate in rates))
            print(case.name, seeds, *(f"{rate:.3f}" for rate in rates), flush=True)
    Console().print(table)


def measure(case: Case, seeds: int, studies: int) -> tuple[float, float, float]:
    """Rates of false verdicts, of false equivalents, and of arms with the right verdict."""
    rng, false, equivalent, found = np.random.default_rng(0), 0, 0, 0
    for _ in range(studies):
        kinds = judge_looks(draw(rng, case, seeds, 0.0, (1, 1, 1)), case, seeds, 1e-9)
        false += any(kind in ("better", "worse") for kind in kinds)
        kinds = judge_looks(draw(rng, case, seeds, EFFECT, (1, 1, 1)), case, seeds, EFFECT)
        equivalent += "equivalent" in kinds
        kinds = judge_looks(draw(rng, case, seeds, EFFECT, SIGNS), case, seeds, 1e-9)
        found += sum(kind == ("worse" if sign > 0 else "better") for kind, sign in zip(kinds, SIGNS, strict=True))
    return false / studies, equivalent / studies, found / studies / len(SIGNS)


def draw(rng: np.random.Generator, case: Case, seeds: int, effect: float, signs: tuple[int, ...]) -> list[Any]:
    """The rows (arm, seed, loss), or (arm, seed, loss, block), of one study."""
    common, block_effect = rng.normal(0, 0.05, seeds), rng.normal(0, 0.02, (4, case.blocks))
    rows: list[Any] = []
    for arm, (noise, sign) in enumerate(zip(case.noise, (0, *signs), strict=True)):
        own = rng.standard_t(3, seeds) / 3**0.5 if case.heavy_tails else rng.standard_normal(seeds)
        for seed in range(seeds):
            loss = 2 + sign * effect + NOISE * noise * own[seed] + (common[seed] if case.is_paired else 0.0)
            name = f"{arm}-{seed}" if not case.is_paired else str(seed)
            if case.blocks == 1:
                rows.append((f"arm{arm}", name, loss))
            else:
                rows += [(f"arm{arm}", name, loss + block_effect[arm, b], str(b)) for b in range(case.blocks)]
    return rows


def judge_looks(rows: list[Any], case: Case, seeds: int, margin: float) -> list[str]:
    """The verdicts on the arms: with several looks, the first that decides."""
    if case.looks == 1:
        return verdicts(rows, margin, None)
    first = list[str]()
    for look, count in enumerate(growing(seeds, case.looks), 1):
        kinds = verdicts([row for row in rows if int(row[1]) < count], margin, look)
        first = [old if old != "undecided" else new for old, new in zip(first or kinds, kinds, strict=True)]
    return first


def growing(seeds: int, looks: int) -> Iterator[int]:
    """Numbers of seeds at each look, at least 2."""
    return (max(2, round(seeds * look / looks)) for look in range(1, looks + 1))


def verdicts(rows: list[Any], margin: float, look: int | None) -> list[str]:
    """The verdicts of `qkflow.judge` on one table."""
    columns = {
        name: [row[i] for row in rows] for i, name in enumerate(("arm", "seed", "loss", "block")[: len(rows[0])])
    }
    result = qkflow.judge(columns, baseline="arm0", margin_absolute=margin, look=look)
    return [verdict.kind for verdict in result.verdicts]


if __name__ == "__main__":
    main()
