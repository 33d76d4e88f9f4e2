"""Training callbacks, measurements, and the result of a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from torch import nn

from qkflow.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, as callbacks see it."""

    folder: Path
    config: TrainConfig
    model: nn.Module
    """The model in training; do not modify it."""
    step: int
    """Steps completed before this session: 0, or those of the checkpoint."""
    data: str
    """The name of the data and the first digits of its hash."""
    processes: int = 1
    """The number of processes. Callbacks are called on rank 0 only."""
    parallel: Literal["ddp", "fsdp"] | None = None
    """How the model is distributed. Under `fsdp` its parameters are sharded, and rank 0 cannot run it alone."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a finished run."""

    folder: Path
    step: int
    """Steps completed."""
    metrics: Mapping[str, Any]
    """The record of the last evaluation: bits_per_byte, perplexity and so on; of a task, accuracy."""
    documents: np.ndarray
    """The loss of each held-out document: nats, tokens, bytes."""
    was_finished: bool
    """Whether the run was already finished, and nothing was done."""


class Callback:
    """Base class for training callbacks. Methods are called in the training process, between steps.

    >>> class Losses(Callback):
    ...     def __init__(self):
    ...         self.losses = []
    ...     def on_step(self, record):
    ...         self.losses.append(record["loss"])
    """

    def on_start(self, run: Run) -> None:
        """Called before the first step of a session."""

    def on_step(self, record: Mapping[str, Any]) -> None:
        """Called after every step, with its record as in metrics.jsonl."""

    def on_evaluation_progress(self, done: int, total: int) -> None:
        """Called between the batches of an evaluation, with the tokens that were read and all that will be."""

    def on_evaluate(self, record: Mapping[str, Any]) -> None:
        """Called after every evaluation, with its record."""

    def on_checkpoint(self, path: Path) -> None:
        """Called after a checkpoint was written."""

    def on_notice(self, text: str) -> None:
        """Called with a one-line message for the user."""

    def on_end(self, result: Result) -> None:
        """Called when the run is finished and its folder is complete."""


@runtime_checkable
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
