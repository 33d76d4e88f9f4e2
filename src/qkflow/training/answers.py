"""Answers that a decoder generates, and their F1 score."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from qkflow.data.tasks import Instance
from qkflow.layout import Layout
from qkflow.models import Decoder
from qkflow.training.losses import pad

MAX_TOKENS = 12
"""The maximum length of an answer."""


def write_answers(model: Decoder, instances: Sequence[Instance], *, end: int, batch: int = 64) -> list[tuple[int, ...]]:
    """Decode the answers of instances greedily, up to the token `end`, which is left out."""
    order = sorted(range(len(instances)), key=lambda index: len(instances[index].tokens))
    answers: list[tuple[int, ...]] = [()] * len(instances)
    with torch.no_grad():
        for start in range(0, len(order), batch):
            indices = order[start : start + batch]
            decoded = _decode(model, [instances[index].tokens for index in indices], end)
            for index, answer in zip(indices, decoded, strict=True):
                answers[index] = answer
    return answers


def _decode(model: Decoder, prompts: Sequence[tuple[int, ...]], end: int) -> list[tuple[int, ...]]:
    answers: list[list[int]] = [[] for _ in prompts]
    active = list(range(len(prompts)))
    for _ in range(MAX_TOKENS):
        tokens, lengths = pad([(*prompts[row], *answers[row]) for row in active])
        t = tokens.shape[1]
        layout = None if bool((lengths == t).all()) else Layout.padded(lengths, t)
        stream, _ = model.read(tokens, layout=layout)
        last = stream[torch.arange(len(active)), lengths - 1]
        best = model.logits(last).argmax(-1).tolist()
        for row, token in zip(active, best, strict=True):
            if token != end:
                answers[row].append(token)
        active = [row for row, token in zip(active, best, strict=True) if token != end]
        if not active:
            break
    return [tuple(answer) for answer in answers]


def token_f1(answer: Sequence[int], reference: Sequence[int]) -> float:
    """The F1 score of an answer and a reference as bags of tokens, as in SQuAD.

    >>> token_f1([1, 2, 3], [2, 3]), token_f1([], [2])
    (0.8, 0.0)
    """
    common = sum((Counter(answer) & Counter(reference)).values())
    return 2 * common / (len(answer) + len(reference)) if common else 0.0
