"""Convert `attention_mask` and `position_ids` of transformers to a `Layout`."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from qkflow.errors import UsageError
from qkflow.layout import Layout

Inputs = Shaped[Tensor, "b t ..."]
"""Tokens, or embeddings."""


def batch_layout(
    inputs: Inputs, mask: Any, positions: Tensor | None, past_columns: int, past_lengths: Int[Tensor, " b"] | None
) -> Layout | None:
    """The layout of a batch that continues `past_columns` columns and `past_lengths` tokens; None: no padding.

    The mask may include the past columns, which the state has already read. Positions that restart at 0 inside a row
    separate packed sequences; all other positions must be the ones that the model counts itself.
    """
    layout = None
    if mask is not None and not bool((valid := _new_columns(inputs, mask, past_columns)).all()):
        layout = Layout.from_mask(valid)
    if positions is None:
        return layout
    b, t = inputs.shape[:2]
    if positions.shape not in ((b, t), (1, t)):
        raise UsageError(f"position_ids must have shape {[b, t]}, got {list(positions.shape)}")
    positions = positions.expand(b, t)
    if layout is None and past_lengths is None and bool((positions[:, 1:] == 0).any()):
        layout = Layout.segmented(positions == 0)
    counted = torch.arange(t, device=inputs.device).expand(b, t) if layout is None else layout.positions
    counted = counted if past_lengths is None else counted + past_lengths[:, None]
    if not bool(((counted == positions) | (False if layout is None else ~layout.valid)).all()):
        raise UsageError(
            "position_ids must count the tokens from 0, without padding, and restart for each packed sequence: leave"
            " them out"
        )
    return layout


def is_packed(layout: Layout | None, inputs: Tensor) -> bool:
    """Whether rows of the batch contain several sequences."""
    return layout is not None and len(layout.lengths) != len(inputs)


def _new_columns(inputs: Inputs, mask: Any, past_columns: int) -> Bool[Tensor, "b t"]:
    """The mask of the new columns."""
    b, t = inputs.shape[:2]
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        actual = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise UsageError(f"attention_mask must be a tensor [batch, columns] of ones and zeros, got {actual}")
    if len(mask) != b or mask.shape[1] not in (t, past_columns + t):
        raise UsageError(f"attention_mask must be {[b, past_columns + t]} for {[b, t]} tokens, got {list(mask.shape)}")
    return mask[:, -t:] != 0
