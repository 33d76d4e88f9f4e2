r"""The one-layer model of the theory: attention on one-hot tokens, and nothing else (arXiv 2608.06776).

    a = softmax(x_T^\top W_QK x_i / \sqrt{d})        over i < T: the last token asks, those before it are seen
    logits = W_OV \sum_i a_i x_i                     no residual, norm, positions or feed-forward network

Each circuit is one matrix (collapsed, C) or a product of two (factorised, F): W_QK = W_Q^T W_K and W_OV = W_O W_V. The
four forms are named by the attention circuit (A) and the output circuit (O): FAFO, FACO, CAFO, CACO. They compute the
same functions and learn along different paths, since a product that begins near zero has hardly a gradient.

| symbol   | here     | shape           | forms      |
|----------|----------|-----------------|------------|
| W_Q, W_K | `query`, `key`    | `[d d]` | FAFO, FACO |
| W_QK     | `qk`     | `[d d]`         | CAFO, CACO |
| W_V, W_O | `value`, `output` | `[d d]` | FAFO, CAFO |
| W_OV     | `ov`     | `[d d]`         | FACO, CACO |

d is the vocabulary. Whether the published model sees its own query we do not know. Ours does not: on the synthetic task
the query alone decides the label, and a model that sees it learns to look there, the more so the faster W_QK learns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkflow.errors import UsageError, unknown
from qkflow.layout import Layout
from qkflow.mechanisms.base import Circuits

Form = Literal["FAFO", "FACO", "CAFO", "CACO"]
Tokens = Int[Tensor, "b t"]
Matrix = Float[Tensor, "d d"]


@dataclass(frozen=True, kw_only=True)
class OneLayerConfig:
    """The shape of a `OneLayer`, as published."""

    vocabulary: int = 50
    """Tokens there are: the width of the one-hot stream, of the head, and of the logits."""
    form: Form = "FAFO"
    """Which circuits are a product of two matrices (F) and which are one (C): attention, then output."""
    start: float = 1e-6
    """Every matrix begins as this times the identity; a factorised circuit as its square."""

    def __post_init__(self) -> None:
        if self.vocabulary < 1:
            raise UsageError(f"vocabulary must be at least 1, got {self.vocabulary}")
        if self.form not in get_args(Form):
            raise unknown("form", self.form, get_args(Form))
        if not math.isfinite(self.start):
            raise UsageError(f"start must be a finite number, got {self.start}")


class OneLayer(nn.Module):
    """Attention of the last token over one-hot tokens, its circuits whole or factorised.

    >>> model = OneLayer(OneLayerConfig(vocabulary=3, form="CACO", start=0.0))
    >>> tokens = torch.tensor([[0, 2, 2, 0, 1]])
    >>> model(tokens).shape, model.weights(tokens).tolist()
    (torch.Size([1, 3]), [[0.25, 0.25, 0.25, 0.25, 0.0]])
    >>> model.circuits()
    Circuits(qk=('qk',), ov=('ov',))
    """

    def __init__(self, config: OneLayerConfig) -> None:
        super().__init__()
        self.config = config
        circuits = self.circuits()
        for name in (*circuits.qk, *circuits.ov):
            self.register_parameter(name, nn.Parameter(config.start * torch.eye(config.vocabulary)))

    def forward(self, tokens: Tokens, layout: Layout | None = None) -> Float[Tensor, "b vocabulary"]:
        """Scores of every token as the answer, asked for at the last token of each row."""
        return self.read(self.embed(tokens), layout)

    def weights(self, tokens: Tokens, layout: Layout | None = None) -> Float[Tensor, "b t"]:
        """The attention of the last token of each row on each token; 0 on itself, and on padding."""
        rows = self.embed(tokens) if layout is None else _rows(self.embed(tokens), layout)
        a = self._attend(rows, layout)
        return a if layout is None else layout.batch(a)

    def embed(self, tokens: Tokens) -> Float[Tensor, "b t d"]:
        """The one-hot stream."""
        return F.one_hot(tokens, self.config.vocabulary).to(next(self.parameters()).dtype)

    def read(self, x: Float[Tensor, "b t d"], layout: Layout | None = None) -> Float[Tensor, "b vocabulary"]:
        """Scores from a stream that need not be one-hot: what a gradient with respect to tokens is taken through."""
        rows = x if layout is None else _rows(x, layout)
        z = einsum(self._attend(rows, layout), rows, "b t, b t d -> b d")
        if self.config.form.endswith("CO"):
            return F.linear(z, self.get_parameter("ov"))
        return F.linear(F.linear(z, self.get_parameter("value")), self.get_parameter("output"))

    def matrices(self) -> tuple[Matrix, Matrix]:
        """W_QK and W_OV, which are all that the function depends on."""
        qk, ov = (tuple(map(self.get_parameter, names)) for names in (self.circuits().qk, self.circuits().ov))
        return (qk[0] if len(qk) == 1 else qk[0].T @ qk[1]), (ov[0] if len(ov) == 1 else ov[1] @ ov[0])

    def circuits(self) -> Circuits:
        """The matrices of each circuit."""
        return Circuits(
            qk=("query", "key") if self.config.form.startswith("FA") else ("qk",),
            ov=("value", "output") if self.config.form.endswith("FO") else ("ov",),
        )

    @torch.no_grad()
    def converted(self, form: Form) -> OneLayer:
        """The same function in another form: products to collapse, balanced factors of the same rank to factorise.

        The factors are `W_Q = S^{1/2} U^T, W_K = S^{1/2} V^T` of `W_QK = U S V^T`, and `W_O = U S^{1/2}`,
        `W_V = S^{1/2} V^T` of `W_OV`: so that neither of the two moves faster. A circuit that keeps its form keeps its
        matrices. Note that a collapsed start of 1e-6 becomes factors of 1e-3, not the published start of a factorised
        model, which is another function: 1e-6 each, 1e-12 together.

        >>> model = OneLayer(OneLayerConfig(vocabulary=4, form="CACO", start=0.25))
        >>> model.converted("FAFO").get_parameter("query").diagonal().abs().tolist()
        [0.5, 0.5, 0.5, 0.5]
        """
        other = OneLayer(replace(self.config, form=form)).to(next(self.parameters()))
        have, want, (qk, ov) = self.circuits(), other.circuits(), self.matrices()
        made: dict[str, Matrix] = {"qk": qk, "ov": ov}
        if want.qk == ("query", "key"):
            left, right = _factors(qk)
            made |= {"query": left.T, "key": right}
        if want.ov == ("value", "output"):
            made["output"], made["value"] = _factors(ov)
        made |= {name: self.get_parameter(name) for name in (*have.qk, *have.ov)}
        for name in (*want.qk, *want.ov):
            other.get_parameter(name).copy_(made[name])
        return other

    def _attend(self, rows: Float[Tensor, "b t d"], layout: Layout | None) -> Float[Tensor, "b t"]:
        """The last token's attention, in the row form of the layout."""
        places = torch.arange(rows.shape[1], device=rows.device)
        asking = places[-1:].expand(len(rows)) if layout is None else layout.lengths - 1
        last = rows[torch.arange(len(rows), device=rows.device), asking.clamp_min(0)]
        if self.config.form.startswith("FA"):
            asked = F.linear(last, self.get_parameter("query")) @ self.get_parameter("key")
        else:
            asked = last @ self.get_parameter("qk")
        scores = einsum(asked, rows, "b d, b t d -> b t") * self.config.vocabulary**-0.5
        unseen = places >= asking[:, None]
        # finite, so that a row in which nothing is seen has no attention, and gradients that are numbers
        return scores.masked_fill(unseen, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(unseen, 0)


def _rows(x: Float[Tensor, "b t d"], layout: Layout) -> Float[Tensor, "b span d"]:
    layout.check(x)
    if len(layout.lengths) != len(x):
        raise UsageError(
            f"one answer is read for each row: got {len(layout.lengths)} packed sequences in {len(x)} rows;"
            " give each a row of its own, padded"
        )
    return layout.clean(layout.rows(x)) if layout.index is None else layout.rows(x)


def _factors(matrix: Matrix) -> tuple[Matrix, Matrix]:
    """`L R = matrix` with `L^T L = R R^T`; what the rounding of an SVD adds to the rank is left out."""
    u, s, vt = torch.linalg.svd(matrix)
    rounding = torch.finfo(s.dtype).eps * len(s) * s.max()
    root = torch.where(s > rounding, s, 0).sqrt()
    return u * root, root[:, None] * vt
