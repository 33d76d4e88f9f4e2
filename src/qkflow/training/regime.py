"""Default hyperparameters of a language model, as functions of its size and training tokens.

They come from the experiments in docs/results/regime.md: at a fixed number of training tokens, small batches and Muon
lower the loss far more than any mechanism does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

OptimizerName = Literal["adamw", "muon"]

STEPS = 2000
"""Steps that a run should have, if its tokens allow it; the batch size follows from this."""
SMALLEST_BATCH, LARGEST_BATCH = 4, 64

_RATES: dict[OptimizerName, float] = {"adamw": 2.5e-3, "muon": 5e-3}
"""Peak learning rates of standard attention with 100k parameters and 4 sequences per step."""
_SIZE_EXPONENT = 0.25
"""The learning rate falls with the number of parameters to this power."""
_RATE_FACTORS = {"coupled": 1.5, "differential": 1.5, "kuramoto": 0.5}
"""The learning rate of other mechanisms, as a multiple of that of standard attention."""
_HALF_LIFE = 200_000
"""Tokens over which AdamW's average of squared gradients halves its memory."""


@dataclass(frozen=True, kw_only=True)
class Regime:
    """Hyperparameters of a run."""

    optimizer: OptimizerName
    batch: int
    """Sequences per step."""
    lr: float
    """Peak learning rate."""
    betas: tuple[float, float]
    """AdamW's betas."""
    decay: float = 0.6
    """The last fraction of a run, over which the learning rate decays linearly."""
    floor: float = 0.0
    """The final learning rate, as a fraction of the peak."""


def default_batch(tokens: int | float, context: int) -> int:
    """The batch size of a run with this many training tokens: a power of 2 that gives about `STEPS` steps or more.

    >>> default_batch(1e6, 128), default_batch(1e7, 256)
    (4, 16)
    """
    fitting = max(1.0, tokens / (context * STEPS))
    return min(LARGEST_BATCH, max(SMALLEST_BATCH, 2 ** int(math.log2(fitting))))


def default_regime(
    *, parameters: int, batch: int, context: int, mechanism: str = "standard", optimizer: OptimizerName = "muon"
) -> Regime:
    """The defaults for a model with this many parameters.

    >>> regime = default_regime(parameters=100_000, batch=4, context=128)
    >>> regime.lr, regime.betas[1]
    (0.005, 0.99823)
    """
    family = mechanism.partition(":")[0]
    rate = _RATES[optimizer] * (100_000 / parameters) ** _SIZE_EXPONENT * math.sqrt(batch / SMALLEST_BATCH)
    rate *= _RATE_FACTORS.get(family, _RATE_FACTORS.get(family.partition("+")[0], 1.0))
    beta2 = 0.5 ** (batch * context / _HALF_LIFE)
    return Regime(optimizer=optimizer, batch=batch, lr=float(f"{rate:.1e}"), betas=(0.9, round(beta2, 5)))
