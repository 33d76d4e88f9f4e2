"""What the gates of the delta rule may be."""

from __future__ import annotations

import math

from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from qkflow.errors import NotFiniteError, UsageError

STRONGEST = 2.0
"""The largest beta: beyond it a unit key is overwritten by more than twice its error, and no memory is stable."""


def check_gates(beta: Tensor, log_alpha: Tensor | None, lam: Tensor | None) -> None:
    """Refuse gates out of range; left out where they have no numbers, and on a device that one would wait for."""
    if beta.device.type != "cpu" or is_fake(beta):
        return
    for name, gate, low, high, bounds in (
        ("beta", beta, 0.0, STRONGEST, f"from 0 to {STRONGEST:g}"),
        ("log_alpha", log_alpha, -math.inf, 0.0, "finite and at most 0"),
        ("lam", lam, -math.inf, math.inf, "finite"),
    ):
        if gate is None or not gate.numel():
            continue
        least, most = (float(x) for x in gate.detach().aminmax())
        finite = math.isfinite(least) and math.isfinite(most)
        if not (finite and low <= least and most <= high):
            raise (UsageError if finite else NotFiniteError)(
                f"{name} must be {bounds}, got values from {least:g} to {most:g}"
            )
