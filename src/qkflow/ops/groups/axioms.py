"""Whether a group keeps its promises, tried on random elements."""

from __future__ import annotations

import torch
from torch import Tensor

from qkflow.errors import UsageError
from qkflow.ops.groups.protocol import Group


def check_axioms(tried: Group) -> None:
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
