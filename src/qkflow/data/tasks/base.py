"""Tasks with known rationales: a text, a label, and the positions of the text that determine the label.

    the  author  next  to  the  guards  ->  singular          rationale: (1,)     'author', the subject's head noun

Rationales make it possible to measure whether attention is faithful. In a `classification` task the label is a class;
in a `generation` task the answer is a sequence of tokens, and the label is its first token. The model answers at the
last token of the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

from qkflow.data.text.splits import SPLITS, SplitName
from qkflow.errors import UsageError, unknown

TaskName = Literal["agreement", "synthetic", "squad", "squad-entities", "hatexplain", "sst2"]
Kind = Literal["classification", "generation"]


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Configuration of a task."""

    name: TaskName = "agreement"
    data: str | None = None
    """Path of the task's files; not needed for `agreement` and `synthetic`."""
    seed: int = 0
    """Seed of generated texts and of splits."""
    train: int | None = None
    """Maximum number of training instances; None: all, or the default of a generated task."""
    test: int | None = None
    """Maximum number of test instances, and of validation instances."""
    longest: int | None = None
    """Maximum tokens per instance; longer instances are skipped and counted."""
    vocabulary: int | None = None
    """Maximum vocabulary size (most frequent words); None: all words that occur twice in the training texts."""

    def __post_init__(self) -> None:
        if self.name not in get_args(TaskName):
            raise unknown("task", self.name, get_args(TaskName))
        for name in ("train", "test", "longest", "vocabulary"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")

    def limit(self, split: SplitName) -> int | None:
        """Return the maximum number of instances of a split."""
        return self.train if split == "train" else self.test


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A text with its answer.

    >>> Instance(tokens=(5, 6, 7), label=1, rationale=(0,)).protected
    ()
    """

    tokens: tuple[int, ...]
    """The input; the model answers at the last token."""
    label: int
    """The class, or the first token of the answer."""
    rationale: tuple[int, ...]
    """Positions in `tokens` that determine the answer, ascending; empty if unknown."""
    protected: tuple[int, ...] = ()
    """Positions that deletion tests never delete: separators, a question, the query token."""
    answer: tuple[int, ...] = ()
    """Generation only: all tokens of the answer, including its end token."""
    kind: str = ""
    """Category for result tables, such as a template or a source."""

    def __post_init__(self) -> None:
        positions = (*self.rationale, *self.protected)
        if not self.tokens or any(not 0 <= position < len(self.tokens) for position in positions):
            raise UsageError(
                f"rationale or protected position {max(positions, default=0)} is outside an instance of "
                f"{len(self.tokens)} tokens: skip the instance and count it as skipped"
            )


@dataclass(frozen=True, kw_only=True)
class Task:
    """The instances of a task, divided into splits."""

    name: str
    """Display name, such as `agreement (built-in grammar)` or `HateXplain`."""
    kind: Kind
    words: tuple[str, ...]
    """The word of each token."""
    classes: tuple[str, ...]
    """The name of each label; for generation, the words."""
    train: tuple[Instance, ...]
    validation: tuple[Instance, ...]
    """Used to select learning rates and to monitor training, not for results."""
    test: tuple[Instance, ...]
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Number of skipped instances by reason."""
    is_quotable: bool = True
    """Whether reports may show texts; False for offensive posts."""
    notes: tuple[str, ...] = ()
    """Notes for readers of results, such as how the data were split."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "skipped", {reason: count for reason, count in self.skipped.items() if count})
        for split in SPLITS:
            if not getattr(self, split):
                raise UsageError(f"{self.name} has no {split} instances: use more data, or allow longer instances")
        held_out = {instance.label for instance in (*self.validation, *self.test)}
        if (unseen := held_out - {instance.label for instance in self.train}) and self.kind == "classification":
            names = ", ".join(repr(self.classes[label]) for label in sorted(unseen))
            raise UsageError(f"{self.name}: no training instance has the label {names}: use more training data")

    @cached_property
    def digest(self) -> str:
        """Hash of everything that a model trained or tested on the task sees."""
        content = (self.kind, self.words, self.classes, self.train, self.validation, self.test)
        return hashlib.sha256(repr(content).encode("utf-8", "surrogatepass")).hexdigest()
