"""Schedules of the ratio r between the QK learning rate and that of all other parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from qkflow.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class RatioSchedule:
    """A constant or linear schedule of the learning-rate ratio r.

        r(s) = start + (end - start) s / n          after s of n steps

    >>> growth = RatioSchedule(start=1.0, end=40.0)
    >>> growth.at(0, 100), growth.at(50, 100), growth.at(100, 100)
    (1.0, 20.5, 40.0)
    >>> RatioSchedule(start=20.0).at(50, 100)
    20.0
    """

    start: float = 1.0
    """Ratio at the first step."""
    end: float | None = None
    """Ratio after the last step; None keeps it constant."""

    def __post_init__(self) -> None:
        for name, value in (("r", self.start), ("growth", self.end)):
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{name} must be a finite number above 0, got {value:g}")

    def at(self, step: int, steps: int) -> float:
        """Return the ratio after `step` of `steps` steps."""
        if steps < 1:
            raise UsageError(f"steps must be at least 1, got {steps}")
        if self.end is None:
            return self.start
        return self.start + (self.end - self.start) * min(max(step, 0), steps) / steps

    @property
    def is_identity(self) -> bool:
        """Whether the ratio is 1 throughout."""
        return self.start == 1 and self.end in (None, 1)


def circuit_lambdas(
    groups: Sequence[dict[str, Any]], r: Callable[[int], float], base: Callable[[int], float] = lambda step: 1.0
) -> list[Callable[[int], float]]:
    """Return one factor per parameter group for `torch.optim.lr_scheduler.LambdaLR`.

        OV, rest:  lr * base(s)          QK:  lr * base(s) * r(s)

    `r(s)` replaces the constant ratio passed to `circuit_groups`, which is divided out.

    >>> import torch
    >>> from qkflow.circuits import circuit_groups
    >>> warmup, steps, growth = 10, 100, RatioSchedule(start=1.0, end=40.0)
    >>> def warmup_cosine(step):
    ...     return min(1.0, (step + 1) / warmup) * (1 + math.cos(math.pi * step / steps)) / 2
    >>> groups = circuit_groups(torch.nn.MultiheadAttention(4, 2), lr=1e-3)
    >>> optimizer = torch.optim.AdamW(groups)
    >>> lambdas = circuit_lambdas(groups, lambda step: growth.at(step, steps), warmup_cosine)
    >>> scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambdas)
    >>> for _ in range(50):
    ...     optimizer.step()
    ...     scheduler.step()
    >>> [(group["circuit"], round(group["lr"], 6)) for group in optimizer.param_groups]
    [('qk', 0.01025), ('ov', 0.0005)]
    """

    def qk_factor(constant_r: float) -> Callable[[int], float]:
        return lambda step: base(step) * (r(step) / constant_r)

    return [qk_factor(group.get("r", 1.0)) if group.get("circuit") == "qk" else base for group in groups]
