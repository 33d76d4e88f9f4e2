"""Measure the overhead of `run_experiment` over the same runs with `train` alone.

python benchmarks/study_overhead.py [--quick] [--json FILE]

Both train the same configs one at a time, alternately, in fresh processes that have already imported qkflow:
`run_experiment` from a stored design, and `train` on an executor. On a shared machine, training time varies more than
the overhead, so the time outside of steps and evaluations is reported as well.
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
from qkflow.experiment.design import Design
from qkflow.experiment.executors.base import Resources
from qkflow.experiment.executors.local import LocalExecutor
from qkflow.experiment.planned_runs import PlannedRun, best_rates, round_runs
from qkflow.experiment.planner import make_design
from qkflow.experiment.runner import run_experiment
from qkflow.experiment.spec import ExperimentSpec
from qkflow.experiment.study_dir import write_design
from qkflow.training import TrainConfig, read_metrics, train

from tables import Row
from timing import compare, main, time_alternately

Outside = dict[str, list[float]]
"""Seconds outside of steps and evaluations, for each call of each function."""


def train_run(run: tuple[TrainConfig, str]) -> None:
    """Train one run; a function that processes can import."""
    train(*run)


def planned_runs(design: Design) -> tuple[PlannedRun, ...]:
    """The runs of a design with one round and one learning rate per arm."""
    return round_runs(design, design.round(1, design.spec.arms, 0), best_rates(design, {}))


def run_with_engine(design: Design, folder: Path) -> None:
    """Run a design with `run_experiment`."""
    write_design(folder, design)
    run_experiment(None, folder)


def run_without_engine(design: Design, folder: Path) -> None:
    """Run a design with `train` alone."""
    runs = [(run.config, str(folder / run.folder)) for run in planned_runs(design)]
    with LocalExecutor() as executor:
        for result in executor.run(train_run, runs, workers=design.jobs, resources=Resources()):
            if result is not None and result.crash is not None:
                raise RuntimeError(result.crash)


def measure(name: str, run: Callable[[Design, Path], None], design: Design, parent: Path, outside: Outside) -> None:
    """Run a design, and record the time outside of steps and evaluations."""
    folder = parent / name
    shutil.rmtree(folder, ignore_errors=True)
    start = time.perf_counter()
    run(design, folder)
    seconds = time.perf_counter() - start
    records = [read_metrics(folder / run.folder / "metrics.jsonl") for run in planned_runs(design)]
    training = sum(lines[-1]["seconds"] for lines in records)
    evaluating = sum(record.get("evaluation_seconds", 0.0) for lines in records for record in lines)
    outside.setdefault(name, []).append(seconds - training - evaluating)


def measure_overhead(quick: bool) -> list[Row]:
    spec = ExperimentSpec(
        data=CorpusConfig(),
        arms=("standard", "differential"),
        size="100k",
        tokens=160_000 if quick else 300_000,
        seeds=1 if quick else 2,
        jobs=1,
        threads=1,
    )
    outside: Outside = {}
    with tempfile.TemporaryDirectory() as parent:
        design = make_design(spec, LocalExecutor(), notice=print)
        design = replace(design, base=replace(design.base, final_tokens=design.base.evaluate_tokens))
        short_design = replace(design, arms=tuple(replace(arm, steps=20) for arm in design.arms))
        run_without_engine(short_design, Path(parent) / "warmup")  # starts the fork server
        runners = {"run_experiment": run_with_engine, "train": run_without_engine}
        functions = {
            name: lambda name=name, run=run: measure(name, run, design, Path(parent), outside)
            for name, run in runners.items()
        }
        times = time_alternately(functions, rounds=2 if quick else 6, warmup=0)
    experiment, training = (statistics.median(outside[name]) for name in runners)
    seconds = statistics.median(times["train"])
    print(f"outside of steps and evaluations: {experiment:.2f} s with run_experiment, {training:.2f} s with train;")
    print(f"overhead {(experiment - training) / seconds:.1%} of {seconds:.0f} s")
    runs = planned_runs(design)
    tokens = sum(run.steps for run in runs) * design.base.batch * design.base.context
    work, ours = f"{len(runs)} runs with `run_experiment`", "run_experiment"
    return [compare("study", work, "`train` alone", "time", times, ours, "train", tokens=tokens)]


if __name__ == "__main__":
    main(__doc__, measure_overhead)
