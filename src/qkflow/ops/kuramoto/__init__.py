"""Kuramoto attention: phases on the torus that synchronize."""

from qkflow.ops.kuramoto.fused import harmonics, phase_increment, points, rotate_points, shift_points, tangent
from qkflow.ops.kuramoto.naive import coupling, energy, order_parameter

__all__ = [
    "coupling",
    "energy",
    "harmonics",
    "order_parameter",
    "phase_increment",
    "points",
    "rotate_points",
    "shift_points",
    "tangent",
]
