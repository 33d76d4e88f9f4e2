"""Held-out loss, document by document: bits per byte compare across vocabularies, perplexity is per token."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from qkflow.data import Split, Window, windows
from qkflow.errors import DivergenceError, Interrupted, NotFiniteError, UsageError
from qkflow.models import Decoder
from qkflow.training.divergence import first_bad_module

DOCUMENT = np.dtype([("nats", "<f8"), ("tokens", "<i8"), ("bytes", "<i8")])
"""One document in documents.npy."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The loss of each held-out document.

    >>> documents = np.array([(math.log(2) * 8, 4, 4), (0.0, 4, 4)], DOCUMENT)
    >>> Evaluation(documents).bits_per_byte, Evaluation(documents).perplexity
    (1.0, 2.0)
    """

    documents: np.ndarray
    """One row a document, of dtype `DOCUMENT`: nats, tokens, bytes."""

    @property
    def loss(self) -> float:
        """Nats a token."""
        return float(self.documents["nats"].sum() / self.documents["tokens"].sum())

    @property
    def bits_per_byte(self) -> float:
        """Bits needed for a byte of text."""
        return float(self.documents["nats"].sum() / math.log(2) / self.documents["bytes"].sum())

    @property
    def perplexity(self) -> float:
        """The exponential of the loss a token; infinite past what a float holds."""
        return math.exp(self.loss) if self.loss < 709 else math.inf

    def summary(self) -> dict[str, Any]:
        """The figures as JSON has them: an infinite perplexity is null."""
        return {
            "bits_per_byte": self.bits_per_byte,
            "perplexity": self.perplexity if math.isfinite(self.perplexity) else None,
            "loss": self.loss,
            "scored_documents": len(self.documents),
            "scored_tokens": int(self.documents["tokens"].sum()),
            "scored_bytes": int(self.documents["bytes"].sum()),
        }


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
    `should_stop` is asked between batches; if it says yes, `Interrupted` is raised.
    """
    if batch < 1:
        raise UsageError(f"the evaluation batch must be at least 1, got {batch}")
    todo = windows(split, context=context, stride=stride, limit=limit)
    if not todo:
        raise UsageError("there is no held-out document to evaluate on: give a larger corpus")
    todo.sort(key=lambda window: -window.length)  # the longest first: what does not fit into memory fails at once
    nats = np.zeros(len(split.documents))
    counts = np.zeros(len(split.documents), np.int64)
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():  # not inference mode: what a layer caches there could not be trained with later
            for begin in range(0, len(todo), batch):
                if should_stop():
                    raise Interrupted("stopped in an evaluation")
                group = todo[begin : begin + batch]
                for window, value in zip(group, _losses(model, split, group, device), strict=True):
                    nats[window.document] += value
                    counts[window.document] += window.length - window.skip
    finally:
        model.train(was_training)
    seen = counts > 0
    documents = np.zeros(int(seen.sum()), DOCUMENT)
    documents["nats"], documents["tokens"], documents["bytes"] = nats[seen], counts[seen], split.sizes[seen]
    return Evaluation(documents)


def _losses(model: Decoder, split: Split, group: list[Window], device: torch.device) -> list[float]:
    """The summed loss of the tokens that each window scores, in nats."""
    width = max(window.length for window in group) + 1
    padded = np.zeros((len(group), width), np.int64)
    scored = np.zeros((len(group), width - 1), bool)
    for row, window in enumerate(group):
        padded[row, : window.length + 1] = split.tokens[window.begin : window.begin + window.length + 1]
        scored[row, window.skip : window.length] = True
    tokens, mask = torch.from_numpy(padded).to(device), torch.from_numpy(scored).to(device)

    def forward() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return model(tokens[:, :-1])[0]

    try:
        losses = F.cross_entropy(forward().flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
        sums = losses.view_as(mask).masked_fill(~mask, 0.0).cpu().double().sum(1).tolist()
    except NotFiniteError:
        sums = [math.nan]
    if not all(map(math.isfinite, sums)):
        where = first_bad_module(model, forward) or "the loss itself"
        raise DivergenceError(
            f"the loss of held-out text is not finite: the first output that is not is that of {where}"
        )
    return sums
