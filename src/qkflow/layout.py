"""Where the sequences of a batch lie: positions, padding and packing, resolved once and then only read.

A batch `[b, t, ...]` holds `n` sequences. Padded: one a row, with padding on the left or on the right. Packed: several
in a row, one behind the other. Mechanisms compute in the *row form* `[n, span, ...]`: every sequence in a row of its
own, beginning at column 0, with whatever is left over on the right. There a causal mechanism needs no mask at all,
since nothing valid can see what lies to its right.

    batch form, packed          row form
    a0 a1 a2 b0 b1 c0     ->    a0 a1 a2
                                b0 b1 .
                                c0 .  .

Right padding is the row form already, and moves nothing. The row form is as wide as the longest sequence: pack
documents of like lengths together. No layout (`None`) means: every token valid, one sequence a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from qkflow.errors import UsageError


@dataclass(frozen=True, eq=False)
class Layout:
    """The sequences of a batch. Make one with `padded`, `packed` or `segmented`.

    >>> layout = Layout.padded([1, 3], 3, side="left")
    >>> layout.positions.tolist(), layout.sequences.tolist()
    ([[0, 0, 0], [0, 1, 2]], [[-1, -1, 0], [1, 1, 1]])
    >>> layout.rows(torch.tensor([[0, 0, 7], [4, 5, 6]])).tolist()
    [[7, 0, 0], [4, 5, 6]]
    """

    sequences: Int[Tensor, "b t"]
    """The sequence each token belongs to; -1 is padding."""
    positions: Int[Tensor, "b t"]
    """Each token's place in its own sequence, from 0; padding has 0."""
    valid: Bool[Tensor, "b t"]
    """False at padding."""
    lengths: Int[Tensor, " n"]
    """Tokens of each sequence."""
    span: int
    """Columns of the row form."""
    even: bool
    """Whether every sequence fills its row of the row form."""
    index: Int[Tensor, "n span"] | None
    """Which token of the flattened batch stands at each place of the row form; `None` where the two are the same."""

    @classmethod
    def padded(
        cls,
        lengths: Sequence[int] | Int[Tensor, " b"],
        t: int,
        *,
        side: Literal["left", "right"] = "right",
        device: torch.device | str | None = None,
    ) -> Layout:
        """One sequence a row of `t` columns, with `lengths` valid tokens each and padding on one `side`."""
        counts = torch.as_tensor(lengths, dtype=torch.long, device=device)
        if counts.ndim != 1 or bool((counts < 0).any()) or bool((counts > t).any()):
            raise UsageError(f"lengths must be one number from 0 to {t} for each row, got {counts.tolist()}")
        if side not in ("left", "right"):
            raise UsageError(f"side must be 'left' or 'right', got {side!r}")
        column = torch.arange(t, device=counts.device).expand(len(counts), t)
        positions = column if side == "right" else column - (t - counts[:, None])
        valid = (positions >= 0) & (positions < counts[:, None])
        rows = torch.arange(len(counts), device=counts.device)[:, None]
        return cls._resolve(torch.where(valid, rows, -1), positions, counts, t if side == "right" else None)

    @classmethod
    def packed(
        cls, cu_seqlens: Sequence[int] | Int[Tensor, " n1"], *, device: torch.device | str | None = None
    ) -> Layout:
        """A batch of one row in which sequence i occupies columns `cu_seqlens[i]` up to `cu_seqlens[i + 1]`.

        >>> Layout.packed([0, 3, 5]).positions.tolist()
        [[0, 1, 2, 0, 1]]
        """
        bounds = torch.as_tensor(cu_seqlens, dtype=torch.long, device=device)
        if bounds.ndim != 1 or len(bounds) < 2 or int(bounds[0]) != 0 or bool((bounds.diff() < 0).any()):
            raise UsageError(f"cu_seqlens must be sums that start at 0 and never fall, got {bounds.tolist()}")
        lengths = bounds.diff()
        sequences = torch.repeat_interleave(torch.arange(len(lengths), device=bounds.device), lengths)[None]
        positions = torch.arange(sequences.shape[1], device=bounds.device) - bounds[sequences]
        return cls._resolve(sequences, positions, lengths, None)

    @classmethod
    def segmented(cls, starts: Bool[Tensor, "b t"]) -> Layout:
        """A full batch in which a new sequence begins at the first column of each row and wherever `starts` is true.

        >>> Layout.segmented(torch.tensor([[False, False, True], [True, False, False]])).sequences.tolist()
        [[0, 0, 1], [2, 2, 2]]
        """
        begins = starts.clone()
        begins[:, :1] = True
        sequences = begins.flatten().cumsum(0).sub(1).view(begins.shape)
        lengths = torch.bincount(sequences.flatten())
        flat = torch.arange(begins.numel(), device=starts.device).view(begins.shape)
        return cls._resolve(sequences, flat - flat[begins][sequences], lengths, None)

    @classmethod
    def _resolve(
        cls, sequences: Int[Tensor, "b t"], positions: Int[Tensor, "b t"], lengths: Int[Tensor, " n"], span: int | None
    ) -> Layout:
        """Fill in what follows from the rest; `span` is given where the batch is the row form already."""
        valid = sequences >= 0
        index = None
        if span is None:
            span = max(min(1, sequences.numel()), int(lengths.max()) if len(lengths) else 0)
            index = sequences.new_zeros(len(lengths), span)
            index[sequences[valid], positions[valid]] = valid.flatten().nonzero().flatten()
        even = bool((lengths == span).all())
        return cls(sequences, positions.masked_fill(~valid, 0), valid, lengths, span, even, index)

    def check(self, x: Shaped[Tensor, "b t ..."]) -> None:
        """Refuse a batch of another shape than this layout was made for."""
        if x.shape[:2] != self.valid.shape:
            raise UsageError(f"the layout describes a batch of {list(self.valid.shape)}, got {list(x.shape[:2])}")
        if x.device != self.valid.device:
            raise UsageError(f"the layout is on {self.valid.device}, the batch on {x.device}: use layout.to(x.device)")

    def to(self, device: torch.device | str) -> Layout:
        """The same layout on another device."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    def rows(self, x: Shaped[Tensor, "b t ..."]) -> Shaped[Tensor, "n span ..."]:
        """The batch in row form, with zeros behind the end of a sequence; right padding stays as it is."""
        if self.index is None:
            return x
        beyond = torch.arange(self.span, device=x.device) >= self.lengths[:, None]
        return x.flatten(0, 1)[self.index].masked_fill(beyond.view(*beyond.shape, *[1] * (x.ndim - 2)), 0)

    def batch(self, x: Shaped[Tensor, "n span ..."]) -> Shaped[Tensor, "b t ..."]:
        """The row form back in its place in the batch; padding is zero."""
        if self.index is not None:
            x = x.flatten(0, 1)[self.sequences.clamp_min(0) * self.span + self.positions]
        return self.clean(x)

    def clean(self, x: Shaped[Tensor, "b t ..."]) -> Shaped[Tensor, "b t ..."]:
        """The batch with zeros at padding, whatever stood there."""
        return x.masked_fill(~self.valid.view(*self.valid.shape, *[1] * (x.ndim - 2)), 0)
