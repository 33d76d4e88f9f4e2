"""A text with each word coloured by the attention it gets: what a page writes, a row for each model."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from qkflow.report.wording import fixed

LONG = 80
"""Words of a text beyond which stretches that nobody attends to are left out."""
AROUND = 4
"""Words that stay on either side of one that matters."""
_NOTED = 0.25
"""A word matters if a model gives it this part of the largest share of the text."""
_DARKEST = 0.55
"""How much colour the largest share has; more would leave the word hard to read."""


@dataclass(frozen=True, kw_only=True)
class Word:
    """A word, or a stretch of words left out, under one model."""

    text: str
    told: str
    """The share in words, shown when it is pointed at."""
    alpha: float
    """How much colour it has."""
    marked: bool = False
    """Whether the answer rests on it."""
    gap: bool = False
    """Whether it stands for words left out."""
    end: bool = False
    """Whether a line of the text ends here."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A text under one model."""

    name: str
    words: tuple[Word, ...]
    told: str
    """What stands at the row's end: the answer, or a number."""


def lines(
    words: Sequence[str],
    shares: Mapping[str, Sequence[float]],
    told: Mapping[str, str],
    *,
    marked: Collection[int] = (),
    breaks: Collection[int] = (),
    long: int = LONG,
) -> list[Line]:
    """A line for each model, all on the scale of the largest share of any; `marked` words are the rationale.

    Of a text of more than `long` words, stretches that nobody attends to are left out.

    >>> found = lines(["a", "b"], {"r = 1": [0.1, 0.9]}, {}, marked=[1])
    >>> [(word.told, word.alpha, word.marked) for word in found[0].words]
    [('a: 0.100', 0.183, False), ('b: 0.900', 0.55, True)]
    """
    most = max((share for own in shares.values() for share in own if math.isfinite(share)), default=0.0)
    parts = [(0, len(words), False)] if len(words) <= long else _parts(words, shares, marked, most)
    made = []
    for name, own in shares.items():
        row = []
        for begin, end, gap in parts:
            if gap:
                within = math.fsum(share for share in own[begin:end] if math.isfinite(share))
                text = f"… {end - begin} words …"
                row.append(
                    Word(text=text, told=f"{end - begin} words: {fixed(within, 3)} together", alpha=0.0, gap=True)
                )
                continue
            for place in range(begin, end):
                said = f"{words[place]}: {fixed(own[place], 3)}"
                alpha = shade(own[place], most)
                ends = place in breaks
                row.append(Word(text=words[place], told=said, alpha=alpha, marked=place in marked, end=ends))
        made.append(Line(name=name, words=tuple(row), told=told.get(name, "")))
    return made


def shade(share: float, most: float) -> float:
    """How much colour a share has: the root keeps faint ones apart.

    >>> shade(0.25, 1.0), shade(0.0, 0.0), shade(float("nan"), 1.0)
    (0.275, 0.0, 0.0)
    """
    if not math.isfinite(share) or most <= 0:
        return 0.0
    return round(_DARKEST * math.sqrt(min(1.0, max(0.0, share) / most)), 3)


def _parts(
    words: Sequence[str], shares: Mapping[str, Sequence[float]], marked: Collection[int], most: float
) -> list[tuple[int, int, bool]]:
    """(begin, end, left out): a long text without the stretches where nothing happens."""
    noted = {place for own in shares.values() for place, share in enumerate(own) if share >= _NOTED * most > 0}
    matters = noted | set(marked) | {0, len(words) - 1}
    near = [any(abs(place - other) <= AROUND for other in matters) for place in range(len(words))]
    parts: list[tuple[int, int, bool]] = []
    for place, kept in enumerate(near):
        if parts and parts[-1][2] != kept:
            parts[-1] = (parts[-1][0], place + 1, not kept)
        else:
            parts.append((place, place + 1, not kept))
    return parts
