"""Instances as rows of a batch: padded on the right, in an order that is a function of (seed, step)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from qkflow.data.tasks import Instance
from qkflow.layout import Layout


class Rows(NamedTuple):
    """A batch of instances."""

    tokens: Int[Tensor, "b t"]
    lengths: Int[Tensor, " b"]

    @property
    def layout(self) -> Layout | None:
        """Where the padding is; none where no row has any."""
        t = self.tokens.shape[1]
        return None if bool((self.lengths == t).all()) else Layout.padded(self.lengths, t)


def rows(texts: Sequence[Sequence[int]]) -> Rows:
    """Texts of unequal length as a batch; padding is token 0.

    >>> rows([[5, 6], [7]]).tokens.tolist()
    [[5, 6], [7, 0]]
    """
    lengths = [len(text) for text in texts]
    padded = np.zeros((len(texts), max(lengths)), dtype=np.int64)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    return Rows(torch.from_numpy(padded), torch.tensor(lengths))


def chosen(count: int, *, seed: int, step: int, batch: int) -> list[int]:
    """Which of `count` instances a step trains on: every pass goes through all of them, in an order of its own.

    >>> sorted(chosen(4, seed=0, step=0, batch=2) + chosen(4, seed=0, step=1, batch=2))
    [0, 1, 2, 3]
    """
    places = range(step * batch, (step + 1) * batch)
    orders: dict[int, np.ndarray] = {}
    for pass_ in {place // count for place in places}:
        orders[pass_] = np.random.default_rng((seed, pass_)).permutation(count)
    return [int(orders[place // count][place % count]) for place in places]


def answered(instances: Sequence[Instance]) -> tuple[Rows, Int[Tensor, "b t"]]:
    """Texts with their answers behind them, and what is to be predicted at each token: -100 where nothing is.

    >>> row, targets = answered([Instance(tokens=(5, 6), label=7, rationale=(), answer=(7, 8))])
    >>> row.tokens.tolist(), targets.tolist()
    ([[5, 6, 7]], [[-100, 7, 8]])
    """
    made = rows([(*one.tokens, *one.answer[:-1]) for one in instances])
    targets = torch.full_like(made.tokens, -100)
    for place, one in enumerate(instances):
        start = len(one.tokens) - 1
        targets[place, start : start + len(one.answer)] = torch.tensor(one.answer)
    return made, targets
