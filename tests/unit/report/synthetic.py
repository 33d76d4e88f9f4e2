"""Made-up studies for the tests and the benchmark of the report: any arms, seeds, failures and names."""

from __future__ import annotations

import base64
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qkflow.data import ByteTokenizer, CorpusConfig
from qkflow.experiment.decisions import StudyState
from qkflow.experiment.metrics.rationale import (
    AttentionExample,
    MetricChange,
    MetricName,
    MetricSummary,
    RationaleArm,
    RationaleMetric,
    RationaleSummary,
    TrainingPoint,
)
from qkflow.experiment.metrics.recall import GridCell, RecallGrid, RunAnswers, Tally, recall
from qkflow.experiment.result import ArmSummary, Comparison, CorpusNote, ExperimentResult
from qkflow.experiment.stats.curves import CostRatio, Curve
from qkflow.experiment.stats.paired import Difference, SpreadRatio
from qkflow.experiment.stats.verdict import Verdict
from qkflow.models import Decoder, DecoderConfig
from qkflow.training import TrainConfig
from qkflow.training.run_dir import begin, finish
from qkflow.training.tensors import model_tensors

EFFECTS = (0.0, 0.021, -0.034, 0.0008, 0.006, -0.011, 0.048, -0.002)
"""What each arm is worse by, in bits per byte, before noise."""
HOSTILE = (
    "<script>window.__pwned=1</script>",
    '"><img src=x onerror="window.__pwned=2">',
    "</script><script>window.__pwned=3</script><!--",
    "nul\x00bell\x07escape\x1b[31mred\u202ertl\nline\ttab\ud800",
    "{{ 7*7 }}{% raw %}[bold red]x[/] %{y} $x$ <a href='javascript:window.__pwned=4'>link</a>",
    '=HYPERLINK("http://example.invalid","x")',
    "w" * 300,
)
"""Names nobody should choose."""
TEXT = b'def greet(name):\n\t"""Say <b>hello</b> & </script>."""\n    return f"hi \xff\x00 {name}"  # '


def study(
    arms: Sequence[str] = ("standard", "differential"),
    *,
    seeds: int = 5,
    points: int = 20,
    tuned: bool = False,
    failed: Sequence[tuple[str, int]] = (),
    unfinished: bool = False,
    noise: float = 0.006,
) -> ExperimentResult:
    """A study's summary; `failed` names runs by arm and seed."""
    generator = np.random.default_rng(7)
    common = generator.normal(0, 0.02, seeds)
    losses = {
        name: {
            seed: 2.31
            + EFFECTS[index % len(EFFECTS)]
            + common[seed]
            + generator.normal(0, noise * (1 + 0.3 * (index % 3)))
            for seed in range(seeds if not unfinished else max(0, seeds - 1 - index))
            if (name, seed) not in failed
        }
        for index, name in enumerate(arms)
    }
    margin = 0.005 * 2.31
    comparisons = tuple(_comparison(name, losses[name], losses[arms[0]]) for name in arms[1:])
    planned = len(arms) * seeds
    return ExperimentResult(
        state=StudyState(rounds=4, ended="the budget is spent", elapsed=590.0, budget=600.0),
        folder="runs/study",
        data="python-stdlib",
        digest="9f2c4e1ab7d05563" * 4,
        baseline=arms[0],
        match="tokens",
        size="1m",
        context=256,
        margin=margin,
        error_rate=0.04,
        finished=sum(len(found) for found in losses.values()),
        runs=planned,
        arms=tuple(
            _arm(index, name, losses[name], points=points, tuned=tuned, failed=[s for a, s in failed if a == name])
            for index, name in enumerate(arms)
        ),
        comparisons=comparisons,
        verdicts=tuple(_verdict(item, margin) for item in comparisons),
        notes=(
            CorpusNote(
                name="compressibility", value="1.72 bits per byte", meaning="what LZMA needs; less means more repeats"
            ),
            CorpusNote(name="vocabulary growth", value="0.63", meaning="exponent of distinct words over words (Heaps)"),
            CorpusNote(
                name="document similarity", value="0.041", meaning="mean cosine of two documents' tf-idf vectors"
            ),
        ),
        remarks=("One seed only: no interval can be given.",) if seeds == 1 else (),
        design={"arms": [{"name": name, "steps": 800} for name in arms], "seeds": seeds, "date": "2026-01-01"},
        environment={"cpu": "a processor", "threads": 1, "versions": {"torch": "2.13.0", "qkflow": "0.1.0"}},
        command=("qkflow", "compare", "my text.txt", "--arms", ",".join(arms)),
    )


GRIDS = {
    "mqar": RecallGrid(
        task="mqar",
        chance=1 / 64,
        axes=("pairs",),
        context=64,
        cells=tuple(GridCell(pairs=pairs, length=64) for pairs in (4, 8, 16, 32)),
    ),
    "s-niah-2": RecallGrid(
        task="s-niah-2",
        chance=0.001,
        axes=("length", "depth"),
        context=256,
        cells=tuple(GridCell(length=n, depth=d) for n in (256, 512, 1024, 2048) for d in (0, 25, 50, 75, 100)),
    ),
}
"""Grids of tasks that nobody ran."""


def task(
    arms: Sequence[str] = ("standard", "differential"), *, name: str = "mqar", seeds: int = 3, **options: Any
) -> ExperimentResult:
    """A study on a task: later arms remember less, and all less of more."""
    summary = replace(study(arms, seeds=seeds, **options), data=name, unit="answer token", notes=())
    description = [
        replace(item, sentence=item.sentence.replace("per byte", "per answer token")) for item in summary.verdicts
    ]
    summary = replace(summary, verdicts=tuple(description))
    grid, generator = GRIDS[name], np.random.default_rng(3)
    harder = np.array([_hardness(cell) for cell in grid.cells])

    def answered(index: int, seed: int) -> RunAnswers:
        chances = np.clip(1.02 - harder * (0.3 + 0.25 * index) + generator.normal(0, 0.02), grid.chance, 1)
        return RunAnswers(seed=seed, tallies=tallies(dict(enumerate(generator.binomial(50, chances)))))

    runs = {arm.name: [answered(n, seed) for seed in arm.seeds] for n, arm in enumerate(summary.arms)}
    return replace(summary, recall=recall(grid, runs) if any(runs.values()) else None)


def tallies(right: Mapping[int, int], questions: int = 50) -> tuple[Tally, ...]:
    """Right answers of each cell, out of so many."""
    return tuple(Tally(instances=questions, questions=questions, right=int(found)) for found in right.values())


def _hardness(cell: GridCell) -> float:
    if cell.pairs is not None:
        return math.log2(cell.pairs / 4) / 2.5
    return math.log2((cell.length or 256) / 128) / 4 * (1.3 - (cell.depth or 0) / 100)


def _arm(
    index: int, name: str, losses: dict[int, float], *, points: int, tuned: bool, failed: Sequence[int]
) -> ArmSummary:
    found = list(losses.values())
    slow = 1 + 0.18 * index
    return ArmSummary(
        name=name,
        parameters=1_052_416 - 128 * index,
        parameters_off=-128 * index / 1_052_416,
        hidden=344 - 2 * index,
        flops_per_token=2_310_144 + 90_000 * index,
        steps=800,
        tokens=800 * 8192,
        learning_rate=0.003,
        tuning=((0.001, 2.4), (0.003, 2.31), (0.01, None)) if tuned else (),
        seeds=tuple(losses),
        losses=tuple(found),
        mean=statistics.fmean(found) if found else None,
        spread=statistics.stdev(found) if len(found) > 1 else None,
        tokens_per_second=15_500 / slow,
        peak_bytes=412_000_000 + 30_000_000 * index,
        state_bytes=1_048_576,
        curves=tuple(_curve(seed, loss, points=points, slow=slow) for seed, loss in losses.items()),
        failures=tuple(f"seed {seed}: the loss was not finite at step 312 (block 2)" for seed in failed),
    )


def _curve(seed: int, end: float, *, points: int, slow: float) -> Curve:
    generator = np.random.default_rng([seed, round(100 * slow)])
    tokens = [round(800 * 8192 * (k + 1) / points) for k in range(points)]
    drop = [end + 0.09 * (1 - k / (points - 1)) + 2.4 * (2 * k + 1) ** -1.1 for k in range(points)]
    wiggle = generator.normal(0, 0.004, points)
    losses = [
        float(value + noise * (k < points - 1)) for k, (value, noise) in enumerate(zip(drop, wiggle, strict=True))
    ]
    seconds = [t / 15_500 * slow * (1 + 0.01 * seed) for t in tokens]
    return Curve(seed=seed, tokens=tuple(tokens), seconds=tuple(seconds), losses=tuple(losses))


def _comparison(name: str, arm: dict[int, float], baseline: dict[int, float]) -> Comparison:
    pairs = [arm[seed] - baseline[seed] for seed in arm if seed in baseline]
    if not pairs:
        return Comparison(arm=name, difference=None, p_adjusted=None, spread=None, reach=None)
    n, mean = len(pairs), statistics.fmean(pairs)
    spread = statistics.stdev(pairs) if n > 1 else None
    error = None if spread is None else spread / math.sqrt(n)
    half = None if error is None else 2.8 * error
    p = None if error is None else min(1.0, math.exp(-abs(mean) / error))
    difference = Difference(
        seeds=n,
        documents=41,
        by_seed=tuple(pairs),
        mean=mean,
        spread=spread,
        error=error,
        freedom=None if error is None else n - 1.0,
        level=0.96,
        low=None if half is None else mean - half,
        high=None if half is None else mean + half,
        p=p,
        p_signs=p if n > 5 else None,
        smallest=None if error is None else 4 * error,
        prior_used=n < 3,
    )
    own, other = (statistics.stdev(x.values()) if len(x) > 2 else None for x in (arm, baseline))
    ratio = math.exp(mean * 8)
    reach = CostRatio(
        tokens=ratio,
        tokens_low=ratio * 0.9 if n > 1 else None,
        tokens_high=ratio * 1.1 if n > 1 else None,
        seconds=1.2 * ratio,
        seconds_low=1.05 * ratio if n > 1 else None,
        seconds_high=1.4 * ratio if n > 1 else None,
        reached=n,
        seeds=n,
    )
    steady = None
    if own is not None and other is not None:
        steady = SpreadRatio(arm=own, baseline=other, ratio=own / other, low=0.6, high=1.7, p=0.41)
    return Comparison(
        arm=name, difference=difference, p_adjusted=None if p is None else min(1.0, 2 * p), spread=steady, reach=reach
    )


def _verdict(item: Comparison, margin: float) -> Verdict:
    found, advice = item.difference, "About 24 seeds would decide."
    if found is None or found.low is None or found.high is None:
        why = "no seed has both runs" if found is None else "one seed has no interval"
        return Verdict(arm=item.arm, kind="undecided", sentence=f"undecided: {why}", advice=advice, difference=found)
    description = f"96% interval {found.low:+.3f} to {found.high:+.3f}, {found.seeds} seeds"
    if found.low > 0 or found.high < 0:
        kind = "worse" if found.low > 0 else "better"
        sentence = f"{kind} by {abs(found.mean):.3f} bits per byte, {description}"
        return Verdict(arm=item.arm, kind=kind, sentence=sentence, difference=found, round=1)
    is_within = -margin < found.low and found.high < margin
    kind = "equivalent" if is_within else "undecided"
    sentence = f"{kind}: {found.mean:+.3f} bits per byte, {description}"
    return Verdict(arm=item.arm, kind=kind, sentence=sentence, advice=None if is_within else advice, difference=found)


def folder(
    path: Path,
    arms: Sequence[str],
    *,
    mechanisms: Sequence[str] = ("standard", "differential"),
    excerpts: int = 3,
    layers: int = 4,
    heads: int = 4,
    width: int = 64,
) -> dict[str, Path]:
    """A study's folder with a corpus.json and a run of random weights for each arm; the runs by arm."""
    texts = [[*(TEXT * 2)[3 * n : 3 * n + 63], 256] for n in range(excerpts)]
    write(path / "corpus.json", {"notes": [], "excerpts": [{"tokens": text} for text in texts]})
    runs = {}
    for index, name in enumerate(arms):
        spec = mechanisms[index % len(mechanisms)]
        shape = DecoderConfig(width=width, layers=layers, heads=heads, hidden=2 * width, mechanism=spec)
        torch.manual_seed(index)
        model = Decoder(shape)
        with torch.no_grad():
            for parameter in model.parameters():  # blocks begin at zero: let every layer have something to show
                parameter.add_(0.08 * torch.randn_like(parameter))
            for block in model.blocks:
                block.mechanism.query.weight.mul_(3)  # pyright: ignore
        runs[name] = path / "runs" / f"arm-{index}" / "seed-0"
        runs[name].mkdir(parents=True)
        begin(runs[name], TrainConfig(data=CorpusConfig(), model=shape, steps=800), {}, ByteTokenizer())
        finish(runs[name], model_tensors(model))
    return runs


def write(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))


def unpack(head: Mapping[str, Any], n_tokens: int) -> np.ndarray:
    """The weights that the page shows for a packed head."""
    packed = np.frombuffer(base64.b64decode(head["data"]), dtype=np.int8).astype(np.float64)
    weights = np.zeros((n_tokens, n_tokens))
    weights[np.tril_indices(n_tokens)] = head["scale"] * np.sign(packed) * (packed / 127) ** 2
    return weights


RATIONALE_ARMS = ("r = 1", "r = 5", "r = 20", "r = 1 to 40")
METRICS = (
    RationaleMetric(
        name="performance", title="accuracy", unit="percent", better="higher", description="The part answered rightly."
    ),
    RationaleMetric(
        name="mass", title="mass", unit="percent", better="higher", description="Attention on the rationale."
    ),
    RationaleMetric(
        name="confident", title="AC(0.5)", unit="percent", better="higher", description="Instances with a mass of 0.5."
    ),
    RationaleMetric(
        name="comprehensiveness", title="comprehensiveness", unit="", better="higher", description="Lost without them."
    ),
    RationaleMetric(
        name="sufficiency", title="sufficiency", unit="", better="lower", description="Lost with them alone."
    ),
    RationaleMetric(name="random", title="random words", unit="", better="neither", description="The floor."),
    RationaleMetric(name="gradient", title="gradient's words", unit="", better="neither", description="A yardstick."),
    RationaleMetric(
        name="effective", title="effective tokens", unit="tokens", better="neither", description="exp(entropy)."
    ),
)
START: dict[MetricName, float] = {
    "performance": 0.924,
    "mass": 0.38,
    "confident": 0.41,
    "comprehensiveness": 0.24,
    "sufficiency": 0.12,
    "random": 0.04,
    "gradient": 0.3,
    "effective": 5.4,
}
GAIN: dict[MetricName, float] = {
    "performance": 0.001,
    "mass": 0.16,
    "confident": 0.2,
    "comprehensiveness": 0.03,
    "sufficiency": -0.02,
    "random": 0.001,
    "gradient": 0.001,
    "effective": -1.1,
}
WORDS = ("the", "author", "that", "the", "guards", "next", "to", "the", "old", "house", "like")


def rationale_study(
    arms: Sequence[str] = RATIONALE_ARMS, *, seeds: int = 5, examples: int = 2, words: Sequence[str] = WORDS
) -> RationaleSummary:
    """A study of rationales; without seeds, no run is finished."""
    made = tuple(_rationale_arm(index, name, seeds) for index, name in enumerate(arms))
    changes = tuple(
        _change(arm, made[0], metric) for metric in METRICS for arm in made[1:] if arm.readings[metric.name].by_seed
    )
    return RationaleSummary(
        task="agreement (built-in grammar)",
        digest="9f2c4e1ab7d05563" * 4,
        kind="classification",
        instances=2000,
        with_rationale=1950,
        skipped={"rationale outside the text": 3},
        notes=("Split by template and noun: nothing leaks.",),
        remarks=("One seed says little.",) if seeds == 1 else (),
        arms=made,
        metrics=METRICS,
        changes=changes,
        tau=0.5,
        level=0.95,
        pooling="average",
        fraction=0.05,
        equal_loss=0.05 if seeds else None,
        examples=tuple(_example(n, arms, words) for n in range(examples)),
        published=(("slow QK", 92.43, 41.67, 0.24), ("fast QK", 93.41, 76.85, 0.3)),
        runs=max(1, seeds) * len(arms),
        finished=seeds * len(arms),
        answer=f"On agreement, against {arms[0]}: {arms[-1]} is sharper (+48.0 points, -1.0 to +50.0)."
        if seeds
        else "",
        command=("qkflow", "sharpen", "--task", "agreement"),
        design={"rates": [0.001, 0.01], "arms": list(arms)},
        environment={"torch": "2.13.0"},
    )


def _rationale_arm(index: int, name: str, seeds: int) -> RationaleArm:
    generator = np.random.default_rng(index)
    readings: dict[MetricName, MetricSummary] = {}
    for metric in METRICS:
        middle = START[metric.name] + index * GAIN[metric.name]
        top = 1.0 if metric.unit == "percent" else math.inf
        each = [min(top, float(middle + 0.01 * generator.normal())) for _ in range(seeds)]
        readings[metric.name] = MetricSummary(mean=statistics.fmean(each) if each else None, by_seed=tuple(each))
    taus = np.linspace(0, 1, 21)
    curve = [(float(tau), float(1 / (1 + math.exp(12 * (tau - 0.42 - 0.12 * index))))) for tau in taus] if seeds else []
    return RationaleArm(
        name=name,
        description="only the queries and keys learn at this speed" if index else "everything learns at one speed",
        lr=0.01 if seeds else None,
        tried={0.001: 0.21, 0.01: 0.05, 0.1: None},
        seeds=tuple(range(seeds)),
        readings=readings,
        curve=tuple(curve),
        paths=tuple(_path(index, seed) for seed in range(seeds)),
        at_equal_loss=MetricSummary(mean=0.3 + 0.15 * index, by_seed=(0.3 + 0.15 * index,) * seeds) if seeds else None,
        by_kind={"simple": {"performance": 0.99, "mass": 0.6}, "across a clause": {"performance": 0.8, "mass": 0.2}},
        failures=() if seeds else ("seed 0: the loss was not finite at step 12",),
    )


def _path(index: int, seed: int) -> tuple[TrainingPoint, ...]:
    generator = np.random.default_rng([index, seed])
    losses = [0.69 * math.exp(-0.25 * n) + 0.002 for n in range(17)]
    return tuple(
        TrainingPoint(
            step=40 * n,
            loss=float(loss * math.exp(0.05 * generator.normal())),
            mass=float((0.38 + 0.15 * index) * (1 - math.exp(-0.3 * n)) + 0.1 + 0.01 * generator.normal()),
            performance=1 - loss / 2,
        )
        for n, loss in enumerate(losses)
    )


def _change(arm: RationaleArm, baseline: RationaleArm, metric: RationaleMetric) -> MetricChange:
    ours, theirs = arm.readings[metric.name].by_seed, baseline.readings[metric.name].by_seed
    apart = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean = statistics.fmean(apart)
    if len(apart) == 1:
        return MetricChange(arm=arm.name, metric=metric.name, mean=mean, low=None, high=None, p=None, p_holm=None)
    half = 2.8 * statistics.stdev(apart) / math.sqrt(len(apart))
    p = min(1.0, math.exp(-3 * abs(mean) / half))
    return MetricChange(
        arm=arm.name, metric=metric.name, mean=mean, low=mean - half, high=mean + half, p=p, p_holm=min(1.0, 3 * p)
    )


def _example(number: int, arms: Sequence[str], words: Sequence[str]) -> AttentionExample:
    generator = np.random.default_rng(number)
    rationale = min(1 + number, len(words) - 1)
    attention = {}
    for index, name in enumerate(("before training", *arms)):
        scores = 0.3 * generator.normal(size=len(words))
        scores[rationale] += 1.4 * index
        shares = np.exp(scores) / np.exp(scores).sum()
        attention[name] = tuple(map(float, shares))
    predicted = {name: f"singular (0.{70 + 5 * index})" for index, name in enumerate(arms)}
    return AttentionExample(
        words=tuple(words), rationale=(rationale,), answer="singular", attention=attention, predicted=predicted
    )
