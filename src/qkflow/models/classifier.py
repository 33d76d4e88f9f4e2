"""A model that answers about a text: a stack, and a head that reads the stream at the last token.

tokens ─► embedding ─► block ─► ... ─► [norm] ─► last token ─► head ─► classes

The last token sees all of the text, so a causal stack reads as much as it needs to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.models.stack import Stack, StackConfig, Tokens


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig(StackConfig):
    """The shape of a `Classifier`."""

    classes: int
    """Answers there are."""
    hidden: int = 0
    """Width of the feed-forward network inside a block; 0: attention alone."""
    norm: bool = False
    """Whether streams are normalised before they are read; the published models of this size do not."""
    spread: float = 1.0
    """How far tokens begin from zero: the standard deviation of their embeddings."""
    qk_start: float = 1.0
    """How large the matrices of queries and keys begin, as a part of the usual: near 0, attention begins even."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes < 2:
            raise UsageError(f"a classifier has at least 2 classes, got {self.classes}")
        if not 0 < self.qk_start <= 1:
            raise UsageError(f"qk_start must be above 0 and at most 1, got {self.qk_start:g}")


class Classifier(Stack):
    """A classifier over any mechanism.

    >>> model = Classifier(ClassifierConfig(width=32, layers=1, heads=4, vocabulary=50, classes=3))
    >>> model(torch.tensor([[5, 6, 7], [8, 9, 0]]), Layout.padded([3, 2], 3)).shape
    torch.Size([2, 3])
    """

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__(config, norm=config.norm)
        self.config = config
        self.head = nn.Linear(self.read_width, config.classes, bias=False)
        self.spread_tokens(config.spread)
        nn.init.normal_(self.head.weight, std=self.read_width**-0.5)
        if config.qk_start < 1:
            self._quiet(config.qk_start)

    def forward(self, tokens: Tokens, layout: Layout | None = None) -> Float[Tensor, "b classes"]:
        """Scores of every class; a batch may be padded, on either side, but not packed."""
        x, _ = self.read(tokens, layout=layout)
        if layout is None:
            return self.head(x[:, -1])
        if len(layout.lengths) != len(tokens) or bool((layout.lengths == 0).any()):
            raise UsageError("a classifier reads one text a row, of at least one token: a packed batch has several")
        last = (layout.valid * torch.arange(1, tokens.shape[1] + 1, device=tokens.device)).argmax(1)
        return self.head(x[torch.arange(len(x), device=x.device), last])

    @torch.no_grad()
    def _quiet(self, part: float) -> None:
        for mixer in self.mechanisms:
            quick = set(mixer.circuits().qk)
            for name, parameter in mixer.named_parameters():
                if name in quick and parameter.ndim == 2:
                    parameter.mul_(part)
