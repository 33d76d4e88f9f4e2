"""Learning rates as pure functions of the step: what the optimiser's highest rate is multiplied by.

    warm-up    (s + 1) / w                                        s < w
    cosine     f + (1 - f) (1 + cos(pi p)) / 2,                   p = (s - w) / (n - w)
    stable     1 while n - s > d n,  then 1 - (1 - f) p,          p = 1 - (n - s) / (d n)

| symbol | here     | meaning                               |
|--------|----------|---------------------------------------|
| s      | `step`   | steps made so far, from 0             |
| n      | `steps`  | steps of the whole run                |
| w      | `warmup` | steps of warm-up                      |
| d      | `decay`  | part of the run that falls (`stable`) |
| f      | `floor`  | multiplier at the end                 |
"""

from __future__ import annotations

import math

from qkflow.training.config import TrainConfig


def warmup_cosine(step: int, *, steps: int, warmup: int, floor: float) -> float:
    """Linear warm-up, then half a cosine from 1 to `floor`.

    >>> [round(warmup_cosine(s, steps=6, warmup=2, floor=0.0), 3) for s in range(7)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2


def warmup_stable_decay(step: int, *, steps: int, warmup: int, decay: float, floor: float) -> float:
    """Linear warm-up, a plateau at 1, then a straight line to `floor` over the last `decay` of the steps.

    >>> [warmup_stable_decay(s, steps=8, warmup=2, decay=0.5, floor=0.0) for s in range(9)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if step < warmup:
        return (step + 1) / warmup
    falling = decay * steps
    left = max(0, steps - step)
    return 1.0 if left >= falling else floor + (1 - floor) * left / falling


def multiplier(config: TrainConfig, step: int) -> float:
    """The multiplier of `config.lr` for the step that comes after `step` steps."""
    warmup = min(100, config.steps // 10) if config.warmup is None else config.warmup
    if config.schedule == "cosine":
        return warmup_cosine(step, steps=config.steps, warmup=warmup, floor=config.floor)
    return warmup_stable_decay(step, steps=config.steps, warmup=warmup, decay=config.decay, floor=config.floor)
