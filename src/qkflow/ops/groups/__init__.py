r"""Compact groups behind one protocol: what attention needs to let tokens synchronise on any of them.

An element is a point of Euclidean space, where similarity is the dot product, invariant under translations of both. A
weighted mean is the sum's nearest element; what pulls an element is the part of the sum along the group.

| group       | element            | stream numbers | similarity   | mean               | tangent at g         |
|-------------|--------------------|----------------|--------------|--------------------|----------------------|
| torus U(1)  | e^{i \theta}       | 1, the angle   | cos          | m / |m|            | Im(\bar g m)         |
| SU(2)       | unit quaternion    | 4              | <g, h>       | m / |m|            | m - <m, g> g         |
| SO(n)       | rotation matrix    | n^2            | tr(g^T h)    | polar part of m    | g skew(g^T m)        |

The stream of a model holds coordinates: angles, unwrapped, or the element itself. A new group takes a class with these
methods, and `check_axioms` tries it.
"""

from __future__ import annotations

import torch

from qkflow.errors import unknown
from qkflow.ops.groups.axioms import check_axioms
from qkflow.ops.groups.protocol import Coordinates, Elements, Group
from qkflow.ops.groups.quaternions import SU2, Quaternions
from qkflow.ops.groups.rotations import SO3, Rotations
from qkflow.ops.groups.torus import TORUS, Torus

__all__ = [
    "SO3",
    "SU2",
    "TORUS",
    "Coordinates",
    "Elements",
    "Group",
    "Quaternions",
    "Rotations",
    "Torus",
    "check_axioms",
    "find_group",
    "near_identity",
]


def near_identity(on: Group, *shape: int, spread: float) -> Coordinates:
    """Coordinates of elements a normal motion away from the identity, so far in each direction as `spread` says.

    >>> near_identity(SU2, 5, spread=0.0).tolist() == [[1.0, 0.0, 0.0, 0.0]] * 5
    True
    """
    start = on.identity().expand(*shape, -1)
    return on.retract(start, on.push(on.points(start), spread * torch.randn(*shape, on.dim)))


def find_group(name: str) -> Group:
    """A group by name: torus, su2, so3, and so on.

    >>> find_group("so4").size
    16
    """
    if name.startswith("so") and name[2:].isdecimal():
        return Rotations(int(name[2:]))
    known = {known.name: known for known in (TORUS, SU2)}
    if name not in known:
        raise unknown("group", name, [*known, "so3", "so4"])
    return known[name]
