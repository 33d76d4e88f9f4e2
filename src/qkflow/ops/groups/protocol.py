"""The protocol of a group, and the methods that all embedded groups share."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from einops import einsum
from jaxtyping import Float
from torch import Tensor

Coordinates = Float[Tensor, "*n size"]
Elements = Float[Tensor, "*n ambient"]
Algebra = Float[Tensor, "*n dim"]


@runtime_checkable
class Group(Protocol):
    """A compact group embedded in Euclidean space. `check_axioms` tests an implementation."""

    @property
    def name(self) -> str:
        """Name in configs, for example `su2`."""
        ...

    @property
    def size(self) -> int:
        """Number of coordinates per element in the stream."""
        ...

    @property
    def ambient(self) -> int:
        """Dimension of the Euclidean space."""
        ...

    @property
    def dim(self) -> int:
        """Dimension of the group."""
        ...

    def points(self, x: Coordinates) -> Elements:
        """The elements nearest to the coordinates. Zeros are padding and need not give an element."""
        ...

    def similarity(self, g: Elements, h: Elements) -> Float[Tensor, "*n"]:
        """Similarity, invariant under translation of both elements."""
        ...

    def mean(self, g: Float[Tensor, "*n s ambient"], weights: Float[Tensor, "*n s"]) -> Elements:
        """The element nearest to the weighted sum."""
        ...

    def tangent(self, g: Elements, m: Elements) -> Coordinates:
        """The component of a point tangent to the group at `g`, as a change of coordinates."""
        ...

    def push(self, g: Elements, a: Algebra) -> Coordinates:
        """A Lie algebra element as a change of coordinates at `g`."""
        ...

    def retract(self, x: Coordinates, change: Coordinates) -> Coordinates:
        """The coordinates after a change, projected back to the group."""
        ...

    def multiply(self, g: Elements, h: Elements) -> Elements:
        """The group product, extended bilinearly to points of the Euclidean space."""
        ...

    def turn(self, angle: Float[Tensor, "*n"]) -> Elements:
        """The element of a one-parameter subgroup, so that angles add. Positions rotate by it."""
        ...

    def identity(self) -> Coordinates:
        """Coordinates of the identity."""
        ...

    def random(self, *shape: int, generator: torch.Generator | None = None) -> Coordinates:
        """Coordinates of elements drawn from the Haar measure."""
        ...

    def distance(self, g: Elements, h: Elements) -> Float[Tensor, "*n"]:
        """The geodesic distance of two elements."""
        ...


class EmbeddedGroup:
    """Methods that follow from the embedding, for groups whose coordinates are the element itself."""

    def points(self, x: Coordinates) -> Elements:
        """The elements nearest to the coordinates."""
        raise NotImplementedError

    def similarity(self, g: Elements, h: Elements) -> Float[Tensor, "*n"]:
        """The dot product."""
        return (g * h).sum(-1)

    def mean(self, g: Float[Tensor, "*n s ambient"], weights: Float[Tensor, "*n s"]) -> Elements:
        """The element nearest to the weighted sum."""
        return self.points(einsum(weights, g, "... s, ... s a -> ... a"))

    def retract(self, x: Coordinates, change: Coordinates) -> Coordinates:
        """The element nearest to the sum."""
        return self.points(x + change)


def unit(x: Tensor) -> Tensor:
    """Normalize to unit length; zeros and vectors too short to normalize stay short."""
    tiny = torch.finfo(x.dtype).tiny
    return F.normalize(x, dim=-1, eps=tiny if x.dtype == torch.float16 else tiny**0.5)
