"""The overhead of an experiment: its runs through `run_experiment`, against the same runs in the bare training loop.

python benchmarks/harness.py [--quick] [--json FILE]

Both train the same configs one at a time in fresh processes that have imported everything: `run_experiment` on a
written design, and calls of `train` on an executor. They take turns. On a shared machine training time varies more than
the overhead, so the time outside of steps and evaluations, which the metrics record, is reported as well.
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
    """Only the training loop."""
    train(*run)


def in_a_study(design: Design, folder: Path) -> None:
    """With `run_experiment`."""
    write_design(folder, design)
    run_experiment(None, folder)


def in_the_bare_loop(design: Design, folder: Path) -> None:
    """With `train` alone."""
    todo = [(run.config, str(folder / run.folder)) for run in planned_runs(design)]
    with LocalExecutor() as executor:
        for done in executor.run(bare, todo, workers=design.jobs, resources=Resources()):
            if done is not None and done.crash is not None:
                raise RuntimeError(done.crash)


def timed(name: str, make: Callable[[Design, Path], None], design: Design, place: Path, outside: Outside) -> None:
    """Train all runs, and record the time outside of steps and evaluations."""
    folder = place / name
    shutil.rmtree(folder, ignore_errors=True)
    began = time.perf_counter()
    make(design, folder)
    took = time.perf_counter() - began
    records = [read_metrics(folder / run.folder / "metrics.jsonl") for run in planned_runs(design)]
    training = sum(lines[-1]["seconds"] for lines in records)
    evaluating = sum(record.get("evaluation_seconds", 0.0) for lines in records for record in lines)
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
        in_the_bare_loop(brief, Path(place) / "warm")  # starts the fork server
        makers = {"a study": in_a_study, "the bare loop": in_the_bare_loop}
        work = {name: lambda n=name, m=make: timed(n, m, made, Path(place), outside) for name, make in makers.items()}
        times = race(work, rounds=2 if args.quick else 6, warm=0)
    tokens = sum(run.steps for run in planned_runs(made)) * made.base.batch * made.base.context
    report(rows(f"{len(planned_runs(made))} runs", times, amount=tokens, unit="tokens/s"), args.json)
    study, loop = (statistics.median(outside[name]) for name in makers)
    bare_seconds = statistics.median(times["the bare loop"])
    print(f"\noutside of steps and evaluations: {study:.2f} s in a study, {loop:.2f} s in the bare loop;", end=" ")
    print(f"the harness adds {(study - loop) / bare_seconds:.1%} to {bare_seconds:.0f} s")
