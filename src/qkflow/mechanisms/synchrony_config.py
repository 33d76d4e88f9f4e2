"""The options of attention on a group; `qkflow.mechanisms.synchrony` says what they do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from qkflow.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class SynchronyConfig:
    """The options of attention on a group. Each is an ablation of its own."""

    heads: int | None = None
    """Heads; `None` is half as many as the model says, whose points are twice as wide as its stream."""
    gate: Literal["complex", "content", "static", "off"] = "complex"
    """What weighs the similarity of each coordinate: see there."""
    temperature: Literal["learned", "fixed"] = "learned"
    """Whether each head learns how sharply it looks."""
    sharpness: float = 1.5
    """Spread of the scores of random elements, at the start."""
    step: Literal["coordinate", "head", "fixed"] = "coordinate"
    """What the step size is learned for."""
    step_size: float = 0.5
    """The step at the start."""
    values: Literal["phases", "projected"] = "phases"
    """What a token passes on: itself, or a projection (a control: then it is no Kuramoto coupling any more)."""
    frustrated: bool = False
    """Whether tokens are drawn to the successors of those they attend to, by a learned lag."""
    harmonics: int = 1
    """Harmonics of the coupling, on the torus; more than one need frustration."""
    strict: bool = True
    """Whether a token attends only to those before it, and not to itself."""
    rotary_base: float | None = 10000.0
    """Base of the drift's frequencies; `None` for no positions at all."""
    window: int | None = None
    """How many keys back a token sees; `None` is all the way."""

    def __post_init__(self) -> None:
        for name in ("sharpness", "step_size"):
            if not math.isfinite(value := getattr(self, name)):
                raise UsageError(f"{name} must be a finite number, got {value}")
        if self.heads is not None and self.heads < 1:
            raise UsageError(f"heads must be at least 1, got {self.heads}")
        if self.rotary_base is not None and not 0 < self.rotary_base < math.inf:
            raise UsageError(f"rotary_base must be a finite number above 0, or None, got {self.rotary_base}")
        if self.sharpness <= 0:
            raise UsageError(f"sharpness must be above 0, got {self.sharpness}")
        if self.window is not None and self.window < 1:
            raise UsageError(f"window must be at least 1, got {self.window}")
        if self.harmonics < 1 or (self.harmonics > 1 and not self.frustrated):
            raise UsageError(f"harmonics must be 1, or more with frustrated=True, got {self.harmonics}")
        if self.frustrated and not self.strict:
            raise UsageError("frustrated=True attends to those before a token: it needs strict=True")

    def heads_of(self, model: int) -> int:
        """The heads of a mechanism in a model that has so many.

        >>> SynchronyConfig().heads_of(4), SynchronyConfig(heads=4).heads_of(4), SynchronyConfig().heads_of(1)
        (2, 4, 1)
        """
        return max(1, model // 2) if self.heads is None else self.heads
