"""What a training run is made of. A run is a function of this config, its two seeds and the corpus: nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from qkflow.circuits import RatioSchedule
from qkflow.data import CorpusConfig
from qkflow.errors import UsageError
from qkflow.models import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run, whole.

    >>> from qkflow.data import CorpusConfig
    >>> from qkflow.models import size
    >>> config = TrainConfig(corpus=CorpusConfig(), model=size("1m"), steps=2000)
    >>> config.context, config.batch, config.tokens
    (256, 32, 16384000)
    """

    corpus: CorpusConfig
    """The text, and how it becomes tokens."""
    model: DecoderConfig
    """The model."""
    steps: int
    """Optimiser steps."""
    context: int = 256
    """Tokens a window; for a task, those of its instances."""
    batch: int = 32
    """Windows a step, over all its micro-batches."""
    accumulate: int = 1
    """Micro-batches a step: the batch is cut into this many equal parts whose gradients are summed."""

    lr: float = 3e-3
    """The highest learning rate of the schedule."""
    schedule: Literal["cosine", "stable"] = "cosine"
    """After the warm-up: `cosine` falls all the way, `stable` stays, and falls over the last `decay` of the steps."""
    warmup: int | None = None
    """Steps of linear warm-up; None: a tenth of the steps, at most 100."""
    decay: float = 0.2
    """The part of the steps over which a `stable` schedule falls."""
    floor: float = 0.1
    """The learning rate at the end, as a part of `lr`."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's two decay rates."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.1
    """AdamW's weight decay, on matrices only."""
    qk_ratio: float = 1.0
    """How many times as fast as everything else queries and keys learn."""
    qk_growth: float | None = None
    """What that ratio grows to by the end, on a straight line; None: it stays."""
    clip: float | None = 1.0
    """The largest norm of the gradient; longer ones are scaled down to it. None: not clipped."""

    seed: int = 0
    """Initialisation and dropout."""
    data_seed: int = 0
    """The order of the batches."""
    initial: str | None = None
    """SHA-256 of the weights the run begins with (RUN/initial.safetensors); None: drawn from the seed."""
    crossing: bool = True
    """Whether attention may cross from one document of a window into the next."""

    evaluate_every: int = 250
    """Steps between evaluations on validation documents; there is one before the first step and one after the last."""
    evaluate_tokens: int | None = 65536
    """Tokens of an evaluation during training, at most; None: all."""
    final_tokens: int | None = None
    """Tokens of the evaluation after the last step, at most; None: all."""
    evaluate_batch: int = 32
    """Windows a batch in evaluations."""
    stride: int | None = None
    """Tokens scored a window in evaluations; None: all of it. Less gives each more context, at more compute."""

    checkpoint_every: int | None = 1000
    """Steps between checkpoints; None: not by steps."""
    checkpoint_minutes: float | None = 10.0
    """Minutes between checkpoints; None: not by time."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to train; `auto` takes the first there is of cuda, mps, cpu."""
    threads: int | None = None
    """CPU threads of torch, on which the last bits of a result depend; None: as torch stands, and on record."""
    compile: bool = False
    """Whether to compile the model."""

    def __post_init__(self) -> None:
        for name in ("steps", "context", "batch", "accumulate", "evaluate_every", "evaluate_batch", "log_every"):
            _at_least(name, getattr(self, name), 1)
        for name in ("evaluate_tokens", "final_tokens", "stride", "checkpoint_every", "threads"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        for name in ("seed", "data_seed"):
            _at_least(name, getattr(self, name), 0)
        if self.warmup is not None and not 0 <= self.warmup <= self.steps:
            raise UsageError(f"warmup must lie between 0 and the {self.steps} steps of the run, got {self.warmup}")
        if self.batch % self.accumulate:
            raise UsageError(
                f"batch {self.batch} does not divide into {self.accumulate} equal micro-batches: "
                "make accumulate a divisor of batch"
            )
        if self.compile and not self.crossing:
            raise UsageError("compile needs crossing: documents cut every batch anew, and each would be compiled again")
        if self.stride is not None and self.stride > self.context:
            raise UsageError(f"stride {self.stride} is longer than the context {self.context}: make it at most that")
        for name in ("lr", "eps", "clip", "checkpoint_minutes", "qk_ratio", "qk_growth"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{name} must be a finite number above 0, got {value}")
        for name, value in (("decay", self.decay), ("floor", self.floor)):
            if not 0 <= value <= 1:
                raise UsageError(f"{name} must lie between 0 and 1, got {value}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UsageError(f"betas must lie in [0, 1), got {self.betas}")
        if not 0 <= self.weight_decay < math.inf:
            raise UsageError(f"weight_decay must be a finite number, at least 0, got {self.weight_decay}")

    @property
    def ratio(self) -> RatioSchedule:
        """The learning rate of queries and keys, as a multiple of everything else's."""
        return RatioSchedule(start=self.qk_ratio, end=self.qk_growth)

    @property
    def tokens(self) -> int:
        """Tokens the whole run trains on."""
        return self.steps * self.batch * self.context


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError(f"{name} must be at least {least}, got {value}")
