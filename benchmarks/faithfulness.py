"""Time comprehensiveness, sufficiency and AOPC of many instances: batched against one text at a time.

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

from timing import Comparison, compare_first, parse_arguments, print_comparisons, time_alternately

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


def make_instances(config: ClassifierConfig, lengths: tuple[int, int], n: int) -> list[Instance]:
    """Return random texts whose last token is never deleted."""
    rng, instances = random.Random(0), []
    for _ in range(n):
        t = rng.randint(*lengths)
        tokens = tuple(rng.randrange(2, config.vocabulary) for _ in range(t))
        instances.append(
            Instance(tokens=tokens, label=rng.randrange(config.classes), rationale=(t // 2,), protected=(t - 1,))
        )
    return instances


def largest_difference(a: Faithfulness, b: Faithfulness) -> float:
    """Return the largest difference between two results, over all metrics."""
    pairs = [(x, vars(b)[name]) for name, x in vars(a).items() if isinstance(x, np.ndarray)]
    for ranking, scores in a.rankings.items():
        pairs += [(x, vars(b.rankings[ranking])[name]) for name, x in vars(scores).items()]
    return max(float(np.abs(x.astype(np.float64) - y).max()) for x, y in pairs)


def compare(name: str, rounds: int, share: float) -> list[Comparison]:
    """Compare the two ways for one shape of model and text."""
    config, lengths, n = SHAPES[name]
    torch.manual_seed(0)
    read = reader(Classifier(config))
    instances = make_instances(config, lengths, max(2, int(share * n)))
    results: dict[str, Faithfulness] = {}

    def run(batch: int, key: str) -> None:
        results[key] = evaluate_faithfulness(read, instances, rankings=RANKINGS, batch=batch)

    times = time_alternately(
        {"batched": lambda: run(256, "batched"), "one text at a time": lambda: run(1, "single")},
        rounds=rounds,
        warmup=0,
    )
    difference = largest_difference(results["batched"], results["single"])
    print(f"{name}: {len(instances)} texts of {lengths[0]} to {lengths[1]} tokens, largest difference {difference:.1e}")
    if not difference < 1e-4:
        raise SystemExit(f"{name}: batched and one text at a time differ by {difference}")
    return compare_first(
        f"{name}, {lengths[0]} to {lengths[1]} tokens", times, amount=len(instances), unit="instances/s"
    )


if __name__ == "__main__":
    args = parse_arguments(__doc__)
    table: list[Comparison] = []
    for shape in SHAPES if not args.quick else ("agreement", "posts"):
        table += compare(
            shape, rounds=2 if args.quick else 3 if shape == "passages" else 7, share=0.2 if args.quick else 1.0
        )
    print_comparisons(table, args.json)
