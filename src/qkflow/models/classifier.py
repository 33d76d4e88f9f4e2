"""A text classifier: a stack, and a head at the last token.

tokens ─► embedding ─► block ─► ... ─► [norm] ─► last token ─► head ─► classes

The last token attends to the whole text, so a causal stack is enough.
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
    """Shape of a `Classifier`."""

    classes: int
    """Number of classes."""
    hidden: int = 0
    """Hidden width of the feed-forward networks; 0 disables them."""
    norm: bool = False
    """Whether blocks and output are normalised; the published models of this size are not."""
    spread: float = 1.0
    """Initial standard deviation of the embeddings."""
    qk_start: float = 1.0
    """Factor on the initial query and key matrices; near 0, attention starts uniform."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes < 2:
            raise UsageError(f"classes must be at least 2, got {self.classes}")
        if not 0 < self.qk_start <= 1:
            raise UsageError(f"qk_start must be above 0 and at most 1, got {self.qk_start:g}")


class Classifier(Stack):
    """A classifier with any mechanism.

    >>> model = Classifier(ClassifierConfig(width=32, layers=1, heads=4, vocabulary=50, classes=3))
    >>> model(torch.tensor([[5, 6, 7], [8, 9, 0]]), Layout.padded([3, 2], 3)).shape
    torch.Size([2, 3])
    """

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__(config, norm=config.norm)
        self.config = config
        self.head = nn.Linear(self.read_width, config.classes, bias=False)
        self.init_embedding(config.spread)
        nn.init.normal_(self.head.weight, std=self.read_width**-0.5)
        if config.qk_start < 1:
            self._scale_qk(config.qk_start)

    def forward(self, tokens: Tokens, layout: Layout | None = None) -> Float[Tensor, "b classes"]:
        """Return the logits of the classes; batches may be padded on either side, but not packed."""
        x, _ = self.read(tokens, layout=layout)
        if layout is None:
            return self.head(x[:, -1])
        if len(layout.lengths) != len(tokens) or bool((layout.lengths == 0).any()):
            raise UsageError("a classifier reads one text of at least one token per row: got a packed or an empty row")
        last = (layout.valid * torch.arange(1, tokens.shape[1] + 1, device=tokens.device)).argmax(1)
        return self.head(x[torch.arange(len(x), device=x.device), last])

    @torch.no_grad()
    def _scale_qk(self, factor: float) -> None:
        for mechanism in self.mechanisms:
            names = set(mechanism.circuits().qk)
            for name, parameter in mechanism.named_parameters():
                if name in names and parameter.ndim == 2:
                    parameter.mul_(factor)
