"""Objectives: what a run trains on, the loss of a batch, and the held-out evaluation.

| objective               | data                      | loss: cross-entropy of               | held-out results       |
|-------------------------|---------------------------|--------------------------------------|------------------------|
| `LanguageModelObjective`| text                      | every token, given those before it   | bits per byte          |
| `RecallObjective`       | a recall task             | the tokens of the answers            | accuracy, recall.json  |
| `TaskObjective`         | a task with rationales    | the class, or the tokens of an answer| accuracy               |

The batch of a step is a function of (data seed, step), so that a run can be resumed at any step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from qkflow.data import Corpus, Tokenizer, get_batch, open_corpus
from qkflow.data.tasks import Instance, Task, TaskConfig, open_task
from qkflow.errors import UsageError
from qkflow.models import ClassifierConfig, DecoderConfig, parameters
from qkflow.training.config import TrainConfig
from qkflow.training.evaluate import Evaluation, HeldOut, HeldOutSplit, HeldOutTask
from qkflow.training.logits import Examples, predict
from qkflow.training.recall import RecallResult, by_cell, read_recall, write_recall


class Objective(ABC):
    """What a run trains on."""

    name: str
    digest: str
    """A hash of the data: a run can only be resumed on the same data."""
    tokens_per_step: float
    tokenizer: Tokenizer | None = None
    """The tokenizer, which is stored with the run; None if there is none."""
    notices: tuple[str, ...] = ()
    """Messages for the user about the data."""

    @abstractmethod
    def batch(self, step: int) -> Examples:
        """The batch of a step."""

    def loss(self, module: nn.Module, examples: Examples) -> Float[Tensor, ""]:
        """The mean loss of examples, here the cross-entropy of the scored targets; `module` is a `TargetLogits`."""
        return F.cross_entropy(*predict(module, examples))

    @abstractmethod
    def validation(self, limit: int | None) -> HeldOut:
        """The validation data, or about `limit` tokens of it."""

    def final(self, limit: int | None) -> HeldOut | None:
        """The data of the last evaluation, if it is not the validation data."""
        return None

    def test(self, limit: int | None) -> HeldOut | None:
        """The test grid of a recall task, or about `limit` tokens of it; None: there is none."""
        return None

    def write_test(self, folder: Path, step: int, evaluation: Evaluation) -> None:  # noqa: B027
        """Write the results on test data into the run folder."""

    def has_test_results(self, folder: Path) -> bool:
        """Whether the run folder has the results on test data, or needs none."""
        return True


def open_objective(config: TrainConfig) -> Objective:
    """Open the data of a config and check that the model fits to it."""
    if not isinstance(config.model, DecoderConfig) or isinstance(config.data, TaskConfig):
        if not isinstance(config.data, TaskConfig):
            raise UsageError(f"training on a corpus needs a decoder, got {type(config.model).__name__}")
        return TaskObjective(config, open_task(config.data))
    corpus = open_corpus(config.data)
    return LanguageModelObjective(config, corpus) if corpus.task is None else RecallObjective(config, corpus)


class LanguageModelObjective(Objective):
    """Predict every token of a text from those before it."""

    def __init__(self, config: TrainConfig, corpus: Corpus) -> None:
        self.config, self.corpus = config, corpus
        self.name, self.digest, self.tokenizer = corpus.name, corpus.digest, corpus.tokenizer
        self.notices = corpus.notices
        self.tokens_per_step = float(config.batch * config.context)
        parameters(config.model)  # raises if the model cannot be built
        if config.model.vocabulary < corpus.vocabulary:
            raise UsageError(
                f"the model has a vocabulary of {config.model.vocabulary}, but the corpus {corpus.name} has "
                f"{corpus.vocabulary} tokens: set the model's vocabulary to {corpus.vocabulary}"
            )
        if corpus.context is not None and config.context != corpus.context:
            raise UsageError(
                f"the instances of {corpus.name} have {corpus.context} tokens, got a context length of "
                f"{config.context}: use --context {corpus.context}, or omit it"
            )
        if corpus.context is not None and config.stride is not None:
            raise UsageError(f"instances of {corpus.name} are read whole: omit stride, which is for text")
        self.batch(0)
        if not self.validation(1).windows:
            raise UsageError(f"the corpus {corpus.name} has no held-out document to evaluate on: use more text")

    def batch(self, step: int) -> Examples:  # noqa: D102
        config = self.config
        tokens, scored = get_batch(
            self.corpus.train, seed=config.data_seed, step=step, batch_size=config.batch, context=config.context
        )
        rows = torch.from_numpy(tokens)
        inputs, targets = rows[:, :-1], rows[:, 1:]
        if scored is not None:
            return Examples(inputs=inputs, targets=targets, scored=torch.from_numpy(scored))
        # A document is preceded by the end token, its first context: that is where a new segment starts.
        return Examples(
            inputs=inputs, targets=targets, starts=None if config.crossing else inputs == self.corpus.tokenizer.end
        )

    def validation(self, limit: int | None) -> HeldOut:  # noqa: D102
        config = self.config
        return HeldOutSplit(self.corpus.validation, context=config.context, stride=config.stride, limit=limit)

    def final(self, limit: int | None) -> HeldOut | None:  # noqa: D102
        config = self.config
        if config.final_split == "validation":
            return None
        return HeldOutSplit(self.corpus.test, context=config.context, stride=config.stride, limit=limit)


class RecallObjective(LanguageModelObjective):
    """Predict the answers of a recall task. After the last step, its test grid is evaluated into recall.json."""

    def final(self, limit: int | None) -> HeldOut | None:  # noqa: D102
        return None  # `final_split` is for text

    def test(self, limit: int | None) -> HeldOut | None:  # noqa: D102
        return HeldOutSplit(self.corpus.test, context=self.config.context, limit=limit)

    def write_test(self, folder: Path, step: int, evaluation: Evaluation) -> None:  # noqa: D102
        task = self.corpus.task or {}
        write_recall(folder, RecallResult(task=task, split="test", step=step, cells=by_cell(evaluation)))

    def has_test_results(self, folder: Path) -> bool:  # noqa: D102
        return read_recall(folder) is not None


class TaskObjective(Objective):
    """Predict the class of a text, or write an answer to it."""

    def __init__(self, config: TrainConfig, task: Task) -> None:
        self.config, self.task = config, task
        self.name, self.digest = task.name, task.digest
        self.collate = collate_answers if task.kind == "generation" else collate_classes
        lengths = [len(instance.tokens) + max(0, len(instance.answer) - 1) for instance in task.train]
        self.tokens_per_step = config.batch * sum(lengths) / len(lengths)
        model = config.model
        if isinstance(model, DecoderConfig) != (task.kind == "generation"):
            expected = "a decoder" if task.kind == "generation" else "a classifier"
            raise UsageError(f"{task.name} is a {task.kind} task: expected {expected}, got {type(model).__name__}")
        if model.vocabulary < len(task.words):
            raise UsageError(
                f"{task.name} has {len(task.words)} words, but the model has a vocabulary of {model.vocabulary}: "
                f"set it to {len(task.words)}"
            )
        if isinstance(model, ClassifierConfig) and model.classes < len(task.classes):
            raise UsageError(f"{task.name} has {len(task.classes)} classes, but the model has {model.classes}")

    def batch(self, step: int) -> Examples:  # noqa: D102
        train, config = self.task.train, self.config
        indices = instance_indices(len(train), seed=config.data_seed, step=step, batch=config.batch)
        return self.collate([train[index] for index in indices])

    def validation(self, limit: int | None) -> HeldOut:  # noqa: D102
        return HeldOutTask(self.task.validation, self.collate, limit)


def instance_indices(count: int, *, seed: int, step: int, batch: int) -> list[int]:
    """The instances of a step: every epoch goes through all `count` of them, each in its own order.

    >>> sorted(instance_indices(4, seed=0, step=0, batch=2) + instance_indices(4, seed=0, step=1, batch=2))
    [0, 1, 2, 3]
    """
    positions = range(step * batch, (step + 1) * batch)
    orders = {
        epoch: np.random.default_rng((seed, epoch)).permutation(count)
        for epoch in {position // count for position in positions}
    }
    return [int(orders[position // count][position % count]) for position in positions]


def pad(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Sequences as rows `[b, t]`, padded on the right with token 0, and their lengths `[b]`.

    >>> pad([[5, 6], [7]])[0].tolist()
    [[5, 6], [7, 0]]
    """
    lengths = [len(sequence) for sequence in sequences]
    rows = np.zeros((len(sequences), max(lengths)), dtype=np.int64)
    for row, sequence in zip(rows, sequences, strict=True):
        row[: len(sequence)] = sequence
    return torch.from_numpy(rows), torch.tensor(lengths)


def collate_classes(instances: Sequence[Instance]) -> Examples:
    """Texts and their classes."""
    inputs, lengths = pad([instance.tokens for instance in instances])
    return Examples(inputs=inputs, targets=torch.tensor([[instance.label] for instance in instances]), lengths=lengths)


def collate_answers(instances: Sequence[Instance]) -> Examples:
    """Texts followed by their answers, of which every token is predicted.

    >>> rows = collate_answers([Instance(tokens=(5, 6), label=7, rationale=(), answer=(7, 8))])
    >>> rows.inputs.tolist(), rows.targets.tolist(), rows.scored.tolist()
    ([[5, 6, 7]], [[0, 7, 8]], [[False, True, True]])
    """
    inputs, lengths = pad([(*instance.tokens, *instance.answer[:-1]) for instance in instances])
    targets, scored = torch.zeros_like(inputs), torch.zeros_like(inputs, dtype=torch.bool)
    for row, instance in enumerate(instances):
        answer = slice(len(instance.tokens) - 1, len(instance.tokens) - 1 + len(instance.answer))
        targets[row, answer] = torch.tensor(instance.answer)
        scored[row, answer] = True
    return Examples(inputs=inputs, targets=targets, scored=scored, lengths=lengths)
