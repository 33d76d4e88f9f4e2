"""What a paper claims besides the loss: how one arm compares with another in spread over seeds, or in time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qkflow.experiment.stats.paired import spread_ratio
from qkflow.experiment.summary import ArmSummary, ExperimentResult

Quantity = Literal["variance over seeds", "seconds a token"]


@dataclass(frozen=True, kw_only=True)
class PublishedRatio:
    """A published ratio of two arms."""

    quantity: Quantity
    """Of what; the variance is that of the held-out loss, the square of the standard deviation that studies show."""
    arm: str
    """The arm above the line."""
    against: str
    """The arm below it."""
    published: float
    """Arm over the other."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRatio:
    """The same of a study."""

    value: float
    low: float | None
    """Lower end of its interval; None where there is none."""
    high: float | None
    """Upper end."""


def measured(ratio: PublishedRatio, summary: ExperimentResult) -> MeasuredRatio | None:
    """What a study found of a ratio; None where its runs do not tell.

    A variance has an interval from three seeds on, at the level of the study's own intervals. A time has none: it is
    that of one machine.
    """
    arms = {arm.name: arm for arm in summary.arms}
    arm, against = arms[ratio.arm], arms[ratio.against]
    if ratio.quantity == "variance over seeds":
        return _variances(arm, against, level=1 - summary.error_rate)
    if not arm.tokens_per_second or not against.tokens_per_second:
        return None
    return MeasuredRatio(value=against.tokens_per_second / arm.tokens_per_second, low=None, high=None)


def _variances(arm: ArmSummary, against: ArmSummary, *, level: float) -> MeasuredRatio | None:
    ours, theirs = (dict(zip(one.seeds, one.bits_per_byte, strict=True)) for one in (arm, against))
    shared = sorted(ours.keys() & theirs.keys())
    found = spread_ratio([ours[seed] for seed in shared], [theirs[seed] for seed in shared], level=level)
    if found is None:
        return None
    low, high = (None if end is None else end**2 for end in (found.low, found.high))
    return MeasuredRatio(value=found.ratio**2, low=low, high=high)
