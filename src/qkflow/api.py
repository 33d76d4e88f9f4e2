"""`qkflow.compare`: a study from Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qkflow.cli.compare import run_and_present
from qkflow.cli.console import Console
from qkflow.cli.options import new_folder, parse_duration, with_absolute_paths
from qkflow.data import CorpusConfig
from qkflow.experiment.executors.base import Executor
from qkflow.experiment.executors.local import LocalExecutor
from qkflow.experiment.result import ExperimentResult
from qkflow.experiment.spec import Device, ExperimentSpec, Match, all_arms
from qkflow.models import DecoderConfig
from qkflow.training.regime import OptimizerName


def compare(
    data: str | Path | CorpusConfig = "python-stdlib",
    *,
    arms: Sequence[str] | None = None,
    budget: str | float | None = None,
    seeds: int | None = None,
    first_seed: int = 0,
    adaptive: bool = True,
    match: Match = "tokens",
    size: str | None = None,
    model: DecoderConfig | None = None,
    tokens: int | None = None,
    learning_rates: Sequence[float] | None = None,
    optimizer: OptimizerName = "muon",
    context: int | None = None,
    batch: int | None = None,
    margin: float = 0.005,
    error_rate: float = 0.05,
    passes: float = 4.0,
    jobs: int | None = None,
    threads: int | None = None,
    device: Device = "auto",
    out: str | Path | None = None,
    executor: Executor | None = None,
    progress: bool = True,
) -> ExperimentResult:
    """Compare attention mechanisms on a text, as `qkflow compare` does, and return the result with its verdicts.

    Args:
        data: A text file or folder, a named corpus or a recall task, or a `CorpusConfig`.
        arms: Mechanisms, the baseline first; all registered ones if not given.
        budget: Time for the whole study, such as "10m" or a number of seconds; ten minutes if neither it nor `tokens`
            is given.
        seeds: The most runs per arm; as many as the budget allows if not given.
        first_seed: The first seed; the others follow it.
        adaptive: Whether arms get no further seeds once they are decided. If not, every arm has `seeds` runs and is
            judged once.
        match: What all arms share besides the number of parameters: training tokens, FLOPs or measured training time.
        size: A named model size, such as "1m"; what the budget allows if not given.
        model: A model shape instead of a named size; each arm replaces its mechanism.
        tokens: Training tokens per run of the baseline; what the budget allows if not given.
        learning_rates: If there are several, each arm is tuned over all of them first. The default depends on the
            mechanism and the size, and is tuned if the budget is at least 30 minutes.
        optimizer: Muon for the matrices in blocks and AdamW for the rest, or AdamW for all.
        context: Context length in tokens; chosen by model size if not given.
        batch: Batch size (sequences); chosen by model size if not given.
        margin: The equivalence margin, as a fraction of the baseline's loss.
        error_rate: The chance of a false better or worse over all arms and rounds.
        passes: Maximum number of passes over the corpus per run.
        jobs: Concurrent runs; as many as the cores allow if not given.
        threads: CPU threads per run; one if not given and there are at least as many runs as cores.
        device: Where to train.
        out: The folder of the study; a new one in runs/ if not given. If it holds the same study, it is resumed.
        executor: Where runs are executed; local processes if not given.
        progress: Whether to show progress, in a terminal or a notebook.

    >>> result = compare("my.txt", arms=["standard", "qdelta"], budget="10m")  # doctest: +SKIP
    >>> [verdict.kind for verdict in result.verdicts]  # doctest: +SKIP
    """
    config = data if isinstance(data, CorpusConfig) else CorpusConfig(source=str(data))
    spec = ExperimentSpec(
        data=with_absolute_paths(config),
        arms=all_arms() if arms is None else tuple(arms),
        budget=parse_duration(budget) if isinstance(budget, str) else budget,
        seeds=seeds,
        first_seed=first_seed,
        adaptive=adaptive,
        match=match,
        size=size,
        model=model,
        tokens=tokens,
        learning_rates=None if learning_rates is None else tuple(learning_rates),
        optimizer=optimizer,
        context=context,
        batch=batch,
        margin=margin,
        error_rate=error_rate,
        passes=passes,
        jobs=jobs,
        threads=threads,
        device=device,
    )
    folder = new_folder(f"compare-{Path(config.source).name}") if out is None else Path(out)
    console = Console(quiet=not progress)
    return run_and_present(spec, folder, executor=executor or LocalExecutor(), console=console, quiet=True)
