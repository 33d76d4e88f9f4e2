"""The state of a qkflow model as the cache of `generate`."""

from __future__ import annotations

from typing import NoReturn

import torch
from jaxtyping import Bool
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache

from qkflow.errors import UsageError
from qkflow.models import DecoderState


class QKFlowCache(TransformersCache):
    """Holds a `DecoderState`, of any mechanisms, where transformers expects a cache. `forward` updates it.

    >>> cache = QKFlowCache()
    >>> cache.get_seq_length(), cache.is_compileable
    (0, False)
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.reset()

    def reset(self) -> None:
        """Empty the cache."""
        self.state: DecoderState | None = None
        """The state after the last token; None if the cache is empty."""
        self.columns = 0
        """Columns of the batch read so far, padding included."""
        self._masks: list[Bool[Tensor, "b t"] | int] = []
        """The mask of each call, or the number of columns if none of them was padding."""

    def advance(self, state: DecoderState, t: int, valid: Bool[Tensor, "b t"] | None) -> None:
        """Store the state after `t` more columns; `valid` is False at padding (None: no padding)."""
        self.state = state
        self.columns += t
        if valid is not None:
            self._masks.append(valid)
        elif self._masks and isinstance(last := self._masks[-1], int):
            self._masks[-1] = last + t
        else:
            self._masks.append(t)

    def valid(self) -> Bool[Tensor, "b s"] | None:
        """The mask of all columns, False at padding; None if there was no padding."""
        tensors = [mask for mask in self._masks if isinstance(mask, Tensor)]
        if not tensors:
            return None
        first = tensors[0]
        return torch.cat(
            [mask if isinstance(mask, Tensor) else first.new_ones(len(first), mask) for mask in self._masks], 1
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns read so far, padding included, as the masks of transformers count them."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no maximum."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Length and offset of the mask for the next `query_length` columns."""
        return self.columns + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows, as beam search needs."""
        if self.state is not None:
            self.state = self.state.select(beam_idx)
            self._masks = [mask[beam_idx.to(mask.device)] if isinstance(mask, Tensor) else mask for mask in self._masks]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select rows."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        if self.state is not None:
            rows = torch.arange(self.batch_size, device=self.state.length.device)
            self.reorder_cache(rows.repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Not supported: a recurrent state cannot remove its last tokens."""
        if tokens_to_remove:
            self._refuse_cropping()

    def activate_past_recording(self) -> None:
        """Not supported: a recurrent state cannot remove its last tokens."""
        self._refuse_cropping()

    def _refuse_cropping(self) -> NoReturn:
        raise UsageError(
            "assisted generation removes tokens from the cache, which the state of a qkflow model does not support:"
            " leave out assistant_model and prompt_lookup_num_tokens"
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> NoReturn:
        """Not supported: the cache holds states of qkflow models, not keys and values."""
        raise UsageError("a QKFlowCache holds the state of a qkflow model: it cannot be used with other models")

    def __len__(self) -> int:
        """Layers with a state."""
        return 0 if self.state is None else len(self.state.layers)

    @property
    def batch_size(self) -> int:
        """Rows; -1 if the cache is empty."""
        return -1 if self.state is None else len(self.state.length)

    @property
    def is_compileable(self) -> bool:
        """False: `generate` must not compile its steps."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether a token was read."""
        return self.state is not None

    @property
    def is_croppable(self) -> bool:
        """False: tokens cannot be removed."""
        return False
