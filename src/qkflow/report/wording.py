"""Text and numbers as people read them. Whatever comes from outside (names, paths, corpora) is shown, never obeyed."""

from __future__ import annotations

import math

Number = int | float
MISSING = "\N{EN DASH}"
"""Stands where there is no number."""


def visible(text: str) -> str:
    r"""The text with nothing hidden in it: controls, direction marks, lone surrogates and their like as escapes.

    >>> print(visible("a\u202eb\x00c\n"))
    a\u202eb\x00c\n
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def short(text: str, most: int = 40) -> str:
    """`visible` text of at most so many characters, the middle left out.

    >>> short("differential:window=64,rotary_base=500000", 24)
    'differential…base=500000'
    """
    text = visible(text)
    if len(text) <= most:
        return text
    tail = (most - 1) // 2
    return f"{text[: most - 1 - tail]}…{text[len(text) - tail :]}"


def token_label(piece: bytes, *, end: bool = False) -> str:
    r"""A token as a name for it, every byte accounted for.

    >>> [token_label(piece) for piece in (b" the", b"\n", b"\xc3", "é".encode())]
    ['␣the', '↵', '\\xc3', 'é']
    """
    if end:
        return "⟨end⟩"
    text = piece.decode("utf-8", "backslashreplace").replace("\n", "↵").replace("\t", "⇥").replace(" ", "␣")
    return visible(text) or "⟨empty⟩"


def signed(value: Number | None, digits: int = 4) -> str:
    """A difference, with its sign.

    >>> signed(-0.03127), signed(0.0), signed(None)
    ('-0.0313', '0.0000', '–')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text


def fixed(value: Number | None, digits: int = 4) -> str:
    """A plain number.

    >>> fixed(2.34567), fixed(float("nan"))
    ('2.3457', '–')
    """
    return MISSING if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def interval(low: Number | None, high: Number | None, digits: int = 4, *, sign: bool = True) -> str:
    """Both ends, or that there is none.

    >>> interval(-0.02, 0.01), interval(None, None)
    ('-0.0200 to +0.0100', 'no interval')
    """
    if low is None or high is None:
        return "no interval"
    write = signed if sign else fixed
    return f"{write(low, digits)} to {write(high, digits)}"


def probability(p: Number | None) -> str:
    """A p value.

    >>> probability(0.0321), probability(1e-6), probability(None)
    ('0.032', '< 0.001', '–')
    """
    if p is None or not math.isfinite(p):
        return MISSING
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def ratio(value: Number | None) -> str:
    """A ratio to the baseline.

    >>> ratio(0.8333), ratio(12.4)
    ('0.83', '12.4')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:.2f}" if value < 10 else f"{value:,.1f}"


def percent(value: Number | None, digits: int = 2) -> str:
    """A part as per cent, with its sign.

    >>> percent(-0.0012), percent(0)
    ('-0.12 %', '0.00 %')
    """
    return MISSING if value is None else f"{signed(100 * value, digits)} %"


def count(value: Number | None) -> str:
    """A whole number with its thousands apart.

    >>> count(1234567.2)
    '1,234,567'
    """
    return MISSING if value is None or not math.isfinite(value) else f"{value:,.0f}"


def brief(value: Number | None) -> str:
    """A large number in three digits.

    >>> brief(1_234_567), brief(950), brief(2.5e9)
    ('1.23 M', '950', '2.50 G')
    """
    return _scaled(value, 1000, ("", "k", "M", "G", "T", "P"))


def size(value: Number | None) -> str:
    """Bytes in three digits.

    >>> size(1536), size(3 * 2**30), size(12)
    ('1.50 KiB', '3 GiB', '12 B')
    """
    return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def _scaled(value: Number | None, step: int, units: tuple[str, ...]) -> str:
    if value is None or not math.isfinite(value):
        return MISSING
    power = 0
    while abs(value) >= step * 0.9995 and power < len(units) - 1:
        value, power = value / step, power + 1
    digits = 0 if power == 0 or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f} {units[power]}".replace(".00 ", " ").replace(".0 ", " ").strip()
