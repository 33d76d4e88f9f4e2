"""Comprehensiveness, sufficiency and AOPC of many instances: batched, against one text at a time.

python benchmarks/faithfulness.py [--quick] [--json FILE] [--threads N]

Both run `evaluate_faithfulness` with every ranking on random texts and random models, which cost as much as trained
ones: once with the default batches, once with batches of one. The results of the two must be equal. Short texts gain
most, because a single one is dominated by the call overhead. A single long text keeps a core busy.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from qkflow.data.tasks.base import Instance
from qkflow.models import Classifier, ClassifierConfig
from qkflow.probes.faithfulness import Faithfulness, Ranking, evaluate_faithfulness
from qkflow.probes.readers import reader

from side_by_side import Row, arguments, race, report, rows

RANKINGS: tuple[Ranking, ...] = ("attention", "gradient", "random")
SHAPES = {  # name: (config, shortest and longest text, instances)
    "agreement": (ClassifierConfig(width=64, layers=1, heads=4, vocabulary=500, classes=2), (5, 12), 200),
    "posts": (ClassifierConfig(width=64, layers=1, heads=4, hidden=256, vocabulary=5000, classes=3), (10, 40), 100),
    "passages": (
        ClassifierConfig(width=300, layers=6, heads=6, hidden=800, vocabulary=5000, classes=2, norm=True),
        (100, 256),
        2,
    ),
}


def texts(config: ClassifierConfig, lengths: tuple[int, int], n: int) -> list[Instance]:
    """Random texts whose last token asks, and is kept."""
    draw, made = random.Random(0), []
    for _ in range(n):
        t = draw.randint(*lengths)
        tokens = tuple(draw.randrange(2, config.vocabulary) for _ in range(t))
        made.append(
            Instance(tokens=tokens, label=draw.randrange(config.classes), rationale=(t // 2,), protected=(t - 1,))
        )
    return made


def furthest(one: Faithfulness, other: Faithfulness) -> float:
    """The largest difference between two looks, in any number."""
    pairs = [(x, vars(other)[name]) for name, x in vars(one).items() if isinstance(x, np.ndarray)]
    for ranking, found in one.rankings.items():
        pairs += [(x, vars(other.rankings[ranking])[name]) for name, x in vars(found).items()]
    return max(float(np.abs(x.astype(np.float64) - y).max()) for x, y in pairs)


def compare(name: str, rounds: int, share: float) -> list[Row]:
    """One shape of model and text."""
    config, lengths, n = SHAPES[name]
    torch.manual_seed(0)
    read, many = reader(Classifier(config)), texts(config, lengths, max(2, int(share * n)))
    found: dict[str, Faithfulness] = {}

    def run(batch: int, key: str) -> None:
        found[key] = evaluate_faithfulness(read, many, rankings=RANKINGS, batch=batch)

    times = race(
        {"batched": lambda: run(256, "batched"), "one text at a time": lambda: run(1, "alone")}, rounds=rounds, warm=0
    )
    apart = furthest(found["batched"], found["alone"])
    print(
        f"{name}: {len(many)} texts of {lengths[0]} to {lengths[1]} tokens, no number differs by more than {apart:.1e}"
    )
    if not apart < 1e-4:
        raise SystemExit(f"{name}: batched and one text at a time differ by {apart}")
    return rows(f"{name}, {lengths[0]} to {lengths[1]} tokens", times, amount=len(many), unit="instances/s")


if __name__ == "__main__":
    args = arguments(__doc__)
    table: list[Row] = []
    for shape in SHAPES if not args.quick else ("agreement", "posts"):
        table += compare(
            shape, rounds=2 if args.quick else 3 if shape == "passages" else 7, share=0.2 if args.quick else 1.0
        )
    report(table, args.json)
