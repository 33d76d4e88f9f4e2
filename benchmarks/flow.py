"""The theory of faster queries and keys against the network it is about: the one-layer model on the synthetic task.

    python benchmarks/flow.py paths     attention on the relevant tokens at equal loss, for several r: an hour
    python benchmarks/flow.py fixed     what OV learns when attention is held at alpha: about three minutes
    python benchmarks/flow.py figure    what `paths` measured beside the reduced flow, as docs/flow.svg
    python benchmarks/flow.py tables    the tables again, from what is on record

As published: one-hot tokens, one head, matrices that begin as 1e-6 I, SGD at 1e-2, batch 32, seeds 1234 to 1238. Ours:
150,000 steps, on batches drawn from 4,096 texts; float64, so that the smallest change of attention shows. Settings of
ours: FAFO-0.1, whose matrices begin as 0.1 I; CACO-seen, in which the query is among the tokens that are attended to;
CACO-even, in which all of a class's own tokens are equally frequent; CACO-flow, in which besides only the four labels
can be answered: all that the reduced flow assumes. Nothing but the QK rate differs between arms, and all see the same
batches. One thread. Before training, the batched models are held to `OneLayer` under torch's own SGD.
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

from flow_figure import draw, network
from flow_stack import RATE, D, Stack, Texts, batches, check, data
from qkflow.circuits import RatioSchedule
from qkflow.data.tasks.synthetic import LABEL
from qkflow.models.one_layer import Form
from qkflow.theory.gradient_flow import alpha_at

SEEDS = (1234, 1235, 1236, 1237, 1238)


class Setting(NamedTuple):
    """A form of the model, where its matrices begin, and the arms that it is trained in."""

    form: Form
    arms: tuple[RatioSchedule, ...]
    start: float = 1e-6
    steps: int = 150_000
    texts: Texts = "context"
    four: bool = False
    """Whether only the four labels can be answered."""


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
    "CACO-flow": Setting("CACO", COLLAPSED, texts="even", four=True),
}
LEVELS = (1.0, 0.5, 0.3, 0.15, 0.05, 0.01)
ALPHAS = (0.2, 0.4, 0.6, 0.8, 1.0)
PUBLISHED = (0.598, 0.158, 0.0645, 0.0346, 0.0216)
BINS = np.linspace(0, 1, 6)
DOCS = Path(__file__).parent.parent / "docs"


def paths(name: str, seeds: Sequence[int], steps: int, looks: int) -> dict[str, Any]:
    """Train all arms of a setting, looking at the validation texts along the way and at the test texts at the end."""
    form, arms, start, _, texts, four = SETTINGS[name]
    train, validation, test = data(seeds, texts)
    stack = Stack(form, arms, len(seeds), start=start, four=four)
    at, losses, masses, began = [], [], [], time.monotonic()
    every = max(1, steps // looks)
    for step, batch in enumerate(batches(train, seeds, steps + 1)):
        if step % every == 0:
            loss, mass, _ = stack.look(validation)
            at.append(step)
            losses.append(loss.mean(-1))
            masses.append(mass.mean(-1))
            if step % (every * max(1, looks // 10)) == 0:
                told = "  ".join(
                    f"{called(a)}: {x:.4f} {y:.3f}" for a, x, y in zip(arms, *means(loss, mass), strict=True)
                )
                print(f"{name} {step:7,}, {time.monotonic() - began:5.0f} s   {told}", flush=True)
        if step < steps:
            stack.step(batch, step, steps)
    loss, mass, told = stack.look(test)
    heat = [
        np.histogram2d(m.ravel(), p.ravel(), bins=(BINS, BINS))[0] / m.size for m, p in zip(mass, told, strict=True)
    ]
    return {
        "name": name,
        "arms": [called(arm) for arm in arms],
        "start": start,
        "seeds": list(seeds),
        "steps": at,
        "loss": np.stack(losses, -1).tolist(),
        "mass": np.stack(masses, -1).tolist(),
        "test loss": loss.mean(-1).tolist(),
        "test mass": mass.mean(-1).tolist(),
        "heat": np.stack(heat).tolist(),
        "seconds": time.monotonic() - began,
    }


def fixed(seeds: Sequence[int], steps: int) -> dict[str, Any]:
    """W_OV alone, from 1e-6 I, with alpha spread evenly over the places of the class's own tokens and 1 - alpha evenly
    over all other places of the context; the loss is that of all training texts.
    """
    train, _, _ = data(seeds)
    counts, own = train.logs.exp(), train.own
    relevant, other = (F.normalize(counts * places, p=1, dim=-1) for places in (own, ~own))
    alpha = torch.tensor(ALPHAS).double()[:, None, None, None]
    z = (alpha * relevant + (1 - alpha) * other).flatten(0, 1)  # [alphas * seeds, n, d]
    labels = train.classes.repeat(len(ALPHAS), 1) + LABEL
    ov = 1e-6 * torch.eye(D).double().repeat(len(z), 1, 1)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    rows, at, losses = torch.arange(len(z))[:, None], [], []
    for step in range(1, steps + 1):
        index = torch.stack([torch.randint(labels.shape[1], (32,), generator=g) for g in generators])
        index = index.repeat(len(ALPHAS), 1)
        seen = z[rows, index]
        error = (seen @ ov.mT).softmax(-1)
        error.scatter_add_(2, labels[rows, index][..., None], error.new_full((*index.shape, 1), -1.0))
        ov.baddbmm_(error.mT, seen, alpha=-RATE / 32)
        if step % max(1, steps // 100) == 0:
            told = (z @ ov.mT).log_softmax(-1).gather(2, labels[..., None])[..., 0]
            at.append(step)
            losses.append(-told.mean(1).view(len(ALPHAS), len(seeds)).numpy())
    return {"alphas": ALPHAS, "seeds": list(seeds), "steps": at, "loss": np.stack(losses, -1).tolist()}


def called(arm: RatioSchedule) -> str:
    """`r = 5`, or `r from 1 to 40`."""
    return f"r = {arm.start:g}" if arm.end is None else f"r from {arm.start:g} to {arm.end:g}"


def means(*found: np.ndarray) -> list[list[float]]:
    return [one.mean((1, 2)).tolist() for one in found]


def at_loss(level: float, loss: Sequence[float], mass: Sequence[float]) -> float:
    """The mass when the loss first is at a level, on a line in log loss between two looks; NaN where it never is."""
    below = np.flatnonzero(np.asarray(loss) <= level)
    if not len(below) or not below[0]:
        return float("nan")
    two = slice(below[0] - 1, below[0] + 1)
    return float(np.interp(-np.log(level), -np.log(loss[two]), mass[two]))


def interval(values: np.ndarray) -> str:
    """Mean and 95 % interval over seeds."""
    if np.isnan(values).any():
        return "-"
    if len(values) < 2:
        return f"{values.mean():.3f}"
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return f"{values.mean():.3f} ± {half:.3f}" if half >= 5e-4 else f"{values.mean():.4f} ± {half:.4f}"


def path_table(found: dict[str, Any]) -> str:
    """Mass at equal loss, a row an arm; below, in how many seeds it rises with r."""
    arms, seeds = found["arms"], found["seeds"]
    mass = np.array(
        [
            [[at_loss(level, *pair) for level in LEVELS] for pair in zip(*both, strict=True)]
            for both in zip(found["loss"], found["mass"], strict=True)
        ]
    )  # [arm seed level]
    reached = int(np.isfinite(mass).all((0, 1)).sum()) - 1
    heads = [found["name"], *(f"loss {level:g}" for level in LEVELS)]
    heads += [f"above r = 1 at {LEVELS[reached]:g}, least of the seeds", "steps to 0.3", "at the end: loss, mass"]
    lines = [" | ".join(heads), "|".join(["---"] * len(heads))]
    for i, arm in enumerate(arms):
        above = "" if i == 0 else f"{(mass[i] - mass[0])[:, reached].min():+.2g}"
        steps = np.mean([at_loss(0.3, loss, found["steps"]) for loss in found["loss"][i]])
        end = f"{np.mean(found['test loss'][i]):.2g}, {np.mean(found['test mass'][i]):.3f}"
        lines.append(" | ".join([arm, *(interval(column) for column in mass[i].T), above, f"{steps:,.0f}", end]))
    constant = [i for i, arm in enumerate(arms) if " to " not in arm]
    for i in constant:
        flow = [f"{alpha_at(network(float(arms[i].removeprefix('r = '))), level):.3f}" for level in LEVELS]
        lines.append(" | ".join([f"reduced flow, {arms[i]}", *flow, "", "", ""]))
    grows = [i for i, arm in enumerate(arms) if " to " in arm]
    rises = (np.diff(mass[constant], axis=0) > 0).all(0).sum(0)
    above = (mass[grows] > mass[:1]).all(0).sum(0)
    for what, counts in (("seeds in which mass rises with r", rises), ("seeds with growth above r = 1", above)):
        told = (f"{n} of {len(seeds)}" if j <= reached else "-" for j, n in enumerate(counts))
        lines.append(" | ".join([what, *told, "", "", ""]))
    return "\n".join(f"| {line} |" for line in lines)


def heat_table(found: dict[str, Any]) -> str:
    """Of the test texts at the end, the part with so much attention on the class's tokens and so probable a label."""
    shown = [(arm, np.array(heat)) for arm, heat in zip(found["arms"], found["heat"], strict=True)]
    lines = [f"| {found['name']}: attention on the class's tokens | " + " | ".join(arm for arm, _ in shown) + " |"]
    lines.append("|---" * (len(shown) + 1) + "|")
    for i, (low, high) in enumerate(pairwise(BINS)):
        rows = ["  ".join(f"{100 * part:.0f}" for part in heat[i]) for _, heat in shown]
        lines.append(f"| {low:.1f} to {high:.1f} | " + " | ".join(rows) + " |")
    return "\n".join(lines)


def fixed_table(found: dict[str, Any]) -> str:
    """The losses at the one step count that fits the published ones best, by the root mean square of log ratios."""
    loss = np.array(found["loss"]).mean(1)  # [alpha look]
    apart = np.sqrt((np.log(loss / np.array(PUBLISHED)[:, None]) ** 2).mean(0))
    best = int(apart.argmin())
    spread = np.array(found["loss"])[:, :, best].std(1, ddof=1) if len(found["seeds"]) > 1 else np.zeros(len(loss))
    lines = ["| alpha | published | ours | ratio |", "|---|---|---|---|"]
    for alpha, published, ours, sd in zip(ALPHAS, PUBLISHED, loss[:, best], spread, strict=True):
        lines.append(f"| {alpha:g} | {published:g} | {ours:.4f} (sd {sd:.4f}) | {ours / published:.2f} |")
    order = (np.diff(np.array(found["loss"])[:, :, best], axis=0) < 0).all(0).sum()
    lines.append(f"\n{found['steps'][best]:,} steps; root mean square of log ratios {apart[best]:.3f}; the loss falls")
    lines.append(f"with alpha in {order} of {len(found['seeds'])} seeds.")
    return "\n".join(lines)


def tables(out: Path) -> None:
    """All tables that there are results for."""
    for name in SETTINGS:
        if (file := out / f"{name}.json").exists():
            found = json.loads(file.read_text())
            print(f"\n{path_table(found)}\n\n{heat_table(found)}", flush=True)
    if (file := out / "fixed.json").exists():
        print(f"\n{fixed_table(json.loads(file.read_text()))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=("paths", "fixed", "figure", "tables"))
    parser.add_argument("--setting", choices=tuple(SETTINGS), action="append", help="paths of this alone")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--steps", type=int, default=None, help="of `fixed`, the most that are tried: 200,000")
    parser.add_argument("--quick", action="store_true", help="two seeds and few steps: that it runs, not what it finds")
    parser.add_argument("--out", type=Path, default=Path("runs/flow"), help="where results are kept")
    options = parser.parse_args()
    seeds = options.seeds[:2] if options.quick else options.seeds
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # products of 1e-6 and less, which are slow and decide nothing
    options.out.mkdir(parents=True, exist_ok=True)
    if options.experiment == "paths":
        if (apart := check()) > 1e-10:
            raise SystemExit(f"the batched models are {apart:.1e} from OneLayer under SGD")
        for name in options.setting or SETTINGS:
            steps, looks = (400, 40) if options.quick else (options.steps or SETTINGS[name].steps, 600)
            (options.out / f"{name}.json").write_text(json.dumps(paths(name, seeds, steps, looks)))
    if options.experiment == "fixed":
        steps = options.steps or (400 if options.quick else 200_000)
        (options.out / "fixed.json").write_text(json.dumps(fixed(seeds, steps)))
    if options.experiment == "figure":
        draw({name: json.loads((options.out / f"{name}.json").read_text()) for name in SETTINGS}, DOCS / "flow.svg")
    else:
        tables(options.out)


if __name__ == "__main__":
    main()
