"""Colours, dashes and markers: the palette of Okabe and Ito, adjusted to a contrast of 3:1 on both backgrounds.

Arms also differ in their dashes and markers, so a figure can be read without colours.
"""

from __future__ import annotations

from typing import Any

ROLES = {
    "paper": ("#ffffff", "#14171a"),
    "raised": ("#f6f7f8", "#1d2125"),
    "ink": ("#1d2126", "#e9ecef"),
    "soft": ("#555d66", "#a7afb8"),
    "rule": ("#d5d9de", "#3a4047"),
    "grid": ("#e8eaed", "#2a2f35"),
    "link": ("#005a8f", "#7cc4f0"),
    "better": ("#00704f", "#3ecfa0"),
    "worse": ("#b04300", "#ff9457"),
    "equivalent": ("#005a8f", "#7cc4f0"),
    "undecided": ("#555d66", "#a7afb8"),
    "band": ("#dfe7ee", "#27303a"),
    "more": ("#0b5394", "#6cb8f0"),
    "less": ("#b04300", "#ff9457"),
    "arm0": ("#1d2126", "#e9ecef"),
    "arm1": ("#0072b2", "#4a9fe0"),
    "arm2": ("#d55e00", "#ee7a2b"),
    "arm3": ("#008a64", "#1fb888"),
    "arm4": ("#b8588f", "#dd8fbb"),
    "arm5": ("#a97500", "#e69f00"),
    "arm6": ("#2f8fc4", "#7fcbf5"),
    "arm7": ("#857d0a", "#f0e442"),
}
"""Colours on the light and on the dark background."""
LIGHT, DARK = ({role: pair[n] for role, pair in ROLES.items()} for n in (0, 1))

_ARM_COLORS = 8
_DASHES = ("solid", "6px,3px", "2px,2px", "8px,3px,2px,3px", "12px,4px", "3px,5px", "12px,3px,3px,3px,3px,3px")
_MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "pentagon", "star", "hexagon")


def ink(role: str, alpha: float = 1.0) -> dict[str, Any]:
    """A role of the palette, which the page replaces by a colour; an object, so that no text is mistaken for it.

    >>> ink("arm1", 0.2)
    {'$': 'arm1', 'alpha': 0.2}
    """
    return {"$": role} if alpha == 1.0 else {"$": role, "alpha": alpha}


def arm_color(arm: int) -> str:
    """The palette role of an arm; the baseline is arm 0."""
    return "arm0" if arm == 0 else f"arm{1 + (arm - 1) % (_ARM_COLORS - 1)}"


def arm_dash(arm: int) -> str:
    """The dash of an arm; colour and dash together differ for the first 49 arms."""
    return _DASHES[0] if arm == 0 else _DASHES[(arm - 1 + (arm - 1) // (_ARM_COLORS - 1)) % len(_DASHES)]


def arm_marker(arm: int) -> str:
    """The marker of an arm."""
    return _MARKERS[arm % len(_MARKERS)]


OUTLINES = {
    "circle": "M0-4.5A4.5 4.5 0 1 1-.01-4.5Z",
    "square": "M-4-4H4V4H-4Z",
    "diamond": "M0-5.5L5.5 0 0 5.5-5.5 0Z",
    "triangle-up": "M0-5L5 4H-5Z",
    "cross": "M-1.8-5H1.8V-1.8H5V1.8H1.8V5H-1.8V1.8H-5V-1.8H-1.8Z",
    "triangle-down": "M0 5L5-4H-5Z",
    "pentagon": "M0-5L4.8-1.5 2.9 4H-2.9L-4.8-1.5Z",
    "star": "M0-5.5L1.5-1.8 5.3-1.7 2.3.7 3.3 4.5 0 2.3-3.3 4.5-2.3.7-5.3-1.7-1.5-1.8Z",
    "hexagon": "M0-5L4.3-2.5V2.5L0 5-4.3 2.5V-2.5Z",
}
"""The markers as SVG paths around the origin, for the buttons of the page."""
