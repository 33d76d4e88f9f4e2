r"""What a model attends to when it answers: one number for each token, from the maps of all heads and layers.

Each head's row at the place that is asked becomes shares, |w_s| / \sum |w|, which changes nothing after a softmax; maps
that are signed or do not sum to one (differences of softmaxes, memories, synchrony) have no other mass: ours, since
nothing is published for them. Heads are averaged, and layers pooled:

    average   the mean over layers
    max       the largest over layers, token by token, made shares again so that mass stays a part of one (ours)
    rollout   the last row of  \prod_l (A_l + I) / 2, the last layer first: what flows through the residual stream too
              (Abnar & Zuidema, https://arxiv.org/abs/2005.00928)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkflow.errors import UsageError, unknown

Pooling = Literal["rollout", "average", "max"]
Map = Float[Tensor, "b _ t t"]
"""A layer's map; layers of a hybrid stack may differ in their heads."""


def pooled(
    maps: Sequence[Map], lengths: Int[Tensor, " b"], how: Pooling = "average", *, asked: Int[Tensor, " b"] | None = None
) -> Float[Tensor, "b t"]:
    """The share of each token in what the asked place of its row (the last, unless told) attends to; padding has none.

    >>> nearest, first = torch.eye(3)[None, None], torch.tensor([1.0, 0, 0]).expand(1, 1, 3, 3)
    >>> pooled([nearest, first], torch.tensor([3])).tolist()
    [[0.5, 0.0, 0.5]]
    >>> pooled([nearest, first], torch.tensor([3]), "rollout").tolist()
    [[0.5, 0.0, 0.5]]
    """
    if how not in get_args(Pooling):
        raise unknown("pooling", how, get_args(Pooling))
    if not maps:
        raise UsageError("there are no maps to pool: read with maps=True")
    b, _, t, _ = maps[0].shape
    if len(lengths) != b or not b or int(lengths.min()) < 1 or int(lengths.max()) > t:
        raise UsageError(f"lengths must be one number from 1 to {t} for each of {b} rows, got {lengths.tolist()}")
    lengths = lengths.to(maps[0].device)
    place = lengths - 1 if asked is None else asked.to(lengths.device)
    read = torch.arange(t, device=lengths.device) < lengths[:, None]
    if how == "rollout":
        return _rollout(maps, place, read)
    rows = torch.stack([_heads(layer[torch.arange(b), :, place], read[:, None]) for layer in maps])
    return shares(rows.mean(0) if how == "average" else rows.amax(0))


def shares(x: Float[Tensor, "*n t"]) -> Float[Tensor, "*n t"]:
    """The absolute values of each row, divided by their sum; a row of zeros stays one.

    >>> shares(torch.tensor([[3.0, -1.0], [0.0, 0.0]])).tolist()
    [[0.75, 0.25], [0.0, 0.0]]
    """
    size = x.abs()
    total = size.sum(-1, keepdim=True)
    return size / total.masked_fill(total == 0, 1)


def _heads(rows: Float[Tensor, "b h *q t"], read: Tensor) -> Float[Tensor, "b *q t"]:
    """The mean of the heads' shares; padding is left out before they are made."""
    return shares(shares(_wide(rows).where(read, 0)).mean(1))


def _wide(x: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Single precision at least: shares of a long text are small."""
    return x if x.dtype == torch.float64 else x.float()


def _rollout(maps: Sequence[Map], place: Int[Tensor, " b"], read: Tensor) -> Float[Tensor, "b t"]:
    t = read.shape[1]
    row = torch.nn.functional.one_hot(place, t).to(_wide(maps[0][:0]).dtype)
    identity = torch.eye(t, dtype=row.dtype, device=row.device)
    both = read[:, None, :, None] & read[:, None, None, :]
    for layer in reversed(maps):  # a row times a matrix, layer by layer: never a product of two matrices
        row = (row[:, None] @ shares(_heads(layer, both) + identity))[:, 0]
    return row
