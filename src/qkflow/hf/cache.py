"""Our state as the cache that `generate` carries from token to token."""

from __future__ import annotations

from typing import NoReturn

import torch
from jaxtyping import Bool
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache

from qkflow.errors import UsageError
from qkflow.models import DecoderState


class QKFlowCache(TransformersCache):
    """A `DecoderState`, of whatever mechanisms, where transformers expects a cache; a forward call moves it on.

    >>> cache = QKFlowCache()
    >>> cache.get_seq_length(), cache.is_compileable
    (0, False)
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.state: DecoderState | None = None
        """What the model carries on with; None before the first token."""
        self.columns = 0
        """Columns of the batch that were read, padding included."""
        self._padded: list[Bool[Tensor, "b t"] | int] = []

    def advance(self, state: DecoderState, t: int, valid: Bool[Tensor, "b t"] | None) -> None:
        """Take the state after `t` more columns, of which `valid` says what is no padding (None: all of them)."""
        self.state = state
        self.columns += t
        last = self._padded[-1] if self._padded else None
        if valid is not None:
            self._padded.append(valid)
        elif isinstance(last, int):
            self._padded[-1] = last + t
        else:
            self._padded.append(t)

    def valid(self) -> Bool[Tensor, "b s"] | None:
        """Which of the columns were no padding; None while all of them were tokens."""
        masks = [part for part in self._padded if isinstance(part, Tensor)]
        if not masks:
            return None
        parts = [part if isinstance(part, Tensor) else masks[0].new_ones(len(masks[0]), part) for part in self._padded]
        return torch.cat(parts, 1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns read so far, padding included: what the masks of transformers count."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No maximum."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Columns of a whole mask, from the first."""
        return self.columns + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Go on with these rows, as beam search asks."""
        if self.state is not None:
            self.state = self.state.select(beam_idx)
            self._padded = [
                part[beam_idx.to(part.device)] if isinstance(part, Tensor) else part for part in self._padded
            ]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row so many times, one after the other."""
        if self.state is not None:
            rows = torch.arange(self.batch_size, device=self.state.length.device)
            self.reorder_cache(rows.repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.columns, self._padded = None, 0, []

    def crop(self, tokens_to_remove: int) -> None:
        """Refused, unless there is nothing to take back: a memory of fixed size cannot forget its last token."""
        if tokens_to_remove:
            self._refuse()

    def activate_past_recording(self) -> None:
        """Refused: a state does not go back."""
        self._refuse()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> NoReturn:
        """Refused: there are no keys and values for others to fill in."""
        raise UsageError("a QKFlowCache holds the states of a qkflow model: give it to that model only")

    def _refuse(self) -> NoReturn:
        raise UsageError(
            "assisted generation takes tokens back, which the state of a qkflow model cannot: leave assistant_model and"
            " prompt_lookup_num_tokens out"
        )

    def __len__(self) -> int:
        """Layers that have a state."""
        return 0 if self.state is None else len(self.state.layers)

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first token."""
        return -1 if self.state is None else len(self.state.length)

    @property
    def is_compileable(self) -> bool:
        """False: `generate` does not compile its steps by itself."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether it has seen a token."""
        return self.state is not None

    @property
    def is_croppable(self) -> bool:
        """False: tokens cannot be taken back."""
        return False
