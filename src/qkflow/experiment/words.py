"""Figures as people write them."""

from __future__ import annotations

import math


def duration(seconds: int | float) -> str:
    """Seconds as `--budget` takes them, rounded to what matters.

    >>> duration(4.2), duration(90), duration(200), duration(5400), duration(3 * 86400)
    ('5s', '90s', '3.3m', '90m', '3d')
    """
    for unit, name in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * unit:
            return f"{round(seconds / unit, 1):g}{name}"
    return f"{math.ceil(seconds)}s"


def count(number: int | float) -> str:
    """A number to two or three digits, with thousands as k, millions as M, billions as B.

    >>> count(950), count(100_224), count(1_912_345), count(2.5e9)
    ('950', '100k', '1.9M', '2.5B')
    """
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            scaled = number / unit
            return f"{scaled:.0f}{name}" if scaled >= 10 else f"{scaled:.1f}{name}"
    return f"{number:g}"
