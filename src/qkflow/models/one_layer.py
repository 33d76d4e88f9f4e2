r"""The one-layer model of the theory: attention on one-hot tokens (https://arxiv.org/abs/2608.06776).

    a = softmax(x_T^\top W_QK x_i / \sqrt{d})        over i < T, T the last token
    logits = W_OV \sum_i a_i x_i                     no residual, norm, positions or feed-forward

Each circuit is one matrix (collapsed, C) or a product of two (factorised, F): W_QK = W_Q^T W_K and W_OV = W_O W_V. The
four forms are named after the attention circuit (A) and the output circuit (O): FAFO, FACO, CAFO, CACO. They compute
the same functions but train differently: a product that starts near zero has a vanishing gradient.

| symbol   | variable | shape           | forms      |
|----------|----------|-----------------|------------|
| W_Q, W_K | `query`, `key`    | `[d d]` | FAFO, FACO |
| W_QK     | `qk`     | `[d d]`         | CAFO, CACO |
| W_V, W_O | `value`, `output` | `[d d]` | FAFO, CAFO |
| W_OV     | `ov`     | `[d d]`         | FACO, CACO |

d is the vocabulary size. The paper does not say whether the last token attends to itself. Ours does not: on the
synthetic task the last token determines the label, and a model that can attend to it learns to, the more so the
faster W_QK learns.
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
    """Shape of a `OneLayer`; the defaults are the published ones."""

    vocabulary: int = 50
    """Vocabulary size, and width of the stream."""
    form: Form = "FAFO"
    """Factorised (F) or collapsed (C) attention (A) and output (O) circuits."""
    start: float = 1e-6
    """Every matrix starts as this times the identity, so a factorised circuit starts as its square."""

    def __post_init__(self) -> None:
        if self.vocabulary < 1:
            raise UsageError(f"vocabulary must be at least 1, got {self.vocabulary}")
        if self.form not in get_args(Form):
            raise unknown("form", self.form, get_args(Form))
        if not math.isfinite(self.start):
            raise UsageError(f"start must be a finite number, got {self.start}")


class OneLayer(nn.Module):
    """Attention of the last token over one-hot tokens, with collapsed or factorised circuits.

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
        """Return the logits at the last token of each row."""
        return self.read(self.embed(tokens), layout)

    def weights(self, tokens: Tokens, layout: Layout | None = None) -> Float[Tensor, "b t"]:
        """Return the attention of the last token of each row; 0 on itself and on padding."""
        rows = self.embed(tokens) if layout is None else _rows(self.embed(tokens), layout)
        a = self._attend(rows, layout)
        return a if layout is None else layout.to_batch(a)

    def embed(self, tokens: Tokens) -> Float[Tensor, "b t d"]:
        """Return the one-hot encoding."""
        return F.one_hot(tokens, self.config.vocabulary).to(next(self.parameters()).dtype)

    def read(self, x: Float[Tensor, "b t d"], layout: Layout | None = None) -> Float[Tensor, "b vocabulary"]:
        """Return the logits, given a stream that need not be one-hot (for gradients with respect to tokens)."""
        rows = x if layout is None else _rows(x, layout)
        z = einsum(self._attend(rows, layout), rows, "b t, b t d -> b d")
        if self.config.form.endswith("CO"):
            return F.linear(z, self.get_parameter("ov"))
        return F.linear(F.linear(z, self.get_parameter("value")), self.get_parameter("output"))

    def matrices(self) -> tuple[Matrix, Matrix]:
        """Return W_QK and W_OV, which determine the function."""
        qk, ov = (tuple(map(self.get_parameter, names)) for names in (self.circuits().qk, self.circuits().ov))
        return (qk[0] if len(qk) == 1 else qk[0].T @ qk[1]), (ov[0] if len(ov) == 1 else ov[1] @ ov[0])

    def circuits(self) -> Circuits:
        """Return the parameters of each circuit."""
        return Circuits(
            qk=("query", "key") if self.config.form.startswith("FA") else ("qk",),
            ov=("value", "output") if self.config.form.endswith("FO") else ("ov",),
        )

    @torch.no_grad()
    def convert(self, form: Form) -> OneLayer:
        """Return the same function in another form: products are collapsed, matrices split into balanced factors.

        The factors are `W_Q = S^{1/2} U^T, W_K = S^{1/2} V^T` of `W_QK = U S V^T`, and `W_O = U S^{1/2}`,
        `W_V = S^{1/2} V^T` of `W_OV`, so that both train at the same speed. A circuit that keeps its form keeps its
        matrices. A collapsed matrix of 1e-6 becomes factors of 1e-3, unlike the published initialisation of a
        factorised model, whose factors are 1e-6 and whose product is 1e-12.

        >>> model = OneLayer(OneLayerConfig(vocabulary=4, form="CACO", start=0.25))
        >>> model.convert("FAFO").get_parameter("query").diagonal().abs().tolist()
        [0.5, 0.5, 0.5, 0.5]
        """
        other = OneLayer(replace(self.config, form=form)).to(next(self.parameters()))
        source, target, (qk, ov) = self.circuits(), other.circuits(), self.matrices()
        matrices: dict[str, Matrix] = {"qk": qk, "ov": ov}
        if target.qk == ("query", "key"):
            left, right = _factors(qk)
            matrices |= {"query": left.T, "key": right}
        if target.ov == ("value", "output"):
            matrices["output"], matrices["value"] = _factors(ov)
        matrices |= {name: self.get_parameter(name) for name in (*source.qk, *source.ov)}
        for name in (*target.qk, *target.ov):
            other.get_parameter(name).copy_(matrices[name])
        return other

    def _attend(self, rows: Float[Tensor, "b t d"], layout: Layout | None) -> Float[Tensor, "b t"]:
        """Return the attention of the last token, in row form."""
        positions = torch.arange(rows.shape[1], device=rows.device)
        last_position = positions[-1:].expand(len(rows)) if layout is None else layout.lengths - 1
        last = rows[torch.arange(len(rows), device=rows.device), last_position.clamp_min(0)]
        if self.config.form.startswith("FA"):
            query = F.linear(last, self.get_parameter("query")) @ self.get_parameter("key")
        else:
            query = last @ self.get_parameter("qk")
        scores = einsum(query, rows, "b d, b t d -> b t") * self.config.vocabulary**-0.5
        hidden = positions >= last_position[:, None]
        # a finite fill value, so that rows without visible tokens have zero attention and finite gradients
        return scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(hidden, 0)


def _rows(x: Float[Tensor, "b t d"], layout: Layout) -> Float[Tensor, "b span d"]:
    layout.check(x)
    if len(layout.lengths) != len(x):
        raise UsageError(
            f"expected one sequence per row, got {len(layout.lengths)} packed sequences in {len(x)} rows:"
            " use a padded layout"
        )
    return layout.zero_padding(layout.to_rows(x)) if layout.index is None else layout.to_rows(x)


def _factors(matrix: Matrix) -> tuple[Matrix, Matrix]:
    """Return L and R with L R = matrix and L^T L = R R^T; singular values at rounding level are set to zero."""
    u, s, vt = torch.linalg.svd(matrix)
    rounding = torch.finfo(s.dtype).eps * len(s) * s.max()
    root = torch.where(s > rounding, s, 0).sqrt()
    return u * root, root[:, None] * vt
