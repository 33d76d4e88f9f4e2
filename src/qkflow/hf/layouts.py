"""From what transformers says about a batch (a mask, positions) to our layout."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkflow.errors import UsageError
from qkflow.layout import Layout

Tokens = Int[Tensor, "b t"]


def layout_of(tokens: Tokens, mask: Any, positions: Tensor | None, seen: int, past: Tensor | None) -> Layout | None:
    """The layout of a batch whose rows went on for `seen` columns and `past` tokens before; None: all is valid.

    A mask may cover the columns seen before: what they held, the state knows. Positions that begin anew inside a row
    say that it holds several texts; others have to be those that a qkflow model counts by itself.
    """
    layout = None if mask is None else _masked(_checked(tokens, mask, seen))
    if positions is None:
        return layout
    b, t = tokens.shape
    if positions.shape not in ((b, t), (1, t)):
        raise UsageError(f"position_ids must be {[b, t]}, one for each token, got {list(positions.shape)}")
    given = positions.expand(b, t)
    if layout is None and past is None and bool((given[:, 1:] == 0).any()):
        layout = Layout.segmented(given == 0)
    own = torch.arange(t, device=tokens.device).expand(b, t) if layout is None else layout.positions
    own = own if past is None else own + past[:, None]
    if not bool(((own == given) | (False if layout is None else ~layout.valid)).all()):
        raise UsageError(
            "position_ids are others than a qkflow model counts (from 0, without padding; anew for each text of a"
            " packed row): leave them out"
        )
    return layout


def _checked(tokens: Tokens, mask: Any, seen: int) -> Bool[Tensor, "b t"]:
    """The mask of the new columns."""
    b, t = tokens.shape
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise UsageError(f"attention_mask must be a tensor [rows, columns] of ones and zeros, got {got}")
    if len(mask) != b or mask.shape[1] not in (t, seen + t):
        raise UsageError(f"attention_mask must be {[b, seen + t]} for {[b, t]} tokens, got {list(mask.shape)}")
    return mask[:, -t:] != 0


def _masked(valid: Bool[Tensor, "b t"]) -> Layout | None:
    if bool(valid.all()):
        return None
    t, counts = valid.shape[1], valid.sum(1)
    column = torch.arange(t, device=valid.device)
    if torch.equal(valid, column < counts[:, None]):
        return Layout.padded(counts, t)
    if torch.equal(valid, column >= t - counts[:, None]):
        return Layout.padded(counts, t, side="left")
    raise UsageError(
        "attention_mask has zeros between ones, or on both sides: a qkflow model reads texts without holes, pad all"
        " rows on the left or all on the right"
    )
