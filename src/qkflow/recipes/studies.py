"""The studies of claims: language models on a text, or classifiers on a task whose files are in a data folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qkflow.data import CorpusConfig
from qkflow.data.tasks import TaskConfig, TaskName
from qkflow.errors import UsageError
from qkflow.experiment.presets import sharpen_spec
from qkflow.experiment.spec import ExperimentSpec, RationaleSpec

RATES = {"100k": (2.5e-3, 5e-3, 1e-2), "500k": (1.7e-3, 3.3e-3, 6.7e-3)}
"""Learning rates that every arm tries: half, once and twice the default of standard attention."""
TOKENS = {"100k": 2_000_000, "500k": 5_000_000}
"""Training tokens per run."""
SEEDS = 10
"""The most seeds per arm of a study that is judged in rounds."""
MIN_SEEDS = 4
"""The fewest seeds per arm of a study that is judged once."""


@dataclass(frozen=True, kw_only=True)
class LanguageStudy:
    """Language models that differ in their arms, tuned over the same learning rates."""

    arms: tuple[str, ...]
    source: str = "enwik8"
    """A corpus, or a file of the data folder."""
    size: str = "100k"
    seeds: int = SEEDS
    tokens: int | None = None
    """Training tokens per run; None: those of the size."""
    rates: tuple[float, ...] | None = None
    """Learning rates that every arm tries; None: those of the size."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of `ExperimentSpec`."""

    def spec(self, data_dir: str | None, *, corpus: str | None = None, budget: float | None = None) -> ExperimentSpec:
        """The experiment, on a text of the data folder or another one.

        Within a budget in seconds, runs are as long as it allows, with default learning rates.
        """
        source = corpus or self.source
        if corpus is None and data_dir is not None and (Path(data_dir) / source).is_file():
            source = str((Path(data_dir) / source).absolute())
        spec = ExperimentSpec(
            data=CorpusConfig(source=source, data_dir=None if data_dir is None else str(Path(data_dir).absolute())),
            arms=self.arms,
            size=self.size,
            tokens=self.tokens or TOKENS[self.size],
            seeds=self.seeds,
            learning_rates=self.rates or RATES[self.size],
            **self.options,
        )
        if budget is None:
            return spec
        seeds = None if spec.adaptive else max(MIN_SEEDS, self.seeds // 2)
        return replace(spec, tokens=None, learning_rates=None, budget=budget, seeds=seeds)


@dataclass(frozen=True, kw_only=True)
class TaskStudy:
    """Models that learn a task, with attention measured on its rationales."""

    task: TaskName
    files: str | None = None
    """The task's files in the data folder; None: the task is generated."""
    seeds: int = SEEDS
    test: int | None = None
    """The most test instances."""
    readings: int = 1
    """Readings of the claim: each interval has the level 1 - 0.05 / readings."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `sharpen_spec`."""

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms, as far as they are known without the task's files."""
        return tuple(self.options.get("arms", ())) or tuple(f"r={r:g}" for r in self.options["ratios"])

    def spec(self, data_dir: str | None, *, corpus: str | None = None, budget: float | None = None) -> ExperimentSpec:
        """The experiment, with the task's files in the data folder; a budget reduces the number of seeds."""
        if corpus is not None:
            raise UsageError(f"the claim is tested on a task ({self.task}), got the text {corpus}: leave it out")
        data = None
        if self.files is not None:
            if data_dir is None:
                raise UsageError(f"the task {self.task} needs files: give --data-dir with {self.files}")
            data = str((Path(data_dir) / self.files).absolute())
        return sharpen_spec(
            TaskConfig(name=self.task, data=data, test=self.test),
            seeds=self.seeds if budget is None else max(MIN_SEEDS, self.seeds // 2),
            rationale=RationaleSpec(level=1 - 0.05 / self.readings),
            **self.options,
        )


Study = LanguageStudy | TaskStudy
