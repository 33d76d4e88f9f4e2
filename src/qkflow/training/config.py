"""The configuration of a training run. The result is a function of this config and the data alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from qkflow.circuits import RatioSchedule
from qkflow.data import CorpusConfig
from qkflow.data.tasks import TaskConfig
from qkflow.errors import UsageError
from qkflow.models import ClassifierConfig, DecoderConfig
from qkflow.models.one_layer import OneLayerConfig
from qkflow.training.reproducibility import validate_threads

ModelConfig = DecoderConfig | ClassifierConfig | OneLayerConfig


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The configuration of a training run.

    >>> from qkflow.models import size
    >>> config = TrainConfig(data=CorpusConfig(), model=size("1m"), steps=2000)
    >>> config.context, config.batch, config.tokens
    (256, 32, 16384000)
    """

    data: CorpusConfig | TaskConfig
    """A corpus (text, or a recall task), or a task with rationales."""
    model: ModelConfig
    """The model. A classification task needs a classifier or `OneLayer`; everything else needs a decoder."""
    steps: int
    """Optimizer steps."""
    context: int = 256
    """Context length in tokens. For a recall task, the length of its instances. Tasks ignore it."""
    batch: int = 32
    """Sequences per step, over all micro-batches and processes."""
    accumulate: int = 1
    """Micro-batches per step, of equal size; their gradients are summed."""

    optimizer: Literal["adamw", "muon", "sgd"] = "adamw"
    """AdamW; Muon for the matrices in blocks and AdamW for the rest; or stochastic gradient descent with momentum."""
    lr: float = 3e-3
    """The peak learning rate."""
    schedule: Literal["cosine", "stable", "constant"] = "cosine"
    """After the warm-up: `cosine` decays to the end, `stable` decays over the last `decay` of the steps, `constant`
    does not decay."""
    warmup: int | None = None
    """Steps of linear warm-up; None: a tenth of the steps, at most 100."""
    decay: float = 0.2
    """The fraction of the steps over which a `stable` schedule decays."""
    floor: float = 0.1
    """The final learning rate, as a fraction of `lr`."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's betas."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    momentum: float = 0.0
    """The momentum of `sgd`."""
    weight_decay: float = 0.1
    """Weight decay, of matrices only."""
    clip: float | None = 1.0
    """The maximum gradient norm; None: no clipping."""
    qk_ratio: float = 1.0
    """The learning rate of queries and keys, as a multiple of the learning rate of the rest."""
    qk_growth: float | None = None
    """The value that `qk_ratio` grows to linearly by the last step; None: constant."""
    embedding_ratio: float = 1.0
    """The learning rate of embeddings, as a multiple of the learning rate of the rest."""

    seed: int = 0
    """Seed of initialization and dropout."""
    data_seed: int = 0
    """Seed of the batch order."""
    initial: str | None = None
    """SHA-256 of the initial weights (RUN/initial.safetensors); None: initialized from the seed."""
    crossing: bool = True
    """Whether attention may cross document boundaries within a sequence."""

    evaluate_every: int = 250
    """Steps between evaluations on validation data. Step 0 and the last step are always evaluated."""
    evaluate_tokens: int | None = 65536
    """Maximum number of tokens per evaluation during training; None: all."""
    final_tokens: int | None = None
    """Maximum number of tokens in the evaluation after the last step; None: all."""
    final_split: Literal["validation", "test"] = "validation"
    """The documents of the evaluation after the last step. Test documents should choose nothing: no rate, no size."""
    evaluate_batch: int = 32
    """Sequences per evaluation batch."""
    stride: int | None = None
    """Tokens scored per evaluation window; None: all of them. A smaller stride gives each token more context."""

    checkpoint_every: int | None = 1000
    """Steps between checkpoints; None: no checkpoints by step."""
    checkpoint_minutes: float | None = 10.0
    """Minutes between checkpoints; None: no checkpoints by time."""
    log_every: int = 10
    """Steps between records in metrics.jsonl."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """The device; `auto` is the first available of cuda, mps and cpu."""
    threads: int | None = None
    """CPU threads; None: PyTorch's current number. The last bits of a result depend on it."""
    flush_denormals: bool = False
    """Whether denormal numbers count as zero on the CPU: sharp attention produces many, and they are slow."""
    compile: bool = False
    """Whether to compile the model."""

    def __post_init__(self) -> None:
        for name in ("steps", "context", "batch", "accumulate", "evaluate_every", "evaluate_batch", "log_every"):
            _require_at_least(name, getattr(self, name), 1)
        for name in ("evaluate_tokens", "final_tokens", "stride", "checkpoint_every", "threads"):
            if getattr(self, name) is not None:
                _require_at_least(name, getattr(self, name), 1)
        for name in ("seed", "data_seed"):
            _require_at_least(name, getattr(self, name), 0)
            if getattr(self, name) >= 2**63:
                raise UsageError(f"{name} must be below 2^63, got {getattr(self, name)}")
        validate_threads(self.threads)
        if self.warmup is not None and not 0 <= self.warmup <= self.steps:
            raise UsageError(f"warmup must be between 0 and the number of steps ({self.steps}), got {self.warmup}")
        if self.batch % self.accumulate:
            raise UsageError(
                f"batch {self.batch} is not divisible by accumulate {self.accumulate}: set accumulate to a divisor"
            )
        if self.compile and not self.crossing:
            raise UsageError(
                "compile requires crossing=True: document boundaries differ in each batch and would cause recompilation"
            )
        if self.stride is not None and self.stride > self.context:
            raise UsageError(f"stride must be at most the context length {self.context}, got {self.stride}")
        for name in ("lr", "eps", "clip", "checkpoint_minutes", "qk_ratio", "qk_growth", "embedding_ratio"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{name} must be a finite number above 0, got {value}")
        for name, value in (("decay", self.decay), ("floor", self.floor)):
            if not 0 <= value <= 1:
                raise UsageError(f"{name} must be between 0 and 1, got {value}")
        if not 0 <= self.momentum < 1:
            raise UsageError(f"momentum must be in [0, 1), got {self.momentum}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UsageError(f"betas must be in [0, 1), got {self.betas}")
        if not 0 <= self.weight_decay < math.inf:
            raise UsageError(f"weight_decay must be a finite number, at least 0, got {self.weight_decay}")

    @property
    def ratio(self) -> RatioSchedule:
        """The schedule of the learning-rate ratio of queries and keys."""
        return RatioSchedule(start=self.qk_ratio, end=self.qk_growth)

    @property
    def tokens(self) -> int:
        """Training tokens of the whole run."""
        return self.steps * self.batch * self.context


def task_defaults(*, data: TaskConfig, model: ModelConfig, steps: int, lr: float) -> TrainConfig:
    """A config for a task with rationales: a constant learning rate, no weight decay, no clipping, one CPU thread.

    >>> shape = ClassifierConfig(width=32, layers=1, heads=1, vocabulary=100, classes=2)
    >>> config = task_defaults(data=TaskConfig(), model=shape, steps=100, lr=1e-3)
    >>> config.schedule, config.batch
    ('constant', 64)
    """
    return TrainConfig(
        data=data,
        model=model,
        steps=steps,
        lr=lr,
        batch=64,
        schedule="constant",
        warmup=0,
        betas=(0.9, 0.999),
        weight_decay=0.0,
        clip=None,
        threads=1,
        flush_denormals=True,
        device="cpu",
    )


def _require_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError(f"{name} must be at least {least}, got {value}")
