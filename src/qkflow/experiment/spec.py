"""What the user asks an experiment for. The design follows from this, the data and the machine.

Arms are written as a mechanism with options, some of which belong to the training:

    standard:r=20                       queries and keys learn 20 times as fast as the rest
    qdelta+affine:r=5,growth=40         5 times as fast at first, 40 times at the end
    standard:r=100,embeddings=100       embeddings learn 100 times as fast, too
    differential:window=64,r=20         with an option of the mechanism
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, get_args

from qkflow.circuits import RatioSchedule
from qkflow.data import CorpusConfig
from qkflow.data.tasks import TaskConfig
from qkflow.errors import UsageError, unknown
from qkflow.mechanisms import mechanism, mechanisms
from qkflow.models import SIZES, DecoderConfig
from qkflow.probes.attention import Pooling
from qkflow.training import TrainConfig
from qkflow.training.regime import OptimizerName
from qkflow.training.reproducibility import validate_threads

Match = Literal["tokens", "flops", "seconds"]
Device = Literal["auto", "cpu", "cuda", "mps"]

MOST_SEEDS = 1000
_TRAINING_OPTIONS = ("r", "growth", "embeddings")


class ParsedArm(NamedTuple):
    """An arm's mechanism, and how fast its queries, keys and embeddings learn."""

    mechanism: str
    ratio: RatioSchedule
    embedding_ratio: float


def parse_arm(name: str) -> ParsedArm:
    """Split an arm's name into the mechanism and the options of the training.

    >>> parse_arm("qdelta+affine:alternations=2,r=5,growth=40").ratio
    RatioSchedule(start=5.0, end=40.0)
    >>> parse_arm("standard:r=1").mechanism
    'standard'
    """
    head, _, options = name.partition(":")
    mechanism_options: list[str] = []
    values: dict[str, float] = {}
    for item in filter(None, options.split(",")):
        key, _, text = (word.strip() for word in item.partition("="))
        if key not in _TRAINING_OPTIONS:
            mechanism_options.append(item)
        elif key in values:
            raise UsageError(f"the arm {name!r} gives {key} twice: give it once")
        else:
            values[key] = _positive(name, key, text)
    start, end = values.get("r", 1.0), values.get("growth")
    ratio = RatioSchedule(start=start, end=None if end == start else end)
    spec = ":".join([head, ",".join(mechanism_options)] if mechanism_options else [head])
    return ParsedArm(spec, ratio, values.get("embeddings", 1.0))


def refuse_duplicate_arms(arms: Sequence[str]) -> None:
    """Raise `UsageError` if a mechanism is unknown, or two arms are the same mechanism trained the same way."""
    parsed = [parse_arm(arm) for arm in arms]
    configs = [(mechanism(arm.mechanism), arm.ratio, arm.embedding_ratio) for arm in parsed]
    for index, config in enumerate(configs):
        if config in configs[:index]:
            twin = arms[configs.index(config)]
            raise UsageError(f"the arms {twin!r} and {arms[index]!r} are the same: give each once")


@dataclass(frozen=True, kw_only=True)
class RationaleSpec:
    """How attention on the rationales of a task is measured."""

    tau: float = 0.5
    """The attention mass on the rationale from which attention counts as confident."""
    pooling: Pooling = "average"
    """How the attention maps of several layers are pooled."""
    fraction: float = 0.05
    """The fraction of tokens that is deleted to measure comprehensiveness."""
    level: float = 0.95
    """The confidence level of intervals."""

    def __post_init__(self) -> None:
        for name in ("tau", "fraction"):
            if not 0 < getattr(self, name) <= 1:
                raise UsageError(f"{name} must be above 0 and at most 1, got {getattr(self, name):g}")
        if not 0 < self.level < 1:
            raise UsageError(f"level must be between 0 and 1, got {self.level:g}")
        if self.pooling not in get_args(Pooling):
            raise unknown("pooling", self.pooling, get_args(Pooling))


@dataclass(frozen=True, kw_only=True)
class ExperimentSpec:
    """A question: do these arms differ from the first one on this data?

    >>> spec = ExperimentSpec(data=CorpusConfig(), arms=("standard", "differential"), budget=180.0)
    >>> spec.baseline
    'standard'
    """

    data: CorpusConfig | TaskConfig
    """A corpus, or a task with rationales."""
    arms: tuple[str, ...]
    """Mechanisms with options, such as `differential:window=64` or `standard:r=20`. The first is the baseline."""
    match: Match = "tokens"
    """What all arms share besides the number of parameters: training tokens, FLOPs, or measured training time."""
    budget: float | None = None
    """Seconds for the whole experiment; None: ten minutes, or no limit if `tokens` is given."""
    size: str | None = None
    """A named model size; None: what the budget allows."""
    model: DecoderConfig | None = None
    """A model shape instead of a named size; its mechanism is replaced by that of each arm."""
    tokens: int | None = None
    """Training tokens per run of the baseline; None: what the budget allows."""
    seeds: int | None = None
    """The most runs per arm; None: what the budget allows."""
    first_seed: int = 0
    """The first seed; the others follow it."""
    adaptive: bool = True
    """Whether arms are judged in rounds and get no further seeds once they are decided. If not, every arm has `seeds`
    runs and is judged once."""
    learning_rates: tuple[float, ...] | None = None
    """If more than one, each arm tries all of them in tuning runs and uses its best. None: the default of each
    mechanism, tuned if the budget is at least 30 minutes."""
    optimizer: OptimizerName = "muon"
    """Muon for the matrices in blocks and AdamW for the rest, or AdamW for all. Presets have their own."""
    context: int | None = None
    """Context length in tokens; None: chosen by model size."""
    batch: int | None = None
    """Batch size (sequences); None: chosen by model size."""
    margin: float = 0.005
    """The equivalence margin, as a fraction of the baseline's loss."""
    error_rate: float = 0.05
    """The chance of a false better or worse over all arms and rounds; the same for a false equivalent."""
    passes: float = 4.0
    """Maximum number of passes over the corpus per run."""
    jobs: int | None = None
    """Concurrent runs; None: as many as the cores allow."""
    threads: int | None = None
    """CPU threads per run; None: one, if there are at least as many runs as cores."""
    device: Device = "auto"
    """Where to train."""
    base: TrainConfig | None = None
    """The complete training config of all runs, as presets give it. Each arm sets its mechanism and ratios, and each
    run its seeds and learning rate. No budget applies then."""
    rationale: RationaleSpec | None = None
    """How attention on rationales is measured; None: it is not."""

    def __post_init__(self) -> None:
        if len(self.arms) < 2:
            raise UsageError(
                f"at least two arms are needed, got {', '.join(self.arms) or 'none'}: give --arms standard,differential"
            )
        for index, arm in enumerate(self.arms):
            if arm in self.arms[:index]:
                raise UsageError(f"the arm {arm!r} is given twice: give each once")
        if self.size is not None and self.model is not None:
            raise UsageError("got both a size and a model: give one of them")
        if self.size is not None and self.size not in SIZES:
            raise unknown("size", self.size, SIZES)
        for name in ("tokens", "seeds", "context", "batch", "jobs", "threads"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        for name in ("budget", "passes"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise UsageError(f"{name} must be a finite number above 0, got {value:g}")
        for name in ("margin", "error_rate"):
            if not 0 < getattr(self, name) < 1:
                raise UsageError(f"{name} must be between 0 and 1, got {getattr(self, name):g}")
        validate_threads(self.threads)
        if self.first_seed < 0:
            raise UsageError(f"first_seed must be at least 0, got {self.first_seed}")
        if self.first_seed >= 2**63 - MOST_SEEDS:
            raise UsageError(f"first_seed must be below 2^63 - {MOST_SEEDS}, got {self.first_seed}")
        if self.seeds is not None and self.seeds > MOST_SEEDS:
            raise UsageError(f"seeds must be at most {MOST_SEEDS}, got {self.seeds}")
        if not self.adaptive and self.seeds is None:
            raise UsageError("a study that is not adaptive needs a number of seeds: give seeds")
        rates = self.learning_rates
        if rates is not None and (not rates or len(set(rates)) < len(rates)):
            raise UsageError(f"learning rates must be given, each once, got {rates}")
        for rate in rates or ():
            if not 0 < rate < math.inf:
                raise UsageError(f"a learning rate must be a finite number above 0, got {rate:g}")
        self._check_base()

    def _check_base(self) -> None:
        if isinstance(self.data, TaskConfig) and self.base is None:
            raise UsageError(f"the task {self.data.name} needs a training config: use `sharpen_spec`")
        if self.rationale is not None and not isinstance(self.data, TaskConfig):
            raise UsageError("rationales are measured on tasks, got a corpus: leave out `rationale`")
        if self.base is None:
            return
        if self.base.data != self.data:
            raise UsageError("the training config has other data than the experiment: give the same")
        fixed = ("budget", "size", "model", "tokens", "context", "batch", "threads")
        if superfluous := [name for name in fixed if getattr(self, name) is not None]:
            raise UsageError(f"{', '.join(superfluous)} would override the training config: set it there")

    @property
    def baseline(self) -> str:
        """The arm that the others are compared with."""
        return self.arms[0]


def all_arms() -> tuple[str, ...]:
    """All registered mechanisms, with standard as the baseline."""
    return ("standard", *sorted(name for name in mechanisms() if name != "standard"))


def split_arms(text: str) -> tuple[str, ...]:
    """Split a comma-separated list of arms, whose options are separated by commas, too.

    >>> split_arms("standard, differential:window=64,qk_norm=true,standard:window=8")
    ('standard', 'differential:window=64,qk_norm=true', 'standard:window=8')
    """
    arms: list[str] = []
    for piece in (piece.strip() for piece in text.split(",")):
        if arms and "=" in piece and ":" not in piece.split("=")[0]:
            arms[-1] += f",{piece}"
        else:
            arms.append(piece)
    return tuple(arm for arm in arms if arm)


def spec_differences(stored: ExperimentSpec, requested: ExperimentSpec) -> tuple[str, ...]:
    """One line per field in which two specs differ.

    >>> stored = ExperimentSpec(data=CorpusConfig(), arms=("standard", "differential"), seeds=5)
    >>> spec_differences(stored, ExperimentSpec(data=CorpusConfig(), arms=("standard", "differential"), seeds=3))
    ('seeds: 5 in the study, 3 requested',)
    """
    pairs = [(field.name, getattr(stored, field.name), getattr(requested, field.name)) for field in fields(stored)]
    return tuple(
        f"{name}: {_format(old)} in the study, {_format(new)} requested" for name, old, new in pairs if old != new
    )


def _positive(arm: str, key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"the arm {arm!r}: {key} must be a finite number above 0, got {text!r}")
    return value


def _format(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_format, value))
    if isinstance(value, CorpusConfig):
        default = CorpusConfig()
        changed = [
            f for f in fields(value) if f.name != "source" and getattr(value, f.name) != getattr(default, f.name)
        ]
        return " ".join([value.source, *(f"{field.name}={getattr(value, field.name)}" for field in changed)])
    return f"{value:g}" if isinstance(value, float) else str(value)
