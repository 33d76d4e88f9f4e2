r"""Compact groups behind one protocol, on which tokens can synchronize.

An element is a point of Euclidean space. Similarity is the dot product, which is invariant under translations of both
elements. A weighted mean is the element nearest to the weighted sum. The force on an element is the component of the
sum tangent to the group.

| group       | element            | coordinates    | similarity   | mean               | tangent at g         |
|-------------|--------------------|----------------|--------------|--------------------|----------------------|
| torus U(1)  | e^{i \theta}       | 1, the angle   | cos          | m / |m|            | Im(\bar g m)         |
| SU(2)       | unit quaternion    | 4              | <g, h>       | m / |m|            | m - <m, g> g         |
| SO(n)       | rotation matrix    | n^2            | tr(g^T h)    | polar factor of m  | g skew(g^T m)        |

The stream of a model holds coordinates: unwrapped angles, or the element itself. To add a group, write a class with the
methods of `Group` and test it with `check_axioms`.
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


def near_identity(group: Group, *shape: int, spread: float) -> Coordinates:
    """Random coordinates near the identity: normal displacements with standard deviation `spread` per direction.

    >>> near_identity(SU2, 5, spread=0.0).tolist() == [[1.0, 0.0, 0.0, 0.0]] * 5
    True
    """
    start = group.identity().expand(*shape, -1)
    return group.retract(start, group.push(group.points(start), spread * torch.randn(*shape, group.dim)))


def find_group(name: str) -> Group:
    """A group by name: torus, su2, so3, so4 and so on.

    >>> find_group("so4").size
    16
    """
    if name.startswith("so") and name[2:].isdecimal():
        return Rotations(int(name[2:]))
    known = {known.name: known for known in (TORUS, SU2)}
    if name not in known:
        raise unknown("group", name, [*known, "so3", "so4"])
    return known[name]
