"""Tasks whose answer rests on words that are known: a text, a label, and the places of the text that decide it.

    the  author  next  to  the  guards  ->  singular          rationale: (1,)     'author', the subject's head noun

Attention that can be read lies on the rationale; a task says where that is, so that it can be measured. Two kinds:
`classification` (the label is one of a few classes) and `generation` (the answer is a row of tokens, and the label is
the first of them). Either way the answer is asked for at the last token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

from qkflow.errors import UsageError, unknown

TaskName = Literal["agreement", "synthetic", "squad", "hatexplain"]
Kind = Literal["classification", "generation"]

PADDING, UNKNOWN = "<pad>", "<unk>"
"""The first two words of every vocabulary of words; padding is never read."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Which task, and how much of it."""

    name: TaskName = "agreement"
    """The task."""
    data: str | None = None
    """Where its files lie; `agreement` and `synthetic` need none."""
    seed: int = 0
    """Decides what a generator makes, and what a split puts where."""
    train: int | None = None
    """Training instances, at most; None: all there are, or what the task usually has."""
    test: int | None = None
    """Test instances, at most, and as many for validation."""
    longest: int | None = None
    """Tokens of an instance, at most; longer ones are skipped, and counted."""
    vocabulary: int | None = None
    """Words known, at most, the most frequent ones; None: all that training texts have twice."""

    def __post_init__(self) -> None:
        if self.name not in get_args(TaskName):
            raise unknown("task", self.name, get_args(TaskName))
        for name in ("train", "test", "longest", "vocabulary"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One text with its answer.

    >>> Instance(tokens=(5, 6, 7), label=1, rationale=(0,)).protected
    ()
    """

    tokens: tuple[int, ...]
    """What the model reads; it answers at the last."""
    label: int
    """The class, or the first token of the answer."""
    rationale: tuple[int, ...]
    """The places in `tokens` that the answer rests on, rising; empty where nobody said."""
    protected: tuple[int, ...] = ()
    """Places that are never taken away when words are deleted: separators, a question, the token that asks."""
    answer: tuple[int, ...] = ()
    """Generation: all tokens of the answer, with the one that ends it."""
    kind: str = ""
    """What sort of instance it is (a template, a source), for a break-down."""

    def __post_init__(self) -> None:
        places = (*self.rationale, *self.protected)
        if not self.tokens or any(not 0 <= place < len(self.tokens) for place in places):
            raise UsageError(
                f"an instance of {len(self.tokens)} tokens has a rationale or kept places outside of it:"
                f" {sorted(places)[-1:]}; skip it, and count it"
            )


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task, read and split."""

    name: str
    """What to call it: `agreement (built-in grammar)`, `HateXplain`."""
    kind: Kind
    """Whether a class or a text is asked for."""
    words: tuple[str, ...]
    """What each token stands for."""
    classes: tuple[str, ...]
    """What each label stands for; of a generated answer, the words."""
    train: tuple[Instance, ...]
    validation: tuple[Instance, ...]
    """For choosing a learning rate and watching, never for a result."""
    test: tuple[Instance, ...]
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Instances left out, by reason."""
    is_quotable: bool = True
    """Whether texts of it may be shown; posts full of slurs may not."""
    notes: tuple[str, ...] = ()
    """What a reader of results should know: how it was split, what is ours."""

    def __post_init__(self) -> None:
        for part in ("train", "validation", "test"):
            instances: tuple[Instance, ...] = getattr(self, part)
            if not instances:
                raise UsageError(f"{self.name} has no {part} instances: give more data, or allow longer ones")
            for instance in instances:
                words = (*instance.tokens, *instance.answer)
                if not 0 <= instance.label < len(self.classes) or min(words) < 0 or max(words) >= len(self.words):
                    raise UsageError(f"{self.name}: an instance of {part} has a label or a word that is not known")
                if self.kind == "generation" and instance.answer[:1] != (instance.label,):
                    raise UsageError(f"{self.name}: an instance of {part} has an answer that its label does not begin")
        unseen = {one.label for one in (*self.validation, *self.test)} - {one.label for one in self.train}
        if unseen and self.kind == "classification":
            names = ", ".join(repr(self.classes[label]) for label in sorted(unseen))
            raise UsageError(f"{self.name}: no training instance has the label {names}: give more, or leave it out")

    @cached_property
    def digest(self) -> str:
        """Changes when anything does that a model trained or tested on it would see."""
        parts = (self.kind, self.words, self.classes, self.train, self.validation, self.test)
        return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()


def numbered(words: Iterable[Sequence[str]], *, most: int | None = None, least: int = 2) -> dict[str, int]:
    """A number for each word of the training texts that occurs `least` times, the most frequent first.

    >>> numbered([["a", "b", "a"], ["b", "c"]])
    {'<pad>': 0, '<unk>': 1, 'a': 2, 'b': 3}
    """
    counts: dict[str, int] = {}
    for text in words:
        for word in text:
            counts[word] = counts.get(word, 0) + 1
    frequent = sorted((word for word, count in counts.items() if count >= least), key=lambda word: -counts[word])
    kept = frequent if most is None else frequent[: max(0, most - 2)]
    return {word: number for number, word in enumerate((PADDING, UNKNOWN, *kept))}


def existing(path: str | None, task: str, what: str) -> Path:
    """The path of a task's data, or an error that says what belongs there."""
    if path is None:
        raise UsageError(f"the task {task} needs its data: give --data PATH, {what}")
    if not (found := Path(path).expanduser()).exists():
        raise UsageError(f"there is no {path}: give --data PATH, {what}")
    return found
