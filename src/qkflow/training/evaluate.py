"""Held-out loss per document: bits per byte (comparable across vocabularies) and perplexity per token.

An instance of a task is a document, too. Only its answer is scored, and it is correct if every token of the answer is
the most likely one given the tokens before it, which is what greedy decoding would produce.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from qkflow.data import Split, Window, scored, windows
from qkflow.data.tasks import Instance
from qkflow.errors import DivergenceError, Interrupted, NotFiniteError, UsageError
from qkflow.models import Decoder
from qkflow.training.distributed import SingleProcess, first_not_none, mark_on_all_ranks
from qkflow.training.divergence import first_bad_module
from qkflow.training.logits import Examples, TargetLogits, predict
from qkflow.training.recall import RecallGrader

DOCUMENT = np.dtype([("nats", "<f8"), ("tokens", "<i8"), ("bytes", "<i8")])
"""One document in documents.npy."""
CHUNK = 8192
"""Tokens of a long recall instance that are read at a time: the memory of some mechanisms is quadratic in it."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The loss of each held-out document.

    >>> documents = np.array([(math.log(2) * 8, 4, 4), (0.0, 4, 4)], DOCUMENT)
    >>> Evaluation(documents).bits_per_byte, Evaluation(documents).perplexity
    (1.0, 2.0)
    """

    documents: np.ndarray
    """One row per document, of dtype `DOCUMENT`. For a task, `tokens` and `bytes` count the answer only."""
    cells: np.ndarray | None = None
    """One row per document, of dtype `GRADED`, if the documents are instances of a recall task."""
    correct: np.ndarray | None = None
    """bool per document, if the documents are instances of a task with rationales."""

    @property
    def loss(self) -> float:
        """Nats per token."""
        return float(self.documents["nats"].sum() / self.documents["tokens"].sum())

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text, or per token of an answer."""
        return float(self.documents["nats"].sum() / math.log(2) / self.documents["bytes"].sum())

    @property
    def perplexity(self) -> float:
        """The exponential of the loss per token; infinite if it exceeds a float."""
        return math.exp(self.loss) if self.loss < 709 else math.inf

    @property
    def accuracy(self) -> float | None:
        """The fraction of correct answers; None for text."""
        if self.correct is not None:
            return float(self.correct.mean())
        return None if self.cells is None else float(self.cells["right"].sum() / self.cells["questions"].sum())

    def summary(self) -> dict[str, Any]:
        """The results as JSON values; an infinite perplexity is null."""
        results = {
            "bits_per_byte": self.bits_per_byte,
            "perplexity": self.perplexity if math.isfinite(self.perplexity) else None,
            "loss": self.loss,
            "scored_documents": len(self.documents),
            "scored_tokens": int(self.documents["tokens"].sum()),
            "scored_bytes": int(self.documents["bytes"].sum()),
        }
        if self.accuracy is not None:
            results["accuracy"] = self.accuracy
        if self.cells is not None:
            results["questions"] = int(self.cells["questions"].sum())
        return results


class HeldOut:
    """Documents to evaluate, cut into windows; subclasses read them from a corpus or a task."""

    context: int
    """The context length that the evaluation batch size refers to."""
    windows: list[Window]
    """What is scored, in document order."""
    sizes: np.ndarray
    """The `bytes` of every document."""
    is_graded: bool = False
    """Whether answers are graded as correct or not."""
    chunk: int | None = None
    """Tokens that are read at a time; None: all."""

    def examples(self, group: Sequence[Window], width: int) -> tuple[Examples, Tensor]:
        """Windows as rows of `width` inputs, padded on the right; and which targets count."""
        raise NotImplementedError

    def grade(self, window: Window, hits: np.ndarray) -> None:
        """Grade a window; `hits` says which of its targets were the most likely token."""

    def n_tokens(self) -> int:
        """Tokens that an evaluation reads."""
        return sum(window.length for window in self.windows)

    def n_available(self) -> int:
        """Tokens that an evaluation without a limit reads."""
        return self.n_tokens()

    def result(self, documents: np.ndarray, group: SingleProcess) -> Evaluation:
        """The evaluation, summed over the processes of a group."""
        total = group.sum(np.concatenate([documents["nats"], documents["tokens"].astype(np.float64)]))
        documents["nats"], documents["tokens"] = np.split(total, 2)
        return Evaluation(documents[documents["tokens"] > 0])


class HeldOutSplit(HeldOut):
    """A split of a corpus: windows of text, or whole instances of a recall task."""

    def __init__(self, split: Split, *, context: int, stride: int | None = None, limit: int | None = None) -> None:
        self.split, self.context, self.sizes = split, context, split.sizes
        self.is_graded = split.answers is not None
        if self.is_graded:
            self.chunk, self.grader = CHUNK, RecallGrader(split)
            longest = int(np.diff(split.documents).max(initial=1))
            self.windows = windows(split, context=max(context, longest), limit=limit)
        else:
            self.windows = windows(split, context=context, stride=stride, limit=limit)
            self.sizes = _scored_sizes(split, self.windows)

    def examples(self, group: Sequence[Window], width: int) -> tuple[Examples, Tensor]:  # noqa: D102
        tokens = np.zeros((len(group), width + 1), np.int64)
        counted = np.zeros((len(group), width), bool)
        for row, window in enumerate(group):
            tokens[row, : window.length + 1] = self.split.tokens[window.begin : window.begin + window.length + 1]
            counted[row, window.skip : window.length] = scored(self.split, window.begin, window.length)[window.skip :]
        rows, mask = torch.from_numpy(tokens), torch.from_numpy(counted)
        # Right padding needs no layout here: it changes nothing in a causal model.
        return Examples(inputs=rows[:, :-1], targets=rows[:, 1:], scored=mask if self.is_graded else None), mask

    def n_available(self) -> int:  # noqa: D102
        return int(np.diff(self.split.documents).sum())

    def grade(self, window: Window, hits: np.ndarray) -> None:  # noqa: D102
        self.grader.grade(window, hits)

    def result(self, documents: np.ndarray, group: SingleProcess) -> Evaluation:  # noqa: D102
        evaluation = super().result(documents, group)
        if not self.is_graded:
            return evaluation
        cells = self.grader.cells
        cells["right"] = group.sum(cells["right"].astype(np.float64))
        return Evaluation(evaluation.documents, cells[documents["tokens"] > 0])


class HeldOutTask(HeldOut):
    """Instances of a task with rationales; a limit takes evenly spaced ones."""

    is_graded = True

    def __init__(
        self, instances: Sequence[Instance], collate: Callable[[Sequence[Instance]], Examples], limit: int | None
    ) -> None:
        self.instances, self._collate = instances, collate
        self.sizes = np.array([max(1, len(instance.answer)) for instance in instances])
        lengths = [len(instance.tokens) + max(0, len(instance.answer) - 1) for instance in instances]
        every = 1 if limit is None else -(-sum(lengths) // limit)
        self.windows = [Window(index, 0, lengths[index], 0) for index in range(0, len(lengths), every)]
        self.context = max(lengths)
        self.correct = np.zeros(len(instances))

    def examples(self, group: Sequence[Window], width: int) -> tuple[Examples, Tensor]:  # noqa: D102
        rows = self._collate([self.instances[window.document] for window in group])
        return rows, torch.ones_like(rows.targets, dtype=torch.bool) if rows.scored is None else rows.scored

    def grade(self, window: Window, hits: np.ndarray) -> None:  # noqa: D102
        self.correct[window.document] = hits.sum() == self.sizes[window.document]

    def result(self, documents: np.ndarray, group: SingleProcess) -> Evaluation:  # noqa: D102
        evaluation = super().result(documents, group)
        return Evaluation(evaluation.documents, correct=group.sum(self.correct)[documents["tokens"] > 0] > 0)


def _scored_sizes(split: Split, chosen: Sequence[Window]) -> np.ndarray:
    """The bytes of each document that the windows score: all, or in proportion to its tokens."""
    tokens = np.zeros(len(split.documents), np.int64)
    for window in chosen:
        tokens[window.document] += window.length - window.skip
    return np.round(split.sizes * (tokens / np.diff(split.documents).ravel())).astype(np.int64)


def evaluate(
    model: Decoder,
    split: Split,
    *,
    context: int,
    batch: int = 32,
    stride: int | None = None,
    limit: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Evaluate every document of a split in windows of `context` tokens.

    The loss of a document is the sum over its own tokens; the first is predicted from the token before it. Windows of
    similar length share a batch. Instances of a recall task are read whole, and a batch has no more tokens than `batch`
    windows of `context`.

    Args:
        model: The model.
        split: The documents.
        context: Context length.
        batch: Windows per batch.
        stride: Tokens scored per window; None: all of them.
        limit: Evaluate at most this many tokens, as evenly spaced windows of many documents; None: all.
        should_stop: Called between batches; if it returns True, `Interrupted` is raised.
    """
    held_out = HeldOutSplit(split, context=context, stride=stride, limit=limit)
    return evaluate_held_out(TargetLogits(model), held_out, batch=batch, should_stop=should_stop, group=SingleProcess())


def evaluate_held_out(
    module: TargetLogits,
    held_out: HeldOut,
    *,
    batch: int,
    should_stop: Callable[[], bool],
    group: SingleProcess,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Evaluation:
    """Evaluate on all processes of a group, with `batch` windows each; every process gets the whole result.

    `progress` is called after each batch, with the tokens that were read and all that will be. All processes make the
    same number of forward passes of the same shape, since fsdp gathers parameters in each.
    """
    if batch < 1:
        raise UsageError(f"the evaluation batch size must be at least 1, got {batch}")
    if not held_out.windows:
        raise UsageError("there is no held-out document to evaluate on: use a larger corpus")
    device = next(module.parameters()).device
    documents = np.zeros(len(held_out.sizes), DOCUMENT)
    documents["bytes"] = held_out.sizes
    was_training = module.model.training
    module.eval()
    done, total = 0, held_out.n_tokens()
    try:
        with torch.no_grad():  # not inference mode: tensors that a layer caches there cannot be trained with later
            for windows_ in _batches(held_out, batch * group.size):
                if should_stop():
                    raise Interrupted("stopped during an evaluation")
                own = windows_[group.rank :: group.size]
                examples, counted = held_out.examples(own or windows_[:1], windows_[0].length)
                examples, counted = examples.to(device), counted.to(device)
                nats, hits = _score(module, examples, counted, held_out, group)
                is_finite = all(map(math.isfinite, nats))
                if group.any(not is_finite):
                    raise _divergence(module, examples, held_out, group)
                for row, window in enumerate(own):
                    documents["nats"][window.document] += nats[row]
                    documents["tokens"][window.document] += int(counted[row].sum())
                    if held_out.is_graded:
                        held_out.grade(window, hits[row])
                done += sum(window.length for window in windows_)
                progress(done, total)
    finally:
        module.train(was_training)
    return held_out.result(documents, group)


def _batches(held_out: HeldOut, batch: int) -> Iterator[list[Window]]:
    """Windows that are read together, longest first: `batch` of them, fewer if they are longer than the context."""
    ordered = sorted(held_out.windows, key=lambda window: -window.length)  # the largest batch fails first, if any
    begin = 0
    while begin < len(ordered):
        count = min(batch, max(1, batch * held_out.context // ordered[begin].length))
        yield ordered[begin : begin + count]
        begin += count


def _score(
    module: TargetLogits, examples: Examples, counted: Tensor, held_out: HeldOut, group: SingleProcess
) -> tuple[list[float], np.ndarray]:
    """The summed loss of each row in nats, and which targets were the most likely token, if these are graded."""
    hits = torch.zeros_like(counted)
    try:
        logits, targets = predict(module, examples, chunk=held_out.chunk)
    except NotFiniteError as error:
        if group.is_sharded:  # the other processes may wait for shards of this one: it has to exit
            raise DivergenceError(f"the held-out loss is not finite: {error}") from error
        return [math.nan], hits.numpy(force=True)
    selected = torch.ones_like(counted) if examples.scored is None else examples.scored
    nats = F.cross_entropy(logits, targets, reduction="none")
    losses = torch.zeros(counted.shape, dtype=nats.dtype, device=nats.device)
    losses[selected] = nats
    if held_out.is_graded:
        hits[selected] = logits.argmax(-1) == targets
    return losses.masked_fill(~counted, 0.0).cpu().double().sum(1).tolist(), hits.numpy(force=True)


def _divergence(module: TargetLogits, examples: Examples, held_out: HeldOut, group: SingleProcess) -> DivergenceError:
    """Repeat the forward pass to find the first module with a non-finite output."""
    bad = first_bad_module(module.model, lambda: predict(module, examples, chunk=held_out.chunk))
    name = first_not_none(group.gather(bad)) or "the loss itself"
    return mark_on_all_ranks(DivergenceError(f"the held-out loss is not finite: the first non-finite output is {name}"))
