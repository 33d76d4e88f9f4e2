"""The circle and the torus, in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from qkflow.ops import kuramoto
from qkflow.ops.groups.protocol import Algebra, Coordinates, Elements, EmbeddedGroup, unit


@dataclass(frozen=True)
class Torus(EmbeddedGroup):
    """The circle U(1); several coordinates form a torus.

    >>> theta = torch.tensor([[0.1], [0.5]])
    >>> TORUS.distance(*TORUS.points(theta)).item()
    0.4000000059604645
    """

    name: str = "torus"
    size: int = 1
    ambient: int = 2
    dim: int = 1

    def points(self, x: Coordinates) -> Elements:
        """Cosine and sine."""
        return kuramoto.points(x.squeeze(-1))

    def mean(self, g: Float[Tensor, "*n s ambient"], weights: Float[Tensor, "*n s"]) -> Elements:
        """The circular mean."""
        return unit(einsum(weights, g, "... s, ... s a -> ... a"))

    def tangent(self, g: Elements, m: Elements) -> Coordinates:
        """The sine of the angle to `m`, times the length of `m`."""
        return kuramoto.tangent(g, m).unsqueeze(-1)

    def push(self, g: Elements, a: Algebra) -> Coordinates:
        """The angle itself."""
        return a

    def retract(self, x: Coordinates, change: Coordinates) -> Coordinates:
        """The sum of the angles, unwrapped."""
        return x + change

    def multiply(self, g: Elements, h: Elements) -> Elements:
        """The complex product."""
        return kuramoto.rotate_points(g, h)

    def turn(self, angle: Float[Tensor, "*n"]) -> Elements:
        """Rotation by an angle."""
        return kuramoto.points(angle)

    def identity(self) -> Coordinates:
        """The angle 0."""
        return torch.zeros(1)

    def random(self, *shape: int, generator: torch.Generator | None = None) -> Coordinates:
        """Angles from -pi to pi."""
        return torch.empty(*shape, 1).uniform_(-math.pi, math.pi, generator=generator)

    def distance(self, g: Elements, h: Elements) -> Float[Tensor, "*n"]:
        """The angle between them."""
        return torch.atan2(kuramoto.tangent(g, h), self.similarity(g, h)).abs()


TORUS = Torus()
