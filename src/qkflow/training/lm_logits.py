"""What training and evaluations ask of a model, as one module: several processes wrap it whole, or not at all."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from qkflow.layout import Layout
from qkflow.models import Decoder


class Scores(nn.Module):
    """A language model that is asked for the scores of some targets only.

    >>> from qkflow.models import DecoderConfig
    >>> scores = Scores(Decoder(DecoderConfig(width=8, layers=1, heads=1, hidden=8)))
    >>> tokens = torch.tensor([[72, 105, 33]])
    >>> scores(tokens).shape, scores(tokens, torch.tensor([[False, True, True]])).shape
    (torch.Size([1, 3, 257]), torch.Size([2, 257]))
    """

    def __init__(self, model: Decoder, *, compiled: bool = False) -> None:
        super().__init__()
        self.model = model
        self.compiled = compiled

    def forward(
        self,
        inputs: Int[Tensor, "b t"],
        scored: Bool[Tensor, "b t"] | None = None,
        layout: Layout | None = None,
        piece: int | None = None,
    ) -> Float[Tensor, "... vocabulary"]:
        """Scores `[b, t, v]` of the token after each, or `[n, v]` of those that are `scored`.

        With a `piece`, so many tokens are read at once, with the state carried: the law of splits.
        """
        if scored is None:
            return self.model(inputs, layout=layout)[0]
        if piece is not None:
            return self.model.logits(self._read(inputs, piece)[scored])
        if self.compiled:  # what is compiled is the whole model, and a window holds one document
            return self.model(inputs)[0][scored]
        return self.model.logits(self.model.read(inputs)[0][scored])

    def _read(self, tokens: Int[Tensor, "b t"], piece: int) -> Float[Tensor, "b t p"]:
        """The stream before the head."""
        pieces, state = [], None
        for some in tokens.split(piece, dim=1):
            x, state = self.model.read(some, state)
            pieces.append(x)
        return torch.cat(pieces, dim=1)


def exact(logits: Tensor) -> Tensor:
    """Scores in float32 at least, for a loss that is a sum over many of them."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
