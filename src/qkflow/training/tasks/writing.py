"""Answers that a decoder writes, and how near they come to the right ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from qkflow.data.tasks import Instance
from qkflow.models import Decoder
from qkflow.training.tasks.batches import rows

MOST = 12
"""Tokens of an answer, at most."""


def write_answers(model: Decoder, instances: Sequence[Instance], *, end: int, batch: int = 64) -> list[tuple[int, ...]]:
    """The most probable token after the other, until the one that ends an answer, which is left out."""
    order = sorted(range(len(instances)), key=lambda place: len(instances[place].tokens))
    found: list[tuple[int, ...]] = [()] * len(instances)
    with torch.no_grad():
        for first in range(0, len(order), batch):
            some = order[first : first + batch]
            for place, answer in zip(
                some, _write(model, [instances[place].tokens for place in some], end), strict=True
            ):
                found[place] = answer
    return found


def _write(model: Decoder, texts: Sequence[tuple[int, ...]], end: int) -> list[tuple[int, ...]]:
    answers: list[list[int]] = [[] for _ in texts]
    writing = list(range(len(texts)))
    for _ in range(MOST):
        made = rows([(*texts[place], *answers[place]) for place in writing])
        stream, _ = model.read(made.tokens, layout=made.layout)
        last = stream[torch.arange(len(writing)), made.lengths - 1]
        best = model.logits(last).argmax(-1).tolist()
        for place, token in zip(writing, best, strict=True):
            if token != end:
                answers[place].append(token)
        writing = [place for place, token in zip(writing, best, strict=True) if token != end]
        if not writing:
            break
    return [tuple(answer) for answer in answers]


def overlap(given: Sequence[int], right: Sequence[int]) -> float:
    """The F1 of two answers as bags of tokens, as SQuAD has it.

    >>> overlap([1, 2, 3], [2, 3]), overlap([], [2])
    (0.8, 0.0)
    """
    common = sum((Counter(given) & Counter(right)).values())
    return 2 * common / (len(given) + len(right)) if common else 0.0
