"""What the delta rule is given, whichever form computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

WIDEST = 256
"""The widest heads of keys. Values may be of any width: rows of the memory do not see each other."""

Keys = Float[Tensor, "n t h k"]
Values = Float[Tensor, "n t h v"]
Gates = Float[Tensor, "n t h"]
Memories = Float[Tensor, "n h v k"]


class Inputs(NamedTuple):
    """Queries, keys and values of every token and head, and the gates between them."""

    q: Keys
    k: Keys
    v: Values
    beta: Gates
    """How much of its error a token corrects."""
    log_alpha: Gates | None
    """How much is kept from token to token; None is all of it."""
    lam: Gates | None
    """How much of the query a token corrects for; None is nothing."""

    def map(self, f: Callable[[Tensor], Tensor]) -> Inputs:
        """The same with `f` over all that is there."""
        return Inputs(*(x if x is None else f(x) for x in self))  # pyright: ignore[reportArgumentType]
