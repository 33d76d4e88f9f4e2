"""Contrast of the colours, and arms that can be distinguished without them."""

import pytest

from qkflow.report.palette import DARK, LIGHT, OUTLINES, arm_color, arm_dash, arm_marker

TEXT = ("ink", "soft", "link", "better", "worse", "equivalent", "undecided")
DRAWN = (*(role for role in LIGHT if role.startswith("arm")), "more", "less")


def luminance(hex_color: str) -> float:
    parts = [int(hex_color[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_marks_have_enough_contrast(theme: dict[str, str]) -> None:
    for role in TEXT:
        assert contrast(theme[role], theme["paper"]) >= 4.5, role
        assert contrast(theme[role], theme["raised"]) >= 4.5, role
    for role in DRAWN:
        assert contrast(theme[role], theme["paper"]) >= 3, role


def test_both_themes_have_the_same_roles() -> None:
    assert LIGHT.keys() == DARK.keys()
    assert all(len(value) == 7 for value in (*LIGHT.values(), *DARK.values()))  # the script reads six hex digits


def test_forty_arms_look_different() -> None:
    looks = [(arm_color(arm), arm_dash(arm), arm_marker(arm)) for arm in range(40)]
    assert len(set(looks)) == 40
    assert len({(line, point) for _, line, point in looks[:8]}) == 8  # the first eight even without colour
    assert {role for role, _, _ in looks} <= LIGHT.keys()
    assert {point for _, _, point in looks} <= OUTLINES.keys()
