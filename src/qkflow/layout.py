"""Positions, padding and packing of a batch, computed once per batch.

A batch `[b, t, ...]` holds `n` sequences. It is padded (one sequence per row, with padding on the left or right) or
packed (several sequences per row, one after the other). Mechanisms compute in *row form* `[n, span, ...]`: one sequence
per row, starting at column 0. There, a causal mechanism needs no padding mask, because padding is always to the right.

    batch form, packed          row form
    a0 a1 a2 b0 b1 c0     ->    a0 a1 a2
                                b0 b1 .
                                c0 .  .

A batch with right padding is already in row form. The row form is as wide as the longest sequence, so pack sequences of
similar length. `None` in place of a layout means one sequence per row and no padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from qkflow.errors import UsageError
from qkflow.formatting import plural


@dataclass(frozen=True, eq=False, repr=False)
class Layout:
    """The sequences of a batch. Create it with `from_mask`, `padded`, `packed` or `segmented`.

    >>> layout = Layout.padded([1, 3], 3, side="left")
    >>> layout
    Layout(2 sequences of 1 to 3 tokens in a batch of 2 x 3)
    >>> layout.positions.tolist(), layout.sequences.tolist()
    ([[0, 0, 0], [0, 1, 2]], [[-1, -1, 0], [1, 1, 1]])
    >>> layout.to_rows(torch.tensor([[0, 0, 7], [4, 5, 6]])).tolist()
    [[7, 0, 0], [4, 5, 6]]
    """

    sequences: Int[Tensor, "b t"]
    """Index of each token's sequence; -1 at padding."""
    positions: Int[Tensor, "b t"]
    """Position of each token in its sequence, from 0; 0 at padding."""
    valid: Bool[Tensor, "b t"]
    """False at padding."""
    lengths: Int[Tensor, " n"]
    """Number of tokens of each sequence."""
    span: int
    """Number of columns of the row form."""
    is_full: bool
    """Whether every sequence fills its row of the row form."""
    index: Int[Tensor, "n span"] | None
    """Index into the flattened batch of each element of the row form; `None` if the batch is in row form."""

    @classmethod
    def padded(
        cls,
        lengths: Sequence[int] | Int[Tensor, " b"],
        t: int,
        *,
        side: Literal["left", "right"] = "right",
        device: torch.device | str | None = None,
    ) -> Layout:
        """One sequence per row of `t` columns, with `lengths` valid tokens each and padding on one `side`."""
        counts = torch.as_tensor(lengths, dtype=torch.long, device=device)
        if counts.ndim != 1 or bool((counts < 0).any()) or bool((counts > t).any()):
            raise UsageError(f"lengths must be one number from 0 to {t} for each row, got {counts.tolist()}")
        if side not in ("left", "right"):
            raise UsageError(f"side must be 'left' or 'right', got {side!r}")
        column = torch.arange(t, device=counts.device).expand(len(counts), t)
        positions = column if side == "right" else column - (t - counts[:, None])
        valid = (positions >= 0) & (positions < counts[:, None])
        rows = torch.arange(len(counts), device=counts.device)[:, None]
        return cls._create(torch.where(valid, rows, -1), positions, counts, t if side == "right" else None)

    @classmethod
    def from_mask(cls, mask: Bool[Tensor, "b t"]) -> Layout:
        """One sequence per row, where `mask` is true: padding is on the left or the right, or both.

        An `attention_mask` of Hugging Face is `mask.long()`, a `src_key_padding_mask` of PyTorch is `~mask`.

        >>> Layout.from_mask(torch.tensor([[False, True], [True, True]])).lengths.tolist()
        [1, 2]
        """
        if mask.ndim != 2 or mask.dtype != torch.bool:
            raise UsageError(f"the mask must be boolean, [b, t], and true at tokens, got {mask.dtype} {[*mask.shape]}")
        n_starts = mask[:, :1].sum(1) + (mask[:, 1:] & ~mask[:, :-1]).sum(1)
        if bool((n_starts > 1).any()):
            rows = (n_starts > 1).nonzero().flatten().tolist()
            raise UsageError(f"the mask has holes in the rows {rows}: the tokens of a row must be adjacent")
        rows = torch.arange(len(mask), device=mask.device)[:, None]
        is_row_form = not bool((mask[:, 1:] & ~mask[:, :-1]).any())
        positions, span = mask.cumsum(1) - 1, mask.shape[1] if is_row_form else None
        return cls._create(torch.where(mask, rows, -1), positions, mask.sum(1), span)

    @classmethod
    def packed(
        cls, cu_seqlens: Sequence[int] | Int[Tensor, " n1"], *, device: torch.device | str | None = None
    ) -> Layout:
        """One row, in which sequence i occupies columns `cu_seqlens[i]` to `cu_seqlens[i + 1]` (exclusive).

        >>> Layout.packed([0, 3, 5]).positions.tolist()
        [[0, 1, 2, 0, 1]]
        """
        bounds = torch.as_tensor(cu_seqlens, dtype=torch.long, device=device)
        if bounds.ndim != 1 or len(bounds) < 2 or int(bounds[0]) != 0 or bool((bounds.diff() < 0).any()):
            raise UsageError(f"cu_seqlens must start at 0 and must not decrease, got {bounds.tolist()}")
        lengths = bounds.diff()
        sequences = torch.repeat_interleave(torch.arange(len(lengths), device=bounds.device), lengths)[None]
        positions = torch.arange(sequences.shape[1], device=bounds.device) - bounds[sequences]
        return cls._create(sequences, positions, lengths, None)

    @classmethod
    def segmented(cls, starts: Bool[Tensor, "b t"]) -> Layout:
        """No padding; a new sequence starts at the first column of each row and wherever `starts` is true.

        >>> Layout.segmented(torch.tensor([[False, False, True], [True, False, False]])).sequences.tolist()
        [[0, 0, 1], [2, 2, 2]]
        """
        is_start = starts.clone()
        is_start[:, :1] = True
        sequences = is_start.flatten().cumsum(0).sub(1).view(is_start.shape)
        lengths = torch.bincount(sequences.flatten())
        flat = torch.arange(is_start.numel(), device=starts.device).view(is_start.shape)
        return cls._create(sequences, flat - flat[is_start][sequences], lengths, None)

    @classmethod
    def _create(
        cls, sequences: Int[Tensor, "b t"], positions: Int[Tensor, "b t"], lengths: Int[Tensor, " n"], span: int | None
    ) -> Layout:
        """Compute the other fields; `span` is given if the batch is already in row form."""
        valid = sequences >= 0
        index = None
        if span is None:
            span = max(min(1, sequences.numel()), int(lengths.max()) if len(lengths) else 0)
            index = sequences.new_zeros(len(lengths), span)
            index[sequences[valid], positions[valid]] = valid.flatten().nonzero().flatten()
        is_full = bool((lengths == span).all())
        return cls(sequences, positions.masked_fill(~valid, 0), valid, lengths, span, is_full, index)

    def __repr__(self) -> str:
        b, t = self.valid.shape
        return f"Layout({format_lengths(self.lengths, 'sequence')} in a batch of {b} x {t})"

    def check(self, x: Shaped[Tensor, "b t ..."]) -> None:
        """Raise a `UsageError` if a batch has another shape or device than the layout."""
        if x.shape[:2] != self.valid.shape:
            raise UsageError(f"the layout is for a batch of {list(self.valid.shape)}, got {list(x.shape[:2])}")
        if x.device != self.valid.device:
            raise UsageError(f"the layout is on {self.valid.device}, the batch on {x.device}: use layout.to(x.device)")

    def to(self, device: torch.device | str) -> Layout:
        """Return the layout on another device."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    def to_rows(self, x: Shaped[Tensor, "b t ..."]) -> Shaped[Tensor, "n span ..."]:
        """Convert a batch to row form, with zeros after each sequence; a batch in row form is returned unchanged."""
        if self.index is None:
            return x
        is_padding = torch.arange(self.span, device=x.device) >= self.lengths[:, None]
        return x.flatten(0, 1)[self.index].masked_fill(is_padding.view(*is_padding.shape, *[1] * (x.ndim - 2)), 0)

    def to_batch(self, x: Shaped[Tensor, "n span ..."]) -> Shaped[Tensor, "b t ..."]:
        """Convert row form back to batch form, with zeros at padding."""
        if self.index is not None:
            x = x.flatten(0, 1)[self.sequences.clamp_min(0) * self.span + self.positions]
        return self.zero_padding(x)

    def zero_padding(self, x: Shaped[Tensor, "b t ..."]) -> Shaped[Tensor, "b t ..."]:
        """Return the batch with zeros at padding."""
        return x.masked_fill(~self.valid.view(*self.valid.shape, *[1] * (x.ndim - 2)), 0)


def format_lengths(lengths: Int[Tensor, " n"], noun: str) -> str:
    """How many sequences there are, and of how many tokens; tensors without data have no lengths.

    >>> format_lengths(torch.tensor([3, 5]), "row")
    '2 rows of 3 to 5 tokens'
    """
    count = plural(len(lengths), noun)
    if len(lengths) == 0 or lengths.is_meta or type(lengths) is not Tensor:
        return count
    low, high = int(lengths.min()), int(lengths.max())
    return f"{count} of {plural(high, 'token') if low == high else f'{low} to {high} tokens'}"
