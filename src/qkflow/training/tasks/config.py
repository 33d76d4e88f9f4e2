"""What the training of a model on a task is a function of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from qkflow.data.tasks import TaskConfig
from qkflow.errors import UsageError
from qkflow.models import ClassifierConfig, DecoderConfig
from qkflow.models.one_layer import OneLayerConfig

ModelConfig = ClassifierConfig | DecoderConfig | OneLayerConfig


@dataclass(frozen=True, kw_only=True)
class TaskRunConfig:
    """One training run on a task, whole.

    >>> shape = ClassifierConfig(width=32, layers=1, heads=1, vocabulary=100, classes=2)
    >>> TaskRunConfig(task=TaskConfig(), model=shape, steps=100, lr=1e-3, qk_ratio=20.0).qk_ratio
    20.0
    """

    task: TaskConfig
    """The task."""
    model: ModelConfig
    """The model: one that classifies, or one that writes an answer."""
    steps: int
    """Optimiser steps."""
    lr: float
    """The learning rate of all but the QK circuit."""
    batch: int = 64
    """Instances a step."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW, or gradient descent with momentum."""
    momentum: float = 0.0
    """Of gradient descent."""
    weight_decay: float = 0.0
    """On matrices only."""
    clip: float | None = None
    """The largest norm of the gradient; None: not clipped."""
    qk_ratio: float = 1.0
    """r: how many times as fast the QK circuit learns."""
    qk_growth: float | None = None
    """What r grows to, in a straight line over the steps; None: it stays."""
    embedding_ratio: float = 1.0
    """How many times as fast embeddings learn: 1, but for the arms as they were published."""
    seed: int = 0
    """Initialisation."""
    data_seed: int = 0
    """The order of the instances."""
    threads: int | None = 1
    """CPU threads; None: as torch stands."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("lr", "clip", "qk_ratio", "qk_growth", "embedding_ratio"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{name} must be a finite number above 0, got {value:g}")
        if not 0 <= self.momentum < 1:
            raise UsageError(f"momentum must be from 0 up to 1, got {self.momentum}")
        if not 0 <= self.weight_decay < math.inf:
            raise UsageError(f"weight_decay must be a finite number, at least 0, got {self.weight_decay}")
