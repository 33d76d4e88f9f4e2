r"""Nonlinear queries (Karbevski, https://arxiv.org/abs/2603.13381): a residual perceptron in place of W_q.

    q = (x + LN(W_2 GELU(W_1 RMSNorm(x)))) / 2        W_1: [d/2, d],  W_2: [d, d/2]                    (1)

A control: the queries have as many weights as with W_q (and two norms), are nonlinear, and do not depend on the keys.
Everything after is standard attention. The authors write the factor 1/2 as half the scale of the scores, which is the
same, except that a QK norm after it cancels it. As in their code, both norms have a weight and no bias, and W_1 and W_2
have no bias.

Our choices: W_1 and W_2 start as N(0, 1 / inputs), like every projection here (theirs: N(0, 0.02^2)), and positions are
rotary (theirs are learned embeddings).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from qkflow.errors import UsageError
from qkflow.mechanisms.base import Stream, projection
from qkflow.mechanisms.softmax import StandardAttention, StandardConfig
from qkflow.ops.norm import rms_norm

_EPS = 1e-5


class NonlinearQuery(nn.Module):
    """Equation (1).

    >>> NonlinearQuery(32)(torch.randn(2, 10, 32)).shape
    torch.Size([2, 10, 32])
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        if width < 2 or width % 2:
            raise UsageError(f"the nonlinear query has half of the width inside, which must be even, got {width}")
        self.inner_norm = nn.Parameter(torch.ones(width))
        self.inner = projection(width, width // 2)
        self.outer = projection(width // 2, width)
        self.outer_norm = nn.Parameter(torch.ones(width))

    def forward(self, x: Stream) -> Stream:
        """Return the queries of all heads, concatenated."""
        hidden = F.gelu(self.inner(rms_norm(x, self.inner_norm, _EPS)))
        return (x + F.layer_norm(self.outer(hidden), x.shape[-1:], self.outer_norm, eps=_EPS)) / 2


@dataclass(frozen=True, kw_only=True)
class NonlinearQueryConfig(StandardConfig):
    """Options of `NonlinearQueryAttention`: those of `StandardConfig`."""

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> NonlinearQueryAttention:
        """Return the mechanism of one layer."""
        return NonlinearQueryAttention(width, heads, layer, layers, config=self)


class NonlinearQueryAttention(StandardAttention):
    """Standard attention with nonlinear queries.

    >>> layer = NonlinearQueryAttention(width=32, heads=4)
    >>> y, state = layer(torch.randn(2, 10, 32))
    >>> y.shape, layer.query.inner.weight.shape
    (torch.Size([2, 10, 32]), torch.Size([16, 32]))
    """

    config_type = NonlinearQueryConfig

    def query_map(self, width: int, outputs: int) -> nn.Module:
        """Equation (1) instead of a projection."""
        if outputs != width:
            raise UsageError(f"nonlinear queries are as wide as the model, got heads of {outputs} in all for {width}")
        return NonlinearQuery(width)
