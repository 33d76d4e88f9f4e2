"""What a paper says of an arm, in the paper's own terms: perplexity or bits, a change of it, or only which way it went.

Perplexity a token is the exponential of the loss in nats a token, and a bit is ln 2 nats, so the change of the loss
that follows is

    ln(p_arm / p_baseline)        from two perplexities
    ln(1 + c)                     from a change of the perplexity by the part c
    (b_arm - b_baseline) ln 2     from two figures in bits, or from their difference alone
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Finding = Literal["better", "worse", "equivalent", "unclear"]
"""Unclear: the paper's own figures go both ways."""
Bounds = tuple[float, float]
"""The lower and the upper end; the same where a single figure was published."""
_MOST_BITS = 32
"""No character takes more."""


@dataclass(frozen=True)
class Perplexity:
    """A perplexity a token.

    >>> Perplexity(22.55, 22.62).words
    'perplexity 22.55 to 22.62'
    """

    low: float
    """The figure, or the lower end of a range."""
    high: float | None = None
    """The upper end, where the paper gives a range."""
    derived: bool = False
    """Whether it follows from other figures and is itself not published."""

    def __post_init__(self) -> None:
        if not 1 < self.low <= self.bounds[1] < math.inf:
            raise ValueError(f"a perplexity is above 1, and its range goes up: got {self.low} to {self.high}")

    @property
    def bounds(self) -> Bounds:
        """Both ends."""
        return self.low, self.low if self.high is None else self.high

    @property
    def words(self) -> str:
        """As it is shown."""
        upper = "" if self.high is None else f" to {self.high:.2f}"
        return f"perplexity {self.low:.2f}{upper}{' (derived)' if self.derived else ''}"


@dataclass(frozen=True, init=False)
class BitsPerCharacter(Perplexity):
    """Bits a character: b of them are a perplexity a character of 2^b.

    >>> BitsPerCharacter(1.637, spread=0.010).words
    '1.637 +- 0.010 bits a character'
    """

    spread: float | None = None
    """Bits behind the plus-minus sign."""

    def __init__(self, bits: float, *, spread: float | None = None) -> None:
        if not 0 < bits <= _MOST_BITS:
            raise ValueError(f"bits a character are above 0 and at most {_MOST_BITS}, got {bits}")
        super().__init__(2.0**bits)
        object.__setattr__(self, "spread", spread)  # as a frozen dataclass sets what it is given

    @property
    def words(self) -> str:
        """As it is shown."""
        around = "" if self.spread is None else f" +- {_decimals(self.spread)}"
        return f"{_decimals(math.log2(self.low))}{around} bits a character"


@dataclass(frozen=True)
class PerplexityChange:
    """A change of the perplexity a token against the baseline's.

    >>> PerplexityChange(-0.067).words
    'perplexity -6.7 %'
    """

    part: float
    """-0.067 is 6.7 % less."""

    def __post_init__(self) -> None:
        if not -1 < self.part < math.inf or self.part == 0:
            raise ValueError(f"a perplexity changes by more than -1, and not by 0: got {self.part}")

    @property
    def words(self) -> str:
        """As it is shown."""
        return f"perplexity {100 * self.part:+.1f} %"


@dataclass(frozen=True)
class BitsChange:
    """A change of the bits a byte against the baseline's: one figure, or a range.

    >>> BitsChange(-0.012, -0.010).words
    '-0.012 to -0.010 bits a byte'
    """

    low: float
    """-0.012 is so many bits less."""
    high: float | None = None
    """The upper end, where there is a range."""

    def __post_init__(self) -> None:
        low, high = self.bounds
        if not -math.inf < low <= high < math.inf or low <= 0 <= high:
            raise ValueError(f"a change in bits goes one way, and its range goes up: got {self.low} to {self.high}")

    @property
    def bounds(self) -> Bounds:
        """Both ends."""
        return self.low, self.low if self.high is None else self.high

    @property
    def words(self) -> str:
        """As it is shown."""
        return f"{' to '.join(_decimals(end, '+') for end in dict.fromkeys(self.bounds))} bits a byte"


@dataclass(frozen=True)
class Outcome:
    """How an arm did against the baseline, where no figure says by how much."""

    finding: Finding
    """Which way it went."""
    words: str
    """What the paper says, in short."""


Claim = Perplexity | PerplexityChange | BitsChange | Outcome


def loss_change(claim: Claim, baseline: Perplexity | None) -> Bounds | None:
    """The published change of the loss in nats a token; None where no figure was published.

    >>> [round(end, 4) for end in loss_change(PerplexityChange(-0.067), None)]
    [-0.0694, -0.0694]
    """
    if isinstance(claim, Outcome):
        return None
    if isinstance(claim, PerplexityChange):
        return math.log1p(claim.part), math.log1p(claim.part)
    if isinstance(claim, BitsChange):
        return claim.bounds[0] * math.log(2), claim.bounds[1] * math.log(2)
    if baseline is None:
        raise ValueError(f"{claim.words} says nothing without the baseline's perplexity")
    (low, high), (least, most) = claim.bounds, baseline.bounds
    return math.log(low / most), math.log(high / least)


def finding(claim: Claim, baseline: Perplexity | None) -> Finding:
    """Which way an arm went, as published.

    >>> finding(Perplexity(22.55, 22.62), Perplexity(24.22))
    'better'
    """
    if isinstance(claim, Outcome):
        return claim.finding
    low, high = loss_change(claim, baseline) or (0.0, 0.0)
    if low <= 0 <= high:
        raise ValueError(f"{claim.words} goes neither way against the baseline's: say which with an Outcome")
    return "better" if high < 0 else "worse"


def _decimals(bits: float, sign: str = "") -> str:
    """Three decimals, or four where the last is not zero: as papers print bits."""
    return f"{bits:{sign}.4f}".removesuffix("0")
