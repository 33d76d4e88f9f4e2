"""Held-out loss, document by document: bits per byte compare across vocabularies, perplexity is per token.

An instance of a task is a document too: only its answers are scored, and a question is right if every token of its
answer is the likeliest one after all before it, which is what greedy decoding would have written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from qkflow.data import Split, Window, scored, windows
from qkflow.errors import DivergenceError, Interrupted, NotFiniteError, UsageError
from qkflow.models import Decoder
from qkflow.training.distributed import ALONE, World, first_of, known_to_all
from qkflow.training.divergence import first_bad_module
from qkflow.training.lm_logits import Scores, exact
from qkflow.training.recall_grading import Marks

DOCUMENT = np.dtype([("nats", "<f8"), ("tokens", "<i8"), ("bytes", "<i8")])
"""One document in documents.npy."""
PIECE = 8192
"""Tokens of a long instance that are read at once: what some mechanisms hold grows with their square."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The loss of each held-out document.

    >>> documents = np.array([(math.log(2) * 8, 4, 4), (0.0, 4, 4)], DOCUMENT)
    >>> Evaluation(documents).bits_per_byte, Evaluation(documents).perplexity
    (1.0, 2.0)
    """

    documents: np.ndarray
    """One row a document, of dtype `DOCUMENT`: nats, tokens, bytes; of a task, answer tokens are all that counts."""
    cells: np.ndarray | None = None
    """One row a document, of dtype `ANSWERED`, where the documents are instances of a task."""

    @property
    def loss(self) -> float:
        """Nats a token."""
        return float(self.documents["nats"].sum() / self.documents["tokens"].sum())

    @property
    def bits_per_byte(self) -> float:
        """Bits needed for a byte of text, or for a token of an answer."""
        return float(self.documents["nats"].sum() / math.log(2) / self.documents["bytes"].sum())

    @property
    def perplexity(self) -> float:
        """The exponential of the loss a token; infinite past what a float holds."""
        return math.exp(self.loss) if self.loss < 709 else math.inf

    @property
    def accuracy(self) -> float | None:
        """The part of a task's questions that were answered right; None for text, which asks none."""
        return None if self.cells is None else float(self.cells["right"].sum() / self.cells["questions"].sum())

    def summary(self) -> dict[str, Any]:
        """The figures as JSON has them: an infinite perplexity is null."""
        figures = {
            "bits_per_byte": self.bits_per_byte,
            "perplexity": self.perplexity if math.isfinite(self.perplexity) else None,
            "loss": self.loss,
            "scored_documents": len(self.documents),
            "scored_tokens": int(self.documents["tokens"].sum()),
            "scored_bytes": int(self.documents["bytes"].sum()),
        }
        if self.cells is not None:
            figures |= {"accuracy": self.accuracy, "questions": int(self.cells["questions"].sum())}
        return figures


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
    """The loss of every document of a split, each in windows of `context` tokens; `limit`: about so many tokens of it.

    The loss of a document is the sum over exactly its own tokens, the first predicted from the token before it. Windows
    of about the same length share a batch and are padded on the right, which changes nothing in a causal model.
    Instances of a task are read whole, however long; a batch has no more tokens than `batch` windows of `context`.
    `should_stop` is asked between batches; if it says yes, `Interrupted` is raised.
    """
    return evaluate_together(
        Scores(model),
        split,
        context=context,
        batch=batch,
        stride=stride,
        limit=limit,
        should_stop=should_stop,
        world=ALONE,
    )


def evaluate_together(
    scores: Scores,
    split: Split,
    *,
    context: int,
    batch: int,
    stride: int | None,
    limit: int | None,
    should_stop: Callable[[], bool],
    world: World,
) -> Evaluation:
    """`evaluate` by all processes of a run, each of which has `batch` windows at once; all get the whole of it.

    Every process makes as many forward passes as the others, of rows as long: what is sharded is put together for each.
    """
    if batch < 1:
        raise UsageError(f"the evaluation batch must be at least 1, got {batch}")
    todo = held_out(split, context=context, stride=stride, limit=limit)
    if not todo:
        raise UsageError("there is no held-out document to evaluate on: give a larger corpus")
    todo.sort(key=lambda window: -window.length)  # the longest first: what does not fit into memory fails at once
    sums = _Sums(split)
    was_training = scores.model.training
    scores.eval()
    try:
        with torch.no_grad():  # not inference mode: what a layer caches there could not be trained with later
            for group in _groups(todo, batch * world.size, context):
                if should_stop():
                    raise Interrupted("stopped in an evaluation")
                own = group[world.rank :: world.size]
                asked = _Batch(scores, split, own or group[:1], group[0].length)
                finite = sums.add(asked, counted=bool(own), sharded=world.kind == "fsdp")
                if world.any(not finite):
                    raise _diverged(asked, world)
    finally:
        scores.train(was_training)
    return sums.together(world)


class _Sums:
    """What an evaluation has come to, document by document."""

    def __init__(self, split: Split) -> None:
        self.documents = np.zeros(len(split.documents), DOCUMENT)
        self.documents["bytes"] = split.sizes
        self.marks = None if split.answers is None else Marks(split)

    def add(self, asked: _Batch, *, counted: bool, sharded: bool) -> bool:
        """Score some windows, and add their losses if they count; whether all of them are finite."""
        nats, hits = asked.losses(sharded=sharded)
        if not all(map(math.isfinite, nats)):
            return False
        for row, window in enumerate(asked.group if counted else ()):
            self.documents["nats"][window.document] += nats[row]
            self.documents["tokens"][window.document] += int(asked.mask[row].sum())
            if self.marks is not None:
                self.marks.mark(window, hits[row])
        return True

    def together(self, world: World) -> Evaluation:
        """The whole of what the processes have scored."""
        documents, marks = self.documents, self.marks
        right = np.zeros(0) if marks is None else marks.cells["right"].astype(np.float64)
        parts = [documents["nats"], documents["tokens"].astype(np.float64), right]
        total = world.add(np.concatenate(parts))
        documents["nats"], documents["tokens"] = total[: len(documents)], total[len(documents) : 2 * len(documents)]
        if marks is not None:
            marks.cells["right"] = total[2 * len(documents) :]
        seen = documents["tokens"] > 0
        return Evaluation(documents[seen], None if marks is None else marks.cells[seen])


class _Batch:
    """Windows that are read together, each padded on the right to `width` tokens."""

    def __init__(self, scores: Scores, split: Split, group: list[Window], width: int) -> None:
        self.scores, self.group = scores, group
        self.answers = split.answers is not None
        device = next(scores.parameters()).device
        self.tokens, self.mask = (tensor.to(device) for tensor in _padded(split, group, width))

    def forward(self) -> Tensor:
        """Scores of all targets, or of a task's answers."""
        device = self.tokens.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            some = (self.mask, None, PIECE) if self.answers else ()
            return self.scores(self.tokens[:, :-1], *some)

    def losses(self, *, sharded: bool) -> tuple[list[float], np.ndarray]:
        """The loss of each row's scored targets, summed, in nats; for answers, also which targets `[b, t]` were hit.

        Numbers that a layer refuses are not finite; of a `sharded` model they end this process.
        """
        mask, targets, hits = self.mask, self.tokens[:, 1:], torch.zeros_like(self.mask)
        try:
            logits = self.forward()
        except NotFiniteError as error:
            if sharded:  # the others may be waiting for this process's pieces: it has to leave
                raise DivergenceError(f"the held-out loss is not finite: {error}") from error
            return [math.nan], hits.numpy(force=True)
        if self.answers:
            found = F.cross_entropy(exact(logits), targets[mask], reduction="none")
            losses = torch.zeros(mask.shape, dtype=found.dtype, device=mask.device)
            losses[mask] = found
            hits[mask] = logits.argmax(-1) == targets[mask]
        else:
            losses = F.cross_entropy(exact(logits).flatten(0, 1), targets.flatten(), reduction="none")
            losses = losses.view_as(mask).masked_fill(~mask, 0.0)
        return losses.cpu().double().sum(1).tolist(), hits.numpy(force=True)


def _diverged(asked: _Batch, world: World) -> DivergenceError:
    """Make the forward pass again, and say where it broke."""
    told = first_of(world.gather(first_bad_module(asked.scores.model, asked.forward)))
    where = "the loss itself" if told is None else told[1]
    text = f"the held-out loss is not finite: the first output that is not is that of {where}"
    return known_to_all(DivergenceError(text))


def held_out(split: Split, *, context: int, stride: int | None = None, limit: int | None = None) -> list[Window]:
    """The windows that an evaluation reads: of a text, stretches of `context`; of a task, instances whole."""
    if split.answers is None:
        return windows(split, context=context, stride=stride, limit=limit)
    longest = int(np.diff(split.documents).max(initial=1))
    return windows(split, context=max(context, longest), limit=limit)


def _groups(todo: list[Window], batch: int, context: int) -> Iterator[list[Window]]:
    """Windows that are read together, the longest first: `batch` of them, or fewer where they pass the context."""
    begin = 0
    while begin < len(todo):
        count = min(batch, max(1, batch * context // todo[begin].length))
        yield todo[begin : begin + count]
        begin += count


def _padded(split: Split, group: list[Window], width: int | None = None) -> tuple[Tensor, Tensor]:
    """The tokens `[b, t + 1]` of some windows, and which of their targets `[b, t]` count; t is the `width` if given."""
    width = max(window.length for window in group) if width is None else width
    tokens = np.zeros((len(group), width + 1), np.int64)
    mask = np.zeros((len(group), width), bool)
    for row, window in enumerate(group):
        tokens[row, : window.length + 1] = split.tokens[window.begin : window.begin + window.length + 1]
        mask[row, window.skip : window.length] = scored(split, window.begin, window.length)[window.skip :]
    return torch.from_numpy(tokens), torch.from_numpy(mask)
