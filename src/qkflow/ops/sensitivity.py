r"""How much of a moved query or key depends on where its partner was: the Jacobian of a motion of pairs, by blocks.

    J = [ dq'/dq   dq'/dk ]          |B| = \sqrt{ mean over pairs of \|B\|_F^2 / k },   so that |c I| = |c|
        [ dk'/dq   dk'/dk ]

Pairs do not see each other, so k copies of all of them, each asked for another coordinate, give a row of blocks in one
backward pass.

| symbol   | here    | shape      |
|----------|---------|------------|
| q, k     | `q`,`k` | `[... k]`  |
| a block  |         | `[... k k]`|
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from qkflow.errors import UsageError

Point = Float[Tensor, "... k"]
Block = Float[Tensor, "... k k"]
Move = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From queries and keys, those after a motion."""


class Blocks(NamedTuple):
    """The Jacobian of each pair: rows are coordinates after the motion, columns before it."""

    query_on_query: Block
    query_on_key: Block
    key_on_query: Block
    key_on_key: Block


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """Root-mean-square sizes of the Jacobian's blocks; the identity has size 1."""

    query_on_query: float
    """|dq'/dq|."""
    query_on_key: float
    """|dq'/dk|: how much of a moved query depends on its key."""
    key_on_query: float
    """|dk'/dq|: how much of a moved key depends on its query."""
    key_on_key: float
    """|dk'/dk|."""
    query_change: float
    """|dq'/dq - I|: how far a query's own part is from being left alone."""
    key_change: float
    """|dk'/dk - I|: how far a key's own part is from being left alone."""


def jacobian(move: Move, q: Point, k: Point) -> Blocks:
    """The four blocks at each pair, exactly; `move` is given one dimension more, in front.

    >>> q = k = torch.zeros(1, 2)
    >>> jacobian(lambda q, k: (q + 0.5 * k, k), q, k).query_on_key
    tensor([[[0.5000, 0.0000],
             [0.0000, 0.5000]]])
    """
    if q.shape != k.shape:
        raise UsageError(f"queries and keys move in pairs: got {list(q.shape)} queries and {list(k.shape)} keys")
    width = q.shape[-1]
    with torch.inference_mode(mode=False), torch.enable_grad():
        start = [x.detach().clone().expand(width, *x.shape).clone().requires_grad_() for x in (q, k)]
        pick = torch.eye(width, dtype=q.dtype, device=q.device).view(width, *[1] * (q.ndim - 1), width)
        rows = [
            torch.autograd.grad(
                end, start, pick.expand_as(end), retain_graph=True, allow_unused=True, materialize_grads=True
            )
            for end in move(*start)
        ]
    return Blocks(*(block.movedim(0, -2) for row in rows for block in row))


def sensitivity(move: Move, q: Point, k: Point) -> Sensitivity:
    """The sizes of the four blocks over all pairs.

    >>> q = k = torch.zeros(3, 2)
    >>> found = sensitivity(lambda q, k: (q + 0.5 * k, 2 * k), q, k)
    >>> found.query_on_key, found.key_on_query, found.key_on_key, found.key_change
    (0.5, 0.0, 2.0, 1.0)
    """
    blocks = jacobian(move, q, k)
    own = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    return Sensitivity(
        **{name: _size(block) for name, block in blocks._asdict().items()},
        query_change=_size(blocks.query_on_query - own),
        key_change=_size(blocks.key_on_key - own),
    )


def _size(block: Block) -> float:
    return float((block.square().sum((-2, -1)).mean() / block.shape[-1]).sqrt())
