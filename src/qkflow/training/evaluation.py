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
from qkflow.training.answers import Marks
from qkflow.training.divergence import first_bad_module

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
    if batch < 1:
        raise UsageError(f"the evaluation batch must be at least 1, got {batch}")
    todo = held_out(split, context=context, stride=stride, limit=limit)
    if not todo:
        raise UsageError("there is no held-out document to evaluate on: give a larger corpus")
    todo.sort(key=lambda window: -window.length)  # the longest first: what does not fit into memory fails at once
    documents = np.zeros(len(split.documents), DOCUMENT)
    documents["bytes"] = split.sizes
    marks = None if split.answers is None else Marks(split)
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():  # not inference mode: what a layer caches there could not be trained with later
            for group in _groups(todo, batch, context):
                if should_stop():
                    raise Interrupted("stopped in an evaluation")
                tokens, mask = _padded(split, group)
                nats, hits = _losses(model, tokens.to(device), mask.to(device), answers=marks is not None)
                for row, window in enumerate(group):
                    documents["nats"][window.document] += nats[row]
                    documents["tokens"][window.document] += int(mask[row].sum())
                    if marks is not None:
                        marks.mark(window, hits[row])
    finally:
        model.train(was_training)
    seen = documents["tokens"] > 0
    return Evaluation(documents[seen], None if marks is None else marks.cells[seen])


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


def _padded(split: Split, group: list[Window]) -> tuple[Tensor, Tensor]:
    """The tokens `[b, t + 1]` of some windows, and which of their targets `[b, t]` count."""
    width = max(window.length for window in group) + 1
    tokens = np.zeros((len(group), width), np.int64)
    mask = np.zeros((len(group), width - 1), bool)
    for row, window in enumerate(group):
        tokens[row, : window.length + 1] = split.tokens[window.begin : window.begin + window.length + 1]
        mask[row, window.skip : window.length] = scored(split, window.begin, window.length)[window.skip :]
    return torch.from_numpy(tokens), torch.from_numpy(mask)


def _losses(model: Decoder, tokens: Tensor, mask: Tensor, *, answers: bool) -> tuple[list[float], np.ndarray]:
    """The loss of each row's scored targets, summed, in nats; for `answers`, also which targets `[b, t]` were hit."""
    targets, hits = tokens[:, 1:], torch.zeros_like(mask)

    def forward() -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.device.type == "cuda"):
            return model.logits(_read(model, tokens[:, :-1])[mask]) if answers else model(tokens[:, :-1])[0]

    try:
        logits = forward()
        if answers:
            losses = torch.zeros(mask.shape, device=mask.device)
            losses[mask] = F.cross_entropy(logits.float(), targets[mask], reduction="none")
            hits[mask] = logits.argmax(-1) == targets[mask]
        else:
            losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
            losses = losses.view_as(mask).masked_fill(~mask, 0.0)
        sums = losses.cpu().double().sum(1).tolist()
    except NotFiniteError:
        sums = [math.nan]
    if not all(map(math.isfinite, sums)):
        where = first_bad_module(model, forward) or "the loss itself"
        raise DivergenceError(f"the held-out loss is not finite: the first output that is not is that of {where}")
    return sums, hits.cpu().numpy()


def _read(model: Decoder, tokens: Tensor) -> Tensor:
    """The stream `[b, t, d]` before the head, read piece by piece with the state carried: the law of splits."""
    pieces, state = [], None
    for piece in tokens.split(PIECE, dim=1):
        x, state = model.read(piece, state)
        pieces.append(x)
    return torch.cat(pieces, dim=1)
