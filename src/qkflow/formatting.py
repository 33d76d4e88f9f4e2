"""Format numbers, durations and untrusted text for output."""

from __future__ import annotations

import math

Number = int | float

MISSING = "\N{EN DASH}"
"""Shown instead of a number that is missing or not finite."""


def escape_unprintable(text: str) -> str:
    r"""Replace control characters, direction marks and lone surrogates by their escapes.

    >>> print(escape_unprintable("a\u202eb\x00c\n"))
    a\u202eb\x00c\n
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shorten(text: str, max_length: int = 40) -> str:
    """Escape unprintable characters and cut the middle out of a text that is too long.

    >>> shorten("differential:window=64,rotary_base=500000", 24)
    'differential…base=500000'
    """
    text = escape_unprintable(text)
    if len(text) <= max_length:
        return text
    tail = (max_length - 1) // 2
    return f"{text[: max_length - 1 - tail]}…{text[len(text) - tail :]}"


def plural(count: int, noun: str) -> str:
    """A count and its noun.

    >>> plural(1, "row"), plural(2000, "token")
    ('1 row', '2,000 tokens')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def token_label(piece: bytes, *, is_end: bool = False) -> str:
    r"""A printable label for the bytes of one token.

    >>> [token_label(piece) for piece in (b" the", b"\n", b"\xc3", "é".encode())]
    ['␣the', '↵', '\\xc3', 'é']
    """
    if is_end:
        return "⟨end⟩"
    text = piece.decode("utf-8", "backslashreplace").replace("\n", "↵").replace("\t", "⇥").replace(" ", "␣")
    return escape_unprintable(text) or "⟨empty⟩"


def format_number(value: Number | None, digits: int = 4) -> str:
    """A number with a fixed number of decimals.

    >>> format_number(2.34567), format_number(float("nan"))
    ('2.3457', '–')
    """
    return MISSING if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def format_signed(value: Number | None, digits: int = 4) -> str:
    """A number with its sign; zero has none.

    >>> format_signed(-0.03127), format_signed(0.0), format_signed(None)
    ('-0.0313', '0.0000', '–')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text


def format_interval(low: Number | None, high: Number | None, digits: int = 4, *, signed: bool = True) -> str:
    """Both ends of an interval.

    >>> format_interval(-0.02, 0.01), format_interval(None, None)
    ('-0.0200 to +0.0100', 'no interval')
    """
    if low is None or high is None:
        return "no interval"
    write = format_signed if signed else format_number
    return f"{write(low, digits)} to {write(high, digits)}"


def format_difference(mean: Number | None, low: Number | None, high: Number | None, digits: int = 4) -> str:
    """A difference with its interval.

    >>> format_difference(-0.01, -0.02, 0.0, 2), format_difference(0.5, None, None, 1)
    ('-0.01 (-0.02 to 0.00)', '+0.5 (no interval)')
    """
    return MISSING if mean is None else f"{format_signed(mean, digits)} ({format_interval(low, high, digits)})"


def format_p_value(p: Number | None) -> str:
    """A p value.

    >>> format_p_value(0.0321), format_p_value(1e-6), format_p_value(None)
    ('0.032', '< 0.001', '–')
    """
    if p is None or not math.isfinite(p):
        return MISSING
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def format_ratio(value: Number | None, low: Number | None = None, high: Number | None = None) -> str:
    """A ratio, with its interval if there is one.

    >>> format_ratio(0.8333), format_ratio(12.4), format_ratio(0.5, 0.4, 0.6)
    ('0.83', '12.4', '0.50 (0.40 to 0.60)')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    text = f"{value:.2f}" if value < 10 else f"{value:,.1f}"
    return text if low is None or high is None else f"{text} ({format_ratio(low)} to {format_ratio(high)})"


def format_percent(fraction: Number | None, digits: int = 2, *, signed: bool = False) -> str:
    """A fraction as a percentage.

    >>> format_percent(0.9812, 1), format_percent(-0.0012, signed=True), format_percent(0, signed=True)
    ('98.1%', '-0.12%', '0.00%')
    """
    if fraction is None or not math.isfinite(fraction):
        return MISSING
    return f"{(format_signed if signed else format_number)(100 * fraction, digits)}%"


def format_accuracy(fraction: float) -> str:
    """An accuracy as a percentage, which is 0 or 100 only if the accuracy is exactly 0 or 1.

    >>> format_accuracy(0.9812), format_accuracy(1.0), format_accuracy(0.9999), format_accuracy(1e-6)
    ('98.1 %', '100 %', '> 99.9 %', '< 0.1 %')
    """
    if 0 < fraction < 0.0005:
        return "< 0.1 %"
    if 0.9995 <= fraction < 1:
        return "> 99.9 %"
    return f"{100 * fraction:.{0 if fraction in (0, 1) else 1}f} %"


def format_integer(value: Number | None) -> str:
    """A whole number with thousands separators.

    >>> format_integer(1234567.2)
    '1,234,567'
    """
    return MISSING if value is None or not math.isfinite(value) else f"{value:,.0f}"


def format_compact(value: Number | None) -> str:
    """A large number with three significant digits and a suffix.

    >>> format_compact(1_234_567), format_compact(950), format_compact(2.5e9)
    ('1.23M', '950', '2.5B')
    """
    return _scaled(value, 1000, ("", "k", "M", "B", "T"))


def format_bytes(value: Number | None) -> str:
    """A size in bytes with three significant digits and a binary unit.

    >>> format_bytes(1536), format_bytes(3 * 2**30), format_bytes(12)
    ('1.5 KiB', '3 GiB', '12 B')
    """
    return _scaled(value, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def format_duration(seconds: Number) -> str:
    """A duration in the largest unit that fits twice, as `--budget` accepts it.

    >>> [format_duration(seconds) for seconds in (4.2, 90, 200, 5400, 3 * 86400)]
    ['5s', '90s', '3.3m', '90m', '3d']
    """
    for unit, name in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * unit:
            return f"{round(seconds / unit, 1):g}{name}"
    return f"{math.ceil(seconds)}s"


def format_clock(seconds: Number) -> str:
    """A duration as hours, minutes and seconds.

    >>> format_clock(75.0), format_clock(7265.0), format_clock(200000.0)
    ('1:15', '2:01:05', '2 days 7:33:20')
    """
    days, rest = divmod(round(seconds), 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    clock = f"{hours}:{minutes:02}:{rest:02}" if hours or days else f"{minutes}:{rest:02}"
    return f"{days} day{'s' if days > 1 else ''} {clock}" if days else clock


def _scaled(value: Number | None, step: int, units: tuple[str, ...]) -> str:
    if value is None or not math.isfinite(value):
        return MISSING
    power = 0
    while abs(value) >= step * 0.9995 and power < len(units) - 1:
        value, power = value / step, power + 1
    decimals = 0 if power == 0 or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    text = f"{value:.{decimals}f}"
    return (text.rstrip("0").rstrip(".") if decimals else text) + units[power]
