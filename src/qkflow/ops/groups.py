r"""Compact groups behind one protocol: what attention needs to let tokens synchronise on any of them.

An element is a point of Euclidean space, where similarity is the dot product, invariant under translations of both. A
weighted mean is the sum's nearest element; what pulls an element is the part of the sum along the group.

| group       | element            | stream numbers | similarity   | mean               | tangent at g         |
|-------------|--------------------|----------------|--------------|--------------------|----------------------|
| torus U(1)  | e^{i \theta}       | 1, the angle   | cos          | m / |m|            | Im(\bar g m)         |
| SU(2)       | unit quaternion    | 4              | <g, h>       | m / |m|            | m - <m, g> g         |
| SO(n)       | rotation matrix    | n^2            | tr(g^T h)    | polar part of m    | g skew(g^T m)        |

The stream of a model holds coordinates: angles, unwrapped, or the element itself. A new group takes a class with these
methods, and `check` tries it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from qkflow.errors import NotFiniteError, UsageError, unknown
from qkflow.ops import kuramoto

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


class _Embedded:
    """What follows from a group's lying in space."""

    def similarity(self, g: Elements, h: Elements) -> Float[Tensor, "*n"]:
        """The dot product."""
        return (g * h).sum(-1)


@dataclass(frozen=True)
class Torus(_Embedded):
    """The circle U(1); several coordinates of it are a torus.

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
        return _unit(einsum(weights, g, "... s, ... s a -> ... a"))

    def tangent(self, g: Elements, m: Elements) -> Coordinates:
        """The sine of the angle to `m`, times its length."""
        return kuramoto.tangent(g, m).unsqueeze(-1)

    def push(self, g: Elements, a: Algebra) -> Coordinates:
        """An angle is a motion already."""
        return a

    def retract(self, x: Coordinates, change: Coordinates) -> Coordinates:
        """Angles add, unwrapped."""
        return x + change

    def multiply(self, g: Elements, h: Elements) -> Elements:
        """The product of complex numbers."""
        return kuramoto.turned(g, h)

    def turn(self, angle: Float[Tensor, "*n"]) -> Elements:
        """The whole group."""
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


@dataclass(frozen=True)
class Quaternions(_Embedded):
    """SU(2), as quaternions of unit length  w + x i + y j + z k.

    >>> i, j = torch.eye(4)[1], torch.eye(4)[2]
    >>> SU2.multiply(i, j).tolist()
    [0.0, 0.0, 0.0, 1.0]
    """

    name: str = "su2"
    size: int = 4
    ambient: int = 4
    dim: int = 3

    def points(self, x: Coordinates) -> Elements:
        """At unit length."""
        return _unit(x)

    def mean(self, g: Float[Tensor, "*n s ambient"], weights: Float[Tensor, "*n s"]) -> Elements:
        """The sum at unit length."""
        return self.points(einsum(weights, g, "... s, ... s a -> ... a"))

    def tangent(self, g: Elements, m: Elements) -> Coordinates:
        """What is left of `m` without its part along `g`."""
        return m - self.similarity(m, g).unsqueeze(-1) * g

    def push(self, g: Elements, a: Algebra) -> Coordinates:
        """`g` times an imaginary quaternion."""
        return self.multiply(g, F.pad(a, (1, 0)))

    def retract(self, x: Coordinates, change: Coordinates) -> Coordinates:
        """The sum at unit length."""
        return self.points(x + change)

    def multiply(self, g: Elements, h: Elements) -> Elements:
        """Hamilton's product."""
        a, b, c, d = g.unbind(-1)
        e, f, i, j = h.unbind(-1)
        parts = (
            a * e - b * f - c * i - d * j,
            a * f + b * e + c * j - d * i,
            a * i - b * j + c * e + d * f,
            a * j + b * i - c * f + d * e,
        )
        return torch.stack(parts, -1)

    def turn(self, angle: Float[Tensor, "*n"]) -> Elements:
        """Turns about the first axis."""
        return F.pad(kuramoto.points(angle), (0, 2))

    def identity(self) -> Coordinates:
        """The number 1."""
        return torch.eye(4)[0]

    def random(self, *shape: int, generator: torch.Generator | None = None) -> Coordinates:
        """Directions of normal vectors are even."""
        return self.points(torch.randn(*shape, 4, generator=generator))

    def distance(self, g: Elements, h: Elements) -> Float[Tensor, "*n"]:
        """The angle on the sphere, by half chords: a cosine near 1 has no digits left."""
        return 2 * torch.atan2((g - h).norm(dim=-1), (g + h).norm(dim=-1))


@dataclass(frozen=True)
class Rotations(_Embedded):
    """SO(n), as matrices, row by row.

    >>> SO3.points(torch.eye(3).flatten() * 2).tolist() == torch.eye(3).flatten().tolist()
    True
    """

    n: int = 3

    def __post_init__(self) -> None:
        if self.n < 2:
            raise UsageError(f"rotations need a space of at least 2 dimensions, got {self.n}")

    @property
    def name(self) -> str:
        """So and the number of dimensions."""
        return f"so{self.n}"

    @property
    def size(self) -> int:
        """The entries of the matrix."""
        return self.n**2

    @property
    def ambient(self) -> int:
        """The entries of the matrix."""
        return self.n**2

    @property
    def dim(self) -> int:
        """Planes to turn in."""
        return self.n * (self.n - 1) // 2

    def points(self, x: Coordinates) -> Elements:
        """The nearest rotation."""
        return _Polar.apply(self._matrix(x)).flatten(-2)

    def mean(self, g: Float[Tensor, "*n s ambient"], weights: Float[Tensor, "*n s"]) -> Elements:
        """The rotation nearest to the sum."""
        return self.points(einsum(weights, g, "... s, ... s a -> ... a"))

    def tangent(self, g: Elements, m: Elements) -> Coordinates:
        """`g` times the skew part of  g^T m."""
        g, seen = self._matrix(g), _times(self._matrix(g).mT, self._matrix(m))
        return _times(g, (seen - seen.mT) / 2).flatten(-2)

    def push(self, g: Elements, a: Algebra) -> Coordinates:
        """`g` times the skew matrix of `a`."""
        rows, columns = torch.triu_indices(self.n, self.n, 1, device=a.device).unbind(0)
        place = F.one_hot(rows * self.n + columns, self.n**2) - F.one_hot(columns * self.n + rows, self.n**2)
        skew = (a.unsqueeze(-1) * place.to(a.dtype)).sum(-2)
        return self.multiply(g, skew)

    def retract(self, x: Coordinates, change: Coordinates) -> Coordinates:
        """The rotation nearest to the sum."""
        return self.points(x + change)

    def multiply(self, g: Elements, h: Elements) -> Elements:
        """The product of matrices."""
        return _times(self._matrix(g), self._matrix(h)).flatten(-2)

    def turn(self, angle: Float[Tensor, "*n"]) -> Elements:
        """Turns in the planes of the first two axes, of the next two, and so on."""
        cos, sin = kuramoto.points(angle).unbind(-1)
        one, nothing, planes = torch.ones_like(cos), torch.zeros_like(cos), self.n // 2
        rows = []
        for row in range(self.n):
            entries = [nothing] * self.n
            entries[row] = cos if row < 2 * planes else one
            if row < 2 * planes:
                entries[row ^ 1] = -sin if row % 2 == 0 else sin
            rows += entries
        return torch.stack(rows, -1)

    def identity(self) -> Coordinates:
        """The unit matrix."""
        return torch.eye(self.n).flatten()

    def random(self, *shape: int, generator: torch.Generator | None = None) -> Coordinates:
        """The polar part of normal matrices is even."""
        return self.points(torch.randn(*shape, self.n**2, generator=generator))

    def distance(self, g: Elements, h: Elements) -> Float[Tensor, "*n"]:
        """The root of the squared angles, one a plane, that turn one into the other."""
        angles = torch.linalg.eigvals(_times(self._matrix(g).mT, self._matrix(h))).angle()
        return (angles.square().sum(-1) / 2).sqrt()

    def _matrix(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n, self.n))


class _Polar(torch.autograd.Function):
    r"""The rotation nearest to a matrix  M = U \Sigma V^\top,  R = U V^\top,  with signs such that det R = 1.

    dR = U ((U^\top dM V - V^\top dM^\top U)_{ij} / (\sigma_i + \sigma_j)) V^\top,  its own adjoint; torch's derivative
    of U and V apart divides by \sigma_i - \sigma_j, which is zero on the group itself. To be differentiated once more
    it is  R X  with  X P + P X = R^\top dM - dM^\top R,  P = R^\top M.
    """

    @staticmethod
    def forward(ctx: Any, m: Tensor) -> Tensor:
        wide = m.float() if m.dtype in (torch.bfloat16, torch.float16) else m
        try:
            u, s, vh = torch.linalg.svd(wide)
        except torch.linalg.LinAlgError as error:  # pyright: ignore[reportPrivateImportUsage]
            raise NotFiniteError("rotations must be finite numbers, got some that are not") from error
        flip = torch.ones_like(s)
        flip[..., -1] = (torch.linalg.det(u) * torch.linalg.det(vh)).sign()
        u, s = u * flip.unsqueeze(-2), s * flip
        ctx.save_for_backward(m, u, s, vh)
        return _times(u, vh).to(m.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        m, u, s, vh = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _polar_backward(m, grads[0])
        seen = _times(_times(u.mT, grads[0].to(u.dtype)), vh.mT)
        apart = (s.unsqueeze(-1) + s.unsqueeze(-2)).abs().clamp_min(torch.finfo(s.dtype).tiny)
        return _times(_times(u, (seen - seen.mT) / apart), vh).to(grads[0].dtype)


def _polar_backward(m: Tensor, grad: Tensor) -> Tensor:
    r = _Polar.apply(m)
    p, seen, one = _times(r.mT, m), _times(r.mT, grad), torch.eye(m.shape[-1], dtype=m.dtype, device=m.device)
    both = torch.einsum("...ik,jl->...ijkl", p, one) + torch.einsum("ik,...jl->...ijkl", one, p)
    x = torch.linalg.solve(both.flatten(-4, -3).flatten(-2), (seen - seen.mT).flatten(-2))
    return _times(r, x.unflatten(-1, m.shape[-2:]))


def _unit(x: Tensor) -> Tensor:
    """At unit length; zeros stay, and what is too short for its length to be a number stays shorter than that."""
    tiny = torch.finfo(x.dtype).tiny
    return F.normalize(x, dim=-1, eps=tiny if x.dtype == torch.float16 else tiny**0.5)


def _times(a: Tensor, b: Tensor) -> Tensor:
    """The product of many small matrices: for these a sum is faster than a call for each."""
    return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)


TORUS, SU2, SO3 = Torus(), Quaternions(), Rotations(3)


def near_identity(on: Group, *shape: int, spread: float) -> Coordinates:
    """Coordinates of elements a normal motion away from the identity, so far in each direction as `spread` says.

    >>> near_identity(SU2, 5, spread=0.0).tolist() == [[1.0, 0.0, 0.0, 0.0]] * 5
    True
    """
    start = on.identity().expand(*shape, -1)
    return on.retract(start, on.push(on.points(start), spread * torch.randn(*shape, on.dim)))


def group(name: str) -> Group:
    """A group by name: torus, su2, so3, and so on.

    >>> group("so4").size
    16
    """
    if name.startswith("so") and name[2:].isdecimal():
        return Rotations(int(name[2:]))
    known = {known.name: known for known in (TORUS, SU2)}
    if name not in known:
        raise unknown("group", name, [*known, "so3", "so4"])
    return known[name]


def check(tried: Group) -> None:
    """Refuse a group that does not keep its promises, with the first that it breaks; random elements try them."""
    missing = [name for name in _PROMISED if not hasattr(tried, name)]
    if missing:
        raise UsageError(f"{type(tried).__name__} is no group: it has no {', '.join(missing)}")
    generator = torch.Generator().manual_seed(0)
    try:
        broken = _broken(tried, [tried.random(3, generator=generator).double() for _ in range(3)])
    except UsageError:
        raise
    except Exception as error:  # whatever someone's group throws
        first = (str(error).splitlines() or [""])[0]
        raise UsageError(f"group {tried.name!r} fails: {type(error).__name__}: {first}") from error
    if broken:
        raise UsageError(f"group {tried.name!r} breaks its protocol: {broken}")


_PROMISED = tuple(name for name in vars(Group) if not name.startswith("_"))
_NEAR = 1e-5
"""How near an equation must come to being one: random elements are made in float32."""
_SHORT = 1e-4


def _moved(tried: Group, x: Tensor, change: Tensor) -> Tensor:
    """How elements begin to move in space when their coordinates change."""
    ahead, behind = (tried.points(tried.retract(x, s * change)) for s in (_SHORT, -_SHORT))
    return (ahead - behind) / (2 * _SHORT)


def _broken(tried: Group, coordinates: list[Tensor]) -> str | None:
    """The first promise that is broken."""
    x = coordinates[0]
    if x.shape != (3, tried.size):
        return f"random(3) must be {[3, tried.size]}, got {[*x.shape]}"
    g, h, c = map(tried.points, coordinates)
    if g.shape != (3, tried.ambient):
        return f"points(x) must be finite numbers of shape {[3, tried.ambient]}, got {[*g.shape]}"
    zero, away, sum_ = torch.zeros_like(x), 0.1 * torch.ones(3, tried.dim, dtype=x.dtype), g + 0.5 * h
    shapes = {
        "points(x)": (g, (3, tried.ambient)),
        "similarity(g, h)": (tried.similarity(g, h), (3,)),
        "mean(g, weights)": (tried.mean(torch.stack([g, h], -2), x.new_tensor([0.7, 0.3]).expand(3, 2)), g.shape),
        "tangent(g, m)": (tried.tangent(g, sum_), x.shape),
        "push(g, a)": (tried.push(g, away), x.shape),
        "retract(x, v)": (tried.retract(x, tried.push(g, away)), x.shape),
        "multiply(g, h)": (tried.multiply(g, h), g.shape),
        "turn(angle)": (tried.turn(x.new_tensor([0.1, 0.2, 0.3])), (3, tried.ambient)),
        "distance(g, h)": (tried.distance(g, h), (3,)),
    }
    for what, (got, want) in shapes.items():
        if got.shape != torch.Size(want) or not bool(got.isfinite().all()):
            return f"{what} must be finite numbers of shape {[*want]}, got {[*got.shape]}"
    mean, one = shapes["mean(g, weights)"][0], tried.points(tried.identity().to(x))
    left, motion = sum_ - _moved(tried, x, tried.tangent(g, sum_)), _moved(tried, x, tried.push(g, away))
    equations = {
        "similarity must not change when both are translated": (
            tried.similarity(tried.multiply(c, g), tried.multiply(c, h)),
            tried.similarity(g, h),
        ),
        "similarity must be the dot product of points": (tried.similarity(g, h), (g * h).sum(-1)),
        "a mean must be an element": (tried.similarity(mean, mean), tried.similarity(g, g)),
        "a product must be an element": (
            tried.similarity(tried.multiply(g, h), tried.multiply(g, h)),
            tried.similarity(g, g),
        ),
        "an element must be drawn to itself by nothing": (tried.tangent(g, g), zero),
        "no change must be no change": (tried.points(tried.retract(x, zero)), g),
        "what draws an element must be the part along the group": ((left * motion).sum(-1), zero.sum(-1)),
        "the identity must change nothing": (tried.multiply(one.expand_as(g), g), g),
        "turns must add up": (tried.multiply(*tried.turn(x.new_tensor([0.1, 0.2]))), tried.turn(x.new_tensor(0.3))),
        "an element must be at no distance from itself": (tried.distance(g, g), zero.sum(-1)),
    }
    for promise, (got, want) in equations.items():
        if not bool(((got - want).abs() < _NEAR).all()):
            return promise
    return None
