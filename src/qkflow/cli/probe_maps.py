"""What `qkflow probe` says of attention maps: of every mechanism."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from qkflow.formatting import MISSING, format_number, format_signed, shorten
from qkflow.probes.attention import TAU, Attended, Confidence, Taken
from qkflow.report.probed import Part
from qkflow.report.rows import Table

_NOTE = (
    "H is the entropy of a head's attention in nats, and so many tokens, all with the same share, would have it too."
    " Both are means over heads: for the last token, then over all tokens. A link is what a token takes from an earlier"
    " one: the largest weight of any head."
)


@dataclass(frozen=True)
class Words:
    """Tables and verdicts, with tokens by their names."""

    names: Sequence[str]
    """Of the text's tokens."""

    def part(self, found: Attended, on: Confidence | None) -> Part:
        """Everything said of maps."""
        told = self.verdict(found, on)
        return Part(name="maps", title="Attention of each layer", table=self.table(found), verdict=told, note=_NOTE)

    def verdict(self, found: Attended, on: Confidence | None = None) -> str:
        """In words, how sharp the last token's attention is and where it lies, and no more than the figures say."""
        counts = [layer.attended_last for layer in found.layers]
        shares = found.pooled["average"]
        if not all(map(math.isfinite, shares)):
            return "Some figures are not finite: the model has diverged, or its numbers are too large to look into."
        if sum(shares) == 0 or not all(map(math.isfinite, (counts[0], counts[-1]))):
            return "On this text the last token attends to nothing in some layers."
        where = max(range(len(shares)), key=shares.__getitem__)
        layers = f"{counts[0]:.1f} of {len(shares)} tokens in the first layer and {counts[-1]:.1f} in the last"
        told = layers if len(counts) > 1 else f"{counts[0]:.1f} of {len(shares)} tokens in its layer"
        said = (
            f"On this text the last token attends to {told}, in effect; over all layers most to {self._token(where)}"
            f" (token {where + 1}, a share of {shares[where]:.2f})."
        )
        if on is None:
            return f"{said} That attention is sharp does not say that it is right: --rationale says where it should be."
        reached = "reaches" if on.mass["average"] >= TAU else "does not reach"
        return (
            f"{said} On the words named lies {on.mass['average']:.2f} of it, which {reached} {TAU:g}; an even attention"
            f" would have {on.even:.2f} there."
        )

    def table(self, found: Attended) -> Table:
        """A row for each layer."""
        rows = [
            (
                f"{number}",
                format_number(layer.entropy_last, 2),
                format_number(layer.entropy, 2),
                format_number(layer.attended_last, 1),
                format_number(layer.attended, 1),
                MISSING if layer.strongest is None else self._link(layer.strongest),
            )
            for number, layer in enumerate(found.layers, start=1)
        ]
        columns = ("layer", "H: last", "H: mean", "tokens: last", "tokens: mean", "strongest link")
        return Table(caption="How sharp each layer's attention is", columns=columns, rows=tuple(rows), words=(0, 5))

    def _link(self, link: Taken) -> str:
        ends = f"{self._token(link.by)} {link.by + 1} ← {self._token(link.source)} {link.source + 1}"
        return f"{ends}: {format_signed(link.weight, 2).lstrip('+')}, head {link.head + 1}"

    def _token(self, place: int) -> str:
        return shorten(self.names[place], 8)
