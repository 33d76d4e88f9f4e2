"""SU(2) as unit quaternions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from qkflow.ops import kuramoto
from qkflow.ops.groups.protocol import Algebra, Coordinates, Elements, EmbeddedGroup, unit


@dataclass(frozen=True)
class Quaternions(EmbeddedGroup):
    """SU(2), as unit quaternions w + x i + y j + z k.

    >>> i, j = torch.eye(4)[1], torch.eye(4)[2]
    >>> SU2.multiply(i, j).tolist()
    [0.0, 0.0, 0.0, 1.0]
    """

    name: str = "su2"
    size: int = 4
    ambient: int = 4
    dim: int = 3

    def points(self, x: Coordinates) -> Elements:
        """Normalized to unit length."""
        return unit(x)

    def tangent(self, g: Elements, m: Elements) -> Coordinates:
        """`m` minus its component along `g`."""
        return m - self.similarity(m, g).unsqueeze(-1) * g

    def push(self, g: Elements, a: Algebra) -> Coordinates:
        """`g` times the imaginary quaternion `a`."""
        return self.multiply(g, F.pad(a, (1, 0)))

    def multiply(self, g: Elements, h: Elements) -> Elements:
        """The Hamilton product."""
        a, b, c, d = g.unbind(-1)
        e, f, i, j = h.unbind(-1)
        product = (
            a * e - b * f - c * i - d * j,
            a * f + b * e + c * j - d * i,
            a * i - b * j + c * e + d * f,
            a * j + b * i - c * f + d * e,
        )
        return torch.stack(product, -1)

    def turn(self, angle: Float[Tensor, "*n"]) -> Elements:
        """Rotations about the first axis."""
        return F.pad(kuramoto.points(angle), (0, 2))

    def identity(self) -> Coordinates:
        """The quaternion 1."""
        return torch.eye(4)[0]

    def random(self, *shape: int, generator: torch.Generator | None = None) -> Coordinates:
        """Normalized Gaussian vectors."""
        return self.points(torch.randn(*shape, 4, generator=generator))

    def distance(self, g: Elements, h: Elements) -> Float[Tensor, "*n"]:
        """The angle on the sphere, from chords: the arc cosine would lose digits near 0."""
        return 2 * torch.atan2((g - h).norm(dim=-1), (g + h).norm(dim=-1))


SU2 = Quaternions()
