"""What a study costs beyond its training: its runs through the harness, against the same runs in the bare loop.

python benchmarks/harness.py [--quick] [--json FILE]

Both train the same configs one at a time in fresh processes that have imported everything: a study by `run_experiment`
on a design that is written, the bare loop as calls of `train` on an engine. They take turns. The time of the training
itself wavers more on a shared machine than the harness takes; so what is spent outside of steps and evaluations, which
the metrics record, is told as well: the harness can only add to that.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from qkflow.data import CorpusConfig
from qkflow.experiment.design import Design, make_design, planned_runs, write_design
from qkflow.experiment.executors.base import Resources
from qkflow.experiment.executors.local import LocalExecutor
from qkflow.experiment.runner import run_experiment
from qkflow.experiment.spec import ExperimentSpec
from qkflow.training import TrainConfig, read_metrics, train

from side_by_side import arguments, race, report, rows

Outside = dict[str, list[float]]
"""Seconds outside of steps and evaluations, for each time a competitor ran."""


def bare(run: tuple[TrainConfig, str]) -> None:
    """The training loop and nothing around it."""
    train(*run)


def in_a_study(design: Design, folder: Path) -> None:
    """Through the harness."""
    write_design(folder, design)
    run_experiment(None, folder)


def in_the_bare_loop(design: Design, folder: Path) -> None:
    """Without it."""
    todo = [(job.config, str(folder / job.folder)) for job in planned_runs(design)]
    with LocalExecutor() as executor:
        for done in executor.run(bare, todo, workers=design.jobs, resources=Resources()):
            if done is not None and done.crash is not None:
                raise RuntimeError(done.crash)


def timed(name: str, make: Callable[[Design, Path], None], design: Design, place: Path, outside: Outside) -> None:
    """Make the runs anew, and note what went on outside of steps and evaluations."""
    folder = place / name
    shutil.rmtree(folder, ignore_errors=True)
    began = time.perf_counter()
    make(design, folder)
    took = time.perf_counter() - began
    records = [read_metrics(folder / job.folder / "metrics.jsonl") for job in planned_runs(design)]
    training = sum(run[-1]["seconds"] for run in records)
    evaluating = sum(record.get("evaluation_seconds", 0.0) for run in records for record in run)
    outside.setdefault(name, []).append(took - training - evaluating)


if __name__ == "__main__":
    args = arguments(__doc__)
    spec = ExperimentSpec(
        data=CorpusConfig(),
        arms=("standard", "differential"),
        size="100k",
        tokens=160_000 if args.quick else 300_000,
        seeds=1 if args.quick else 2,
        jobs=1,
        threads=1,
    )
    outside: Outside = {}
    with tempfile.TemporaryDirectory() as place:
        made = make_design(spec, LocalExecutor(), notice=print)
        made = replace(made, base=replace(made.base, final_tokens=made.base.evaluate_tokens))
        brief = replace(made, arms=tuple(replace(arm, steps=20) for arm in made.arms))
        in_the_bare_loop(brief, Path(place) / "warm")  # the server of processes starts once
        makers = {"a study": in_a_study, "the bare loop": in_the_bare_loop}
        work = {name: lambda n=name, m=make: timed(n, m, made, Path(place), outside) for name, make in makers.items()}
        times = race(work, rounds=2 if args.quick else 6, warm=0)
    tokens = sum(job.steps for job in planned_runs(made)) * made.base.batch * made.base.context
    report(rows(f"{len(planned_runs(made))} runs", times, amount=tokens, unit="tokens/s"), args.json)
    study, loop = (statistics.median(outside[name]) for name in makers)
    round_steps = statistics.median(times["the bare loop"])
    print(f"\noutside of steps and evaluations: {study:.2f} s in a study, {loop:.2f} s in the bare loop;", end=" ")
    print(f"the harness adds {(study - loop) / round_steps:.1%} to {round_steps:.0f} s")
