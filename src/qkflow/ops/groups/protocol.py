"""What attention asks of a group, and what follows from a group's lying in space."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

Coordinates = Float[Tensor, "*n size"]
Elements = Float[Tensor, "*n ambient"]
Algebra = Float[Tensor, "*n dim"]


@runtime_checkable
class Group(Protocol):
    """What a group tells attention."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def size(self) -> int:
        """Numbers of the stream that hold an element."""
        ...

    @property
    def ambient(self) -> int:
        """Numbers of an element as a point in space."""
        ...

    @property
    def dim(self) -> int:
        """Directions an element can move in."""
        ...

    def points(self, x: Coordinates) -> Elements:
        """The elements that coordinates stand for; of any numbers, the nearest. Padding, zeros, is nobody's element."""
        ...

    def similarity(self, g: Elements, h: Elements) -> Float[Tensor, "*n"]:
        """How alike two elements are: the same after a translation of both."""
        ...

    def mean(self, g: Float[Tensor, "*n s ambient"], weights: Float[Tensor, "*n s"]) -> Elements:
        """The element nearest to a weighted sum."""
        ...

    def tangent(self, g: Elements, m: Elements) -> Coordinates:
        """The part of a point in space that lies along the group at `g`, as a change of coordinates."""
        ...

    def push(self, g: Elements, a: Algebra) -> Coordinates:
        """A motion of the group as a change of the coordinates at `g`."""
        ...

    def retract(self, x: Coordinates, change: Coordinates) -> Coordinates:
        """The coordinates after a change: an element again."""
        ...

    def multiply(self, g: Elements, h: Elements) -> Elements:
        """The product, linear in both, so that it also takes points in space."""
        ...

    def turn(self, angle: Float[Tensor, "*n"]) -> Elements:
        """A one-parameter subgroup: turns by two angles make the turn by their sum. It is what positions drift by."""
        ...

    def identity(self) -> Coordinates:
        """Coordinates of the element that multiplies as one."""
        ...

    def random(self, *shape: int, generator: torch.Generator | None = None) -> Coordinates:
        """Coordinates of elements drawn evenly from the group."""
        ...

    def distance(self, g: Elements, h: Elements) -> Float[Tensor, "*n"]:
        """The length of the shortest way between two elements."""
        ...


class Embedded:
    """What follows from a group's lying in space."""

    def similarity(self, g: Elements, h: Elements) -> Float[Tensor, "*n"]:
        """The dot product."""
        return (g * h).sum(-1)


def unit(x: Tensor) -> Tensor:
    """At unit length; zeros stay, and what is too short for its length to be a number stays shorter than that."""
    tiny = torch.finfo(x.dtype).tiny
    return F.normalize(x, dim=-1, eps=tiny if x.dtype == torch.float16 else tiny**0.5)
