"""Tests that a group satisfies the axioms that attention relies on."""

from __future__ import annotations

import torch
from torch import Tensor

from qkflow.errors import UsageError
from qkflow.ops.groups.protocol import Group


def check_axioms(group: Group) -> None:
    """Raise with the first axiom that the group violates, tested on random elements."""
    missing = [name for name in _METHODS if not hasattr(group, name)]
    if missing:
        raise UsageError(f"{type(group).__name__} is not a group: it has no {', '.join(missing)}")
    generator = torch.Generator().manual_seed(0)
    try:
        violated = _first_violation(group, [group.random(3, generator=generator).double() for _ in range(3)])
    except UsageError:
        raise
    except Exception as error:  # a custom group may raise anything
        first = (str(error).splitlines() or [""])[0]
        raise UsageError(f"group {group.name!r} fails: {type(error).__name__}: {first}") from error
    if violated:
        raise UsageError(f"group {group.name!r} violates an axiom: {violated}")


_METHODS = tuple(name for name in vars(Group) if not name.startswith("_"))
_TOLERANCE = 1e-5
"""Random elements are float32."""
_STEP = 1e-4
"""Step of finite differences."""


def _velocity(group: Group, x: Tensor, change: Tensor) -> Tensor:
    """The derivative of the points along a change of coordinates, by central differences."""
    forward, backward = (group.points(group.retract(x, s * change)) for s in (_STEP, -_STEP))
    return (forward - backward) / (2 * _STEP)


def _first_violation(group: Group, coordinates: list[Tensor]) -> str | None:
    x = coordinates[0]
    if x.shape != (3, group.size):
        return f"random(3) must be {[3, group.size]}, got {[*x.shape]}"
    g, h, c = map(group.points, coordinates)
    if g.shape != (3, group.ambient):
        return f"points(x) must be finite and of shape {[3, group.ambient]}, got {[*g.shape]}"
    zero, algebra, sum_ = torch.zeros_like(x), 0.1 * torch.ones(3, group.dim, dtype=x.dtype), g + 0.5 * h
    shapes = {
        "points(x)": (g, (3, group.ambient)),
        "similarity(g, h)": (group.similarity(g, h), (3,)),
        "mean(g, weights)": (group.mean(torch.stack([g, h], -2), x.new_tensor([0.7, 0.3]).expand(3, 2)), g.shape),
        "tangent(g, m)": (group.tangent(g, sum_), x.shape),
        "push(g, a)": (group.push(g, algebra), x.shape),
        "retract(x, v)": (group.retract(x, group.push(g, algebra)), x.shape),
        "multiply(g, h)": (group.multiply(g, h), g.shape),
        "turn(angle)": (group.turn(x.new_tensor([0.1, 0.2, 0.3])), (3, group.ambient)),
        "distance(g, h)": (group.distance(g, h), (3,)),
    }
    for call, (actual, shape) in shapes.items():
        if actual.shape != torch.Size(shape) or not bool(actual.isfinite().all()):
            return f"{call} must be finite and of shape {[*shape]}, got {[*actual.shape]}"
    mean, identity = shapes["mean(g, weights)"][0], group.points(group.identity().to(x))
    normal, motion = sum_ - _velocity(group, x, group.tangent(g, sum_)), _velocity(group, x, group.push(g, algebra))
    equations = {
        "similarity must be invariant under translation of both elements": (
            group.similarity(group.multiply(c, g), group.multiply(c, h)),
            group.similarity(g, h),
        ),
        "similarity must be the dot product of points": (group.similarity(g, h), (g * h).sum(-1)),
        "a mean must be an element": (group.similarity(mean, mean), group.similarity(g, g)),
        "a product must be an element": (
            group.similarity(group.multiply(g, h), group.multiply(g, h)),
            group.similarity(g, g),
        ),
        "tangent(g, g) must be zero": (group.tangent(g, g), zero),
        "retract(x, 0) must be x": (group.points(group.retract(x, zero)), g),
        "tangent(g, m) must be the component of m along the group": ((normal * motion).sum(-1), zero.sum(-1)),
        "the identity times g must be g": (group.multiply(identity.expand_as(g), g), g),
        "turn(a) times turn(b) must be turn(a + b)": (
            group.multiply(*group.turn(x.new_tensor([0.1, 0.2]))),
            group.turn(x.new_tensor(0.3)),
        ),
        "the distance of an element to itself must be zero": (group.distance(g, g), zero.sum(-1)),
    }
    for axiom, (actual, expected) in equations.items():
        if not bool(((actual - expected).abs() < _TOLERANCE).all()):
            return axiom
    return None
