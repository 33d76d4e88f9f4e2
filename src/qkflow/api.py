"""`qkflow.compare`: a study from Python."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from qkflow.cli.compare import run_and_present
from qkflow.cli.options import new_folder, parse_duration, with_absolute_paths
from qkflow.data import CorpusConfig
from qkflow.experiment.executors.base import Executor
from qkflow.experiment.executors.local import LocalExecutor
from qkflow.experiment.spec import ExperimentSpec, all_arms
from qkflow.experiment.summary import ExperimentResult


def compare(
    data: str | Path | CorpusConfig = "python-stdlib",
    *,
    arms: Sequence[str] | None = None,
    budget: str | float | None = None,
    out: str | Path | None = None,
    executor: Executor | None = None,
    progress: bool = True,
    **options: Any,
) -> ExperimentResult:
    """Compare attention mechanisms on a text, as `qkflow compare` does, and return the result with its verdicts.

    Args:
        data: A text file or folder, a named corpus or a recall task, or a `CorpusConfig`.
        arms: Mechanisms, the baseline first; all registered ones if not given.
        budget: Time for the whole study, such as "10m" or a number of seconds.
        out: The folder of the study; a new one in runs/ if not given. If it holds the same study, it is resumed.
        executor: Where runs are executed; local processes if not given.
        progress: Whether to show progress, in a terminal or a notebook.
        options: Further fields of `ExperimentSpec`, such as `size`, `tokens`, `seeds` or `margin`.

    >>> result = compare("my.txt", arms=["standard", "qdelta"], budget="10m")  # doctest: +SKIP
    >>> [verdict.kind for verdict in result.verdicts]  # doctest: +SKIP
    """
    config = data if isinstance(data, CorpusConfig) else CorpusConfig(source=str(data))
    spec = ExperimentSpec(
        data=with_absolute_paths(config),
        arms=all_arms() if arms is None else tuple(arms),
        budget=parse_duration(budget) if isinstance(budget, str) else budget,
        **options,
    )
    folder = new_folder(re.sub(r"[^\w.=-]+", "_", f"compare-{Path(config.source).name}")) if out is None else Path(out)
    console = Console(quiet=not progress)
    return run_and_present(spec, folder, executor=executor or LocalExecutor(), console=console, quiet=True)
