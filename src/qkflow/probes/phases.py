"""Which tokens synchronise: how far a model's phases are in step along its depth, in all, two by two, and in energy.

A layer is looked at three times: as it finds the tokens (`before`), as its attention has drawn them (`drawn`), and as
it leaves them (`after`), since its feed-forward network moves each token by itself. `qkflow.mechanisms.observed_phases`
says what the figures are. They tell what synchronises, not whether it helps: a comparison tells that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkflow.mechanisms.base import Mechanism, Stream
from qkflow.mechanisms.observed_phases import Elements, RowEnergy, elements, locking, order, pull
from qkflow.mechanisms.synchrony import SynchronyMechanism
from qkflow.models import Decoder
from qkflow.ops.groups import Group
from qkflow.probes.maps import read_inputs

When = Literal["before", "drawn", "after"]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two tokens of a text and how far they are in step, the mean over heads."""

    first: int
    """The position of the earlier one, from 0."""
    second: int
    """The position of the later one."""
    tokens: tuple[int, int]
    """What they are."""
    before: float
    """Their locking as the layer finds them."""
    after: float
    """Their locking as it leaves them."""


@dataclass(frozen=True, kw_only=True)
class PhaseSummary:
    """The phases of one layer on one text, in a few numbers."""

    group: str
    """Whose elements they are."""
    order: tuple[tuple[float, ...], ...]
    """The order parameter as the layer finds them: a row for each head, a number for each coordinate."""
    order_drawn: tuple[tuple[float, ...], ...]
    """As its attention has drawn them."""
    order_after: tuple[tuple[float, ...], ...]
    """As it leaves them."""
    locking_before: float
    """The mean over heads and pairs of two tokens, as the layer finds them."""
    locking_after: float
    """As it leaves them."""
    energy: RowEnergy
    """Of the rows, by head, with the layer's own map."""
    strongest: tuple[Pair, ...]
    """The pairs that are the most in step as the layer leaves them."""
    drawn_together: tuple[Pair, ...]
    """The pairs that it has brought into step the most."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PhaseLook:
    """The phases of one layer on one text."""

    tokens: tuple[int, ...]
    """The text."""
    group: Group
    """Whose elements the tokens are."""
    before: Elements
    """The elements as the layer finds them, as points in space, float64 on the CPU."""
    drawn: Elements
    """As its attention has drawn them."""
    after: Elements
    """As it leaves them."""
    energy: RowEnergy
    """Of the rows, by head, with the layer's own map: through its attention."""

    def order(self, at: When = "before") -> Float[Tensor, "h e"]:
        """The order parameter of each head and coordinate: 0 for elements all around, 1 for elements in step."""
        return order(getattr(self, at))

    def locking(self, at: When = "before") -> Float[Tensor, "h t u"]:
        """How far each two tokens are in step in each head: the mean over coordinates of a cosine, from -1 to 1."""
        return locking(getattr(self, at))

    def pairs(self, count: int = 5, *, by: Literal["locking", "change"] = "locking") -> tuple[Pair, ...]:
        """The pairs most in step as the layer leaves them, or those it has brought into step the most.

        Only pairs of different tokens: the same token is in step with itself from the start, by its embedding.
        """
        before, after = self.locking("before").mean(0), self.locking("after").mean(0)
        ids = torch.tensor(self.tokens)
        later, earlier = torch.tril_indices(len(ids), len(ids), -1)
        apart = ids[later] != ids[earlier]
        later, earlier = later[apart], earlier[apart]
        found = (after if by == "locking" else after - before)[later, earlier]
        best = found.argsort(descending=True, stable=True)[:count]
        return tuple(
            Pair(
                first=first,
                second=second,
                tokens=(self.tokens[first], self.tokens[second]),
                before=float(before[second, first]),
                after=float(after[second, first]),
            )
            for first, second in zip(earlier[best].tolist(), later[best].tolist(), strict=True)
        )

    def summary(self, pairs: int = 5) -> PhaseSummary:
        """Everything but the matrices, as plain data."""
        orders = {at: tuple(map(tuple, self.order(at).tolist())) for at in ("before", "drawn", "after")}
        return PhaseSummary(
            group=self.group.name,
            order=orders["before"],
            order_drawn=orders["drawn"],
            order_after=orders["after"],
            locking_before=_between(self.locking("before")),
            locking_after=_between(self.locking("after")),
            energy=self.energy,
            strongest=self.pairs(pairs),
            drawn_together=self.pairs(pairs, by="change"),
        )


def phases(model: Decoder, tokens: Sequence[int] | Int[Tensor, " t"]) -> list[PhaseLook | None]:
    """The phases of each layer on one text; `None` for a layer without any.

    >>> from qkflow.models import DecoderConfig
    >>> model = Decoder(DecoderConfig(width=32, layers=2, heads=4, hidden=64, mechanism="kuramoto"))
    >>> first, second = phases(model, [72, 105, 33])
    >>> first.order().shape, first.locking("after").shape, second.before is not None
    (torch.Size([2, 16]), torch.Size([2, 3, 3]), True)
    """
    left: list[Stream] = []

    def keep(_: nn.Module, __: tuple[Any, ...], made: tuple[Any, ...]) -> None:
        left.append(made[0])

    hooks = [block.register_forward_hook(keep) for block in model.blocks]
    try:
        found = read_inputs(model, tokens)
    finally:
        for hook in hooks:
            hook.remove()
    ids = tuple(torch.as_tensor(tokens).tolist())
    return [_look(layer, x, after, ids) for (layer, x), after in zip(found, left, strict=True)]


def _look(layer: Mechanism, x: Stream, after: Stream, tokens: tuple[int, ...]) -> PhaseLook | None:
    if not isinstance(layer, SynchronyMechanism):
        return None
    seen = pull(layer, x)
    return PhaseLook(
        tokens=tokens,
        group=layer.group,
        before=seen.before,
        drawn=seen.after,
        after=elements(layer, after),
        energy=seen.energy,
    )


def _between(by_head: Float[Tensor, "h t u"]) -> float:
    """The mean over pairs of two tokens; of a single token, not a number."""
    tokens = by_head.shape[1]
    later, earlier = torch.tril_indices(tokens, tokens, -1)
    return float(by_head[:, later, earlier].mean())
