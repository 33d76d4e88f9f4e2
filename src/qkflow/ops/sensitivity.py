r"""The Jacobian of a map of query-key pairs: how much a moved query or key depends on its partner.

    J = [ dq'/dq   dq'/dk ]          |B| = \sqrt{ mean over pairs of \|B\|_F^2 / k },   so that |c I| = |c|
        [ dk'/dq   dk'/dk ]

Pairs are independent, so one backward pass over k copies of them, each with another output coordinate, gives a row of
blocks.

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
"""Maps queries and keys to queries and keys."""


class JacobianBlocks(NamedTuple):
    """The Jacobian of each pair; rows are output coordinates, columns input coordinates."""

    query_on_query: Block
    query_on_key: Block
    key_on_query: Block
    key_on_key: Block


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """Root-mean-square norms of the Jacobian's blocks; the identity has norm 1."""

    query_on_query: float
    """|dq'/dq|."""
    query_on_key: float
    """|dq'/dk|."""
    key_on_query: float
    """|dk'/dq|."""
    key_on_key: float
    """|dk'/dk|."""
    query_change: float
    """|dq'/dq - I|."""
    key_change: float
    """|dk'/dk - I|."""


def jacobian(move: Move, q: Point, k: Point) -> JacobianBlocks:
    """The four blocks at each pair, exactly; `move` is called with an additional leading dimension.

    >>> q = k = torch.zeros(1, 2)
    >>> jacobian(lambda q, k: (q + 0.5 * k, k), q, k).query_on_key
    tensor([[[0.5000, 0.0000],
             [0.0000, 0.5000]]])
    """
    if q.shape != k.shape:
        raise UsageError(f"queries and keys must have the same shape, got {list(q.shape)} and {list(k.shape)}")
    width = q.shape[-1]
    with torch.inference_mode(mode=False), torch.enable_grad():
        inputs = [x.detach().clone().expand(width, *x.shape).clone().requires_grad_() for x in (q, k)]
        basis = torch.eye(width, dtype=q.dtype, device=q.device).view(width, *[1] * (q.ndim - 1), width)
        rows = [
            torch.autograd.grad(
                output, inputs, basis.expand_as(output), retain_graph=True, allow_unused=True, materialize_grads=True
            )
            for output in move(*inputs)
        ]
    return JacobianBlocks(*(block.movedim(0, -2) for row in rows for block in row))


def sensitivity(move: Move, q: Point, k: Point) -> Sensitivity:
    """The norms of the four blocks over all pairs.

    >>> q = k = torch.zeros(3, 2)
    >>> result = sensitivity(lambda q, k: (q + 0.5 * k, 2 * k), q, k)
    >>> result.query_on_key, result.key_on_query, result.key_on_key, result.key_change
    (0.5, 0.0, 2.0, 1.0)
    """
    blocks = jacobian(move, q, k)
    identity = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    return Sensitivity(
        **{name: _norm(block) for name, block in blocks._asdict().items()},
        query_change=_norm(blocks.query_on_query - identity),
        key_change=_norm(blocks.key_on_key - identity),
    )


def _norm(block: Block) -> float:
    return float((block.square().sum((-2, -1)).mean() / block.shape[-1]).sqrt())
