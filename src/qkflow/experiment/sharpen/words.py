"""What a study of sharper attention says, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from qkflow.experiment.metrics.rationale import MetricChange, RationaleArm


def answer(task: str, arms: Sequence[RationaleArm], changes: Sequence[MetricChange], level: float) -> str:
    """A sentence for each arm but the first: what it does to attention, and what that costs."""
    told = [_told(arm, changes, level) for arm in arms[1:]]
    return f"On {task}, against {arms[0].name}: " + "; ".join(told) + "."


def _told(arm: RationaleArm, changes: Sequence[MetricChange], level: float) -> str:
    found = {change.metric: change for change in changes if change.arm == arm.name}
    if "performance" not in found:
        return f"{arm.name} has no finished pair of runs"
    parts = [
        _effect(found["performance"], level, ("performs better", "performs worse", "no change of performance seen"))
    ]
    if "mass" in found:
        sharper = _effect(found["mass"], level, ("is sharper", "is blunter", "no change of attention mass seen"))
        parts.insert(0, f"{arm.name} {sharper}" if sharper.startswith("is") else f"{arm.name}: {sharper}")
    else:
        parts[0] = f"{arm.name}: {parts[0]}"
    return ", ".join(parts)


def _effect(change: MetricChange, level: float, words: tuple[str, str, str]) -> str:
    """What a difference comes to, with its interval in points of a hundred."""
    points = f"{100 * change.mean:+.1f} points"
    if change.low is None or change.high is None:
        return f"one seed cannot tell ({points})"
    decided = change.p_holm is not None and change.p_holm < 1 - level
    word = words[2] if not decided else words[0] if change.mean > 0 else words[1]
    return f"{word} ({points}, {100 * change.low:+.1f} to {100 * change.high:+.1f})"
