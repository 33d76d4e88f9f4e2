"""Arms as people write them: a mechanism, and how fast its queries and keys learn.

    standard:r=20                     queries and keys 20 times as fast as the rest
    qdelta+affine:r=5,growth=40       5 times as fast at first, 40 times at the end
    differential:window=64,r=20       with options of the mechanism's own

`r` and `growth` are options of the training, not of any mechanism: a mechanism of one's own has none of these names.
"""

from __future__ import annotations

from qkflow.circuits import RatioSchedule
from qkflow.errors import UsageError

_OWN = ("r", "growth")


def parse_arm(name: str) -> tuple[str, RatioSchedule]:
    """The mechanism's spec without the ratio, and the ratio.

    >>> parse_arm("qdelta+affine:alternations=2,r=5,growth=40")
    ('qdelta+affine:alternations=2', Ratio(start=5.0, end=40.0))
    >>> parse_arm("standard:r=1")
    ('standard', Ratio(start=1.0, end=None))
    """
    before, _, options = name.partition(":")
    kept: list[str] = []
    values: dict[str, float] = {}
    for item in filter(None, options.split(",")):
        key, _, text = (part.strip() for part in item.partition("="))
        if key not in _OWN:
            kept.append(item)
        elif key in values:
            raise UsageError(f"the arm {name!r} gives {key} twice: give it once")
        else:
            values[key] = _number(name, key, text)
    start, end = values.get("r", 1.0), values.get("growth")
    try:
        ratio = RatioSchedule(start=start, end=None if end == start else end)
    except UsageError as error:
        raise UsageError(f"the arm {name!r}: {error}") from error
    return ":".join([before, ",".join(kept)] if kept else [before]), ratio


def _number(name: str, key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"the arm {name!r}: {key} must be a finite number above 0, got {text!r}") from None
