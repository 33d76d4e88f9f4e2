"""Compare the gradient-flow theory with the one-layer network that it describes, on the synthetic task.

    python benchmarks/flow.py paths     attention on the informative tokens at equal loss, for several r (one hour)
    python benchmarks/flow.py fixed     the loss of OV with attention fixed at alpha (three minutes)
    python benchmarks/flow.py figure    draw the results of `paths` and the reduced flow as docs/flow.svg
    python benchmarks/flow.py tables    print the tables of existing results

As published: one-hot tokens, one head, matrices initialized to 1e-6 I, SGD with rate 1e-2, batch 32, seeds 1234-1238.
Our choices: 150,000 steps, batches drawn from 4,096 texts, float64.

| our setting | difference                                                                           |
|-------------|--------------------------------------------------------------------------------------|
| FAFO-0.1    | matrices initialized to 0.1 I                                                        |
| CACO-seen   | the query is among the attended tokens                                               |
| CACO-even   | all tokens of a class are equally frequent                                           |
| CACO-flow   | as CACO-even, and only the four labels can be predicted: the assumptions of the flow |

Arms differ only in the QK rate and read the same batches. One thread. Before training, the batched models are compared
with `OneLayer` under torch's SGD.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy import stats

from qkflow.circuits import RatioSchedule
from qkflow.data.tasks.synthetic import LABEL
from qkflow.models.one_layer import Form
from qkflow.theory.gradient_flow import alpha_at

from flow_figure import draw, synthetic_flow
from flow_stack import RATE, D, Stack, Texts, batches, check, data

SEEDS = (1234, 1235, 1236, 1237, 1238)


class Setting(NamedTuple):
    """A form of the model, its initialization, and its arms."""

    form: Form
    arms: tuple[RatioSchedule, ...]
    start: float = 1e-6
    steps: int = 150_000
    texts: Texts = "context"
    labels_only: bool = False
    """Whether only the four labels can be predicted."""


COLLAPSED = (RatioSchedule(), RatioSchedule(start=2.0), RatioSchedule(start=5.0), RatioSchedule(start=1.0, end=10.0))
GROWTH = RatioSchedule(start=1.0, end=40.0)
SETTINGS = {
    "FAFO": Setting(
        "FAFO",
        (RatioSchedule(), RatioSchedule(start=5.0), RatioSchedule(start=10.0), RatioSchedule(start=20.0), GROWTH),
    ),
    "FAFO-0.1": Setting(
        "FAFO",
        (RatioSchedule(), RatioSchedule(start=2.0), RatioSchedule(start=5.0), RatioSchedule(start=20.0), GROWTH),
        0.1,
        60_000,
    ),
    "CACO": Setting("CACO", COLLAPSED),
    "CACO-seen": Setting("CACO", COLLAPSED, texts="seen"),
    "CACO-even": Setting("CACO", COLLAPSED, texts="even"),
    "CACO-flow": Setting("CACO", COLLAPSED, texts="even", labels_only=True),
}
LEVELS = (1.0, 0.5, 0.3, 0.15, 0.05, 0.01)
ALPHAS = (0.2, 0.4, 0.6, 0.8, 1.0)
PUBLISHED = (0.598, 0.158, 0.0645, 0.0346, 0.0216)
BINS = np.linspace(0, 1, 6)
DOCS = Path(__file__).parent.parent / "docs"


def paths(name: str, seeds: Sequence[int], steps: int, evaluations: int) -> dict[str, Any]:
    """Train all arms of a setting; evaluate on validation texts during training and on test texts at the end."""
    form, arms, start, _, texts, labels_only = SETTINGS[name]
    train, validation, test = data(seeds, texts)
    stack = Stack(form, arms, len(seeds), start=start, labels_only=labels_only)
    evaluated, losses, masses, started = [], [], [], time.monotonic()
    interval_steps = max(1, steps // evaluations)
    for step, batch in enumerate(batches(train, seeds, steps + 1)):
        if step % interval_steps == 0:
            loss, mass, _ = stack.evaluate(validation)
            evaluated.append(step)
            losses.append(loss.mean(-1))
            masses.append(mass.mean(-1))
            if step % (interval_steps * max(1, evaluations // 10)) == 0:
                summary = "  ".join(
                    f"{label(a)}: {x:.4f} {y:.3f}" for a, x, y in zip(arms, *means(loss, mass), strict=True)
                )
                print(f"{name} {step:7,}, {time.monotonic() - started:5.0f} s   {summary}", flush=True)
        if step < steps:
            stack.step(batch, step, steps)
    loss, mass, probability = stack.evaluate(test)
    heat = [
        np.histogram2d(m.ravel(), p.ravel(), bins=(BINS, BINS))[0] / m.size
        for m, p in zip(mass, probability, strict=True)
    ]
    return {
        "name": name,
        "arms": [label(arm) for arm in arms],
        "start": start,
        "seeds": list(seeds),
        "steps": evaluated,
        "loss": np.stack(losses, -1).tolist(),
        "mass": np.stack(masses, -1).tolist(),
        "test loss": loss.mean(-1).tolist(),
        "test mass": mass.mean(-1).tolist(),
        "heat": np.stack(heat).tolist(),
        "seconds": time.monotonic() - started,
    }


def fixed(seeds: Sequence[int], steps: int) -> dict[str, Any]:
    """Train W_OV alone, from 1e-6 I, with fixed attention; return the loss on all training texts.

    The attention alpha is uniform over the informative positions, 1 - alpha uniform over the other positions.
    """
    train, _, _ = data(seeds)
    counts, is_informative = train.logs.exp(), train.is_informative
    relevant, other = (F.normalize(counts * mask, p=1, dim=-1) for mask in (is_informative, ~is_informative))
    alpha = torch.tensor(ALPHAS).double()[:, None, None, None]
    z = (alpha * relevant + (1 - alpha) * other).flatten(0, 1)  # [alphas * seeds, n, d]
    labels = train.classes.repeat(len(ALPHAS), 1) + LABEL
    ov = 1e-6 * torch.eye(D).double().repeat(len(z), 1, 1)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    rows, evaluated, losses = torch.arange(len(z))[:, None], [], []
    for step in range(1, steps + 1):
        index = torch.stack([torch.randint(labels.shape[1], (32,), generator=g) for g in generators])
        index = index.repeat(len(ALPHAS), 1)
        inputs = z[rows, index]
        error = (inputs @ ov.mT).softmax(-1)
        error.scatter_add_(2, labels[rows, index][..., None], error.new_full((*index.shape, 1), -1.0))
        ov.baddbmm_(error.mT, inputs, alpha=-RATE / 32)
        if step % max(1, steps // 100) == 0:
            log_p = (z @ ov.mT).log_softmax(-1).gather(2, labels[..., None])[..., 0]
            evaluated.append(step)
            losses.append(-log_p.mean(1).view(len(ALPHAS), len(seeds)).numpy())
    return {"alphas": ALPHAS, "seeds": list(seeds), "steps": evaluated, "loss": np.stack(losses, -1).tolist()}


def label(arm: RatioSchedule) -> str:
    """`r = 5`, or `r from 1 to 40`."""
    return f"r = {arm.start:g}" if arm.end is None else f"r from {arm.start:g} to {arm.end:g}"


def means(*arrays: np.ndarray) -> list[list[float]]:
    return [array.mean((1, 2)).tolist() for array in arrays]


def at_loss(level: float, loss: Sequence[float], mass: Sequence[float]) -> float:
    """Return the mass when the loss first reaches a level, interpolated in log loss; NaN if it never does."""
    below = np.flatnonzero(np.asarray(loss) <= level)
    if not len(below) or not below[0]:
        return float("nan")
    around = slice(below[0] - 1, below[0] + 1)
    return float(np.interp(-np.log(level), -np.log(loss[around]), mass[around]))


def interval(values: np.ndarray) -> str:
    """Format the mean and 95 % interval over seeds."""
    if np.isnan(values).any():
        return "-"
    if len(values) < 2:
        return f"{values.mean():.3f}"
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return f"{values.mean():.3f} ± {half:.3f}" if half >= 5e-4 else f"{values.mean():.4f} ± {half:.4f}"


def path_table(result: dict[str, Any]) -> str:
    """Format the mass at equal loss, one row per arm, and the number of seeds in which it increases with r."""
    arms, seeds = result["arms"], result["seeds"]
    mass = np.array(
        [
            [[at_loss(level, *pair) for level in LEVELS] for pair in zip(*both, strict=True)]
            for both in zip(result["loss"], result["mass"], strict=True)
        ]
    )  # [arm seed level]
    reached = int(np.isfinite(mass).all((0, 1)).sum()) - 1
    heads = [result["name"], *(f"loss {level:g}" for level in LEVELS)]
    heads += [f"minus r = 1 at {LEVELS[reached]:g}, minimum over seeds", "steps to 0.3", "at the end: loss, mass"]
    lines = [" | ".join(heads), "|".join(["---"] * len(heads))]
    for i, arm in enumerate(arms):
        above = "" if i == 0 else f"{(mass[i] - mass[0])[:, reached].min():+.2g}"
        steps = np.mean([at_loss(0.3, loss, result["steps"]) for loss in result["loss"][i]])
        end = f"{np.mean(result['test loss'][i]):.2g}, {np.mean(result['test mass'][i]):.3f}"
        lines.append(" | ".join([arm, *(interval(column) for column in mass[i].T), above, f"{steps:,.0f}", end]))
    constant = [i for i, arm in enumerate(arms) if " to " not in arm]
    for i in constant:
        flow = [f"{alpha_at(synthetic_flow(float(arms[i].removeprefix('r = '))), level):.3f}" for level in LEVELS]
        lines.append(" | ".join([f"reduced flow, {arms[i]}", *flow, "", "", ""]))
    grows = [i for i, arm in enumerate(arms) if " to " in arm]
    rises = (np.diff(mass[constant], axis=0) > 0).all(0).sum(0)
    above = (mass[grows] > mass[:1]).all(0).sum(0)
    for title, counts in (("seeds in which mass increases with r", rises), ("seeds with growth above r = 1", above)):
        cells = (f"{n} of {len(seeds)}" if j <= reached else "-" for j, n in enumerate(counts))
        lines.append(" | ".join([title, *cells, "", "", ""]))
    return "\n".join(f"| {line} |" for line in lines)


def heat_table(result: dict[str, Any]) -> str:
    """Format the share of test texts by attention on the class's tokens and probability of the label."""
    heats = [(arm, np.array(heat)) for arm, heat in zip(result["arms"], result["heat"], strict=True)]
    lines = [f"| {result['name']}: attention on the class's tokens | " + " | ".join(arm for arm, _ in heats) + " |"]
    lines.append("|---" * (len(heats) + 1) + "|")
    for i, (low, high) in enumerate(pairwise(BINS)):
        rows = ["  ".join(f"{100 * share:.0f}" for share in heat[i]) for _, heat in heats]
        lines.append(f"| {low:.1f} to {high:.1f} | " + " | ".join(rows) + " |")
    return "\n".join(lines)


def fixed_table(result: dict[str, Any]) -> str:
    """Format the losses at the step that fits the published losses best (root mean square of log ratios)."""
    loss = np.array(result["loss"]).mean(1)  # [alpha evaluation]
    distance = np.sqrt((np.log(loss / np.array(PUBLISHED)[:, None]) ** 2).mean(0))
    best = int(distance.argmin())
    spread = np.array(result["loss"])[:, :, best].std(1, ddof=1) if len(result["seeds"]) > 1 else np.zeros(len(loss))
    lines = ["| alpha | published | ours | ratio |", "|---|---|---|---|"]
    for alpha, published, ours, sd in zip(ALPHAS, PUBLISHED, loss[:, best], spread, strict=True):
        lines.append(f"| {alpha:g} | {published:g} | {ours:.4f} (sd {sd:.4f}) | {ours / published:.2f} |")
    order = (np.diff(np.array(result["loss"])[:, :, best], axis=0) < 0).all(0).sum()
    lines.append(
        f"\n{result['steps'][best]:,} steps; root mean square of log ratios {distance[best]:.3f}; the loss decreases"
    )
    lines.append(f"with alpha in {order} of {len(result['seeds'])} seeds.")
    return "\n".join(lines)


def tables(out: Path) -> None:
    """Print the tables of all existing results."""
    for name in SETTINGS:
        if (file := out / f"{name}.json").exists():
            result = json.loads(file.read_text())
            print(f"\n{path_table(result)}\n\n{heat_table(result)}", flush=True)
    if (file := out / "fixed.json").exists():
        print(f"\n{fixed_table(json.loads(file.read_text()))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=("paths", "fixed", "figure", "tables"))
    parser.add_argument("--setting", choices=tuple(SETTINGS), action="append", help="run `paths` for this setting only")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--steps", type=int, default=None, help="training steps (default of `fixed`: 200,000)")
    parser.add_argument("--quick", action="store_true", help="smoke test: two seeds, few steps")
    parser.add_argument("--out", type=Path, default=Path("runs/flow"), help="folder of the results")
    options = parser.parse_args()
    seeds = options.seeds[:2] if options.quick else options.seeds
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # products of 1e-6 and less are slow and have no effect
    options.out.mkdir(parents=True, exist_ok=True)
    if options.experiment == "paths":
        if (difference := check()) > 1e-10:
            raise SystemExit(f"the batched models differ from OneLayer under SGD by {difference:.1e}")
        for name in options.setting or SETTINGS:
            steps, evaluations = (400, 40) if options.quick else (options.steps or SETTINGS[name].steps, 600)
            (options.out / f"{name}.json").write_text(json.dumps(paths(name, seeds, steps, evaluations)))
    if options.experiment == "fixed":
        steps = options.steps or (400 if options.quick else 200_000)
        (options.out / "fixed.json").write_text(json.dumps(fixed(seeds, steps)))
    if options.experiment == "figure":
        draw({name: json.loads((options.out / f"{name}.json").read_text()) for name in SETTINGS}, DOCS / "flow.svg")
    else:
        tables(options.out)


if __name__ == "__main__":
    main()
