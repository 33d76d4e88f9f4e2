"""What a circuit is made of: parameters, and slices of parameters that several matrices share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Circuit = Literal["qk", "ov", "rest"]
"""Where to look; what to pass on; everything else."""


@dataclass(frozen=True, kw_only=True)
class ParamSlice:
    """A parameter, or a slice of one, that belongs to a circuit.

    >>> ParamSlice(name="attn.c_attn.weight", dim=1, start=0, stop=64, matrix="query").whole
    False
    """

    name: str
    """The parameter, as in `model.named_parameters()`."""
    dim: int | None = None
    """None: all of it. Else only `start` up to `stop` along this dimension."""
    start: int = 0
    """The first row of the slice."""
    stop: int = 0
    """The row after its last."""
    matrix: str = ""
    """Which of the matrices in a fused parameter this is a piece of: pieces of one matrix learn as one parameter."""

    @property
    def whole(self) -> bool:
        """Whether the parameter is of this circuit entirely."""
        return self.dim is None

    def overlaps(self, other: ParamSlice) -> bool:
        """Whether the two have an element in common; slices along different dimensions always have.

        >>> ParamSlice(name="w", dim=0, start=0, stop=4).overlaps(ParamSlice(name="w", dim=0, start=4, stop=6))
        False
        """
        if self.name != other.name:
            return False
        if self.dim is None or self.dim != other.dim:
            return True
        return other.dim is None or (self.start < other.stop and other.start < self.stop)
