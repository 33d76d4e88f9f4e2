"""How others watch a run: the loop calls, and imports nothing of theirs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from torch import nn

from qkflow.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as its callbacks see it. The model is the live one: look, do not touch."""

    folder: Path
    """The run folder."""
    config: TrainConfig
    """Its config."""
    model: nn.Module
    """The model in training."""
    step: int
    """Steps made before this session: 0, or what the checkpoint holds."""
    corpus: str
    """The corpus: its name and the beginning of its hash."""
    processes: int = 1
    """How many processes train it together. Callbacks are called in the first of them only."""
    parallel: Literal["ddp", "fsdp"] | None = None
    """How they do; under `fsdp` the model's parameters are sharded, and the first process cannot run it alone."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a finished run has come to."""

    folder: Path
    """The run folder."""
    step: int
    """Steps made."""
    metrics: Mapping[str, Any]
    """The last evaluation's record: bits_per_byte, perplexity and so on; of a task, accuracy."""
    documents: np.ndarray
    """Loss of each held-out document: nats, tokens, bytes."""
    was_finished: bool
    """True if the run had been finished before, and nothing was done."""


class Callback:
    """A watcher that does nothing: override what you need. Called in the training process, between steps.

    >>> class Losses(Callback):
    ...     def __init__(self):
    ...         self.losses = []
    ...     def on_step(self, record):
    ...         self.losses.append(record["loss"])
    """

    def on_start(self, run: Run) -> None:
        """Training is about to begin or to go on."""

    def on_step(self, record: Mapping[str, Any]) -> None:
        """A step was made; the record is the one of metrics.jsonl, here for every step."""

    def on_evaluate(self, record: Mapping[str, Any]) -> None:
        """The held-out documents were evaluated."""

    def on_checkpoint(self, path: Path) -> None:
        """A checkpoint is in place."""

    def on_notice(self, text: str) -> None:
        """Something the user should read, on one line."""

    def on_end(self, result: Result) -> None:
        """The run is finished, and its folder complete."""


class Measurement(Protocol):
    """What an experiment measures on a run besides its held-out loss.

    The model is in evaluation mode. Training after a measurement has the same bits as without it.
    """

    def steps(self, config: TrainConfig) -> Collection[int]:
        """Numbers of steps after which to measure; 0 measures before the first step."""
        ...

    def measure(self, model: nn.Module, step: int) -> Mapping[str, Any]:
        """JSON values, written to metrics.jsonl as `{"kind": "measure", "step": step, **values}`."""
        ...

    def finish(self, model: nn.Module, folder: Path) -> None:
        """Write more files (atomically), after the last step and evaluation and before weights.safetensors."""
        ...


class Callbacks(Callback):
    """Several watchers as one."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.all = tuple(callbacks)

    def on_start(self, run: Run) -> None:  # noqa: D102
        for callback in self.all:
            callback.on_start(run)

    def on_step(self, record: Mapping[str, Any]) -> None:  # noqa: D102
        for callback in self.all:
            callback.on_step(record)

    def on_evaluate(self, record: Mapping[str, Any]) -> None:  # noqa: D102
        for callback in self.all:
            callback.on_evaluate(record)

    def on_checkpoint(self, path: Path) -> None:  # noqa: D102
        for callback in self.all:
            callback.on_checkpoint(path)

    def on_notice(self, text: str) -> None:  # noqa: D102
        for callback in self.all:
            callback.on_notice(text)

    def on_end(self, result: Result) -> None:  # noqa: D102
        for callback in self.all:
            callback.on_end(result)
