"""What `qkflow probe` says of phases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from qkflow.data import Tokenizer
from qkflow.formatting import MISSING, format_number, format_signed, shorten, token_label
from qkflow.probes import Pair, PhaseSummary
from qkflow.report.probed import Part
from qkflow.report.rows import Table

NOTICED = 0.005
"""Changes below this are not called changes: it is what the table's digits can show."""
_NOTE = (
    "R is the order parameter as a layer finds the tokens, 1 if all are in one phase; locking is how far two tokens are"
    " in step, on average, before and after the layer; energy is minus the likeness of tokens to what they attend to,"
    " before and after the layer's attention; then the two different tokens that it leaves most in step."
)


@dataclass(frozen=True)
class Words:
    """Tables and verdicts, with tokens by their names."""

    tokenizer: Tokenizer

    def part(self, layers: Sequence[PhaseSummary | None]) -> Part:
        """Everything said of phases."""
        told = self.verdict(layers)
        return Part(name="phases", title="Phases", table=self.table(layers), verdict=told, note=_NOTE)

    def verdict(self, layers: Sequence[PhaseSummary | None]) -> str:
        """In words, whether tokens come into step along the depth, and no more than the figures say."""
        found = [layer for layer in layers if layer is not None]
        first, last = _mean(found[0].order), _mean(found[-1].order_after)
        if not all(map(math.isfinite, (first, last, *(x for layer in found for x in layer.energy.after)))):
            return "Some figures are not finite: the model has diverged, or its numbers are too large to look into."
        moved = "stays about where it is" if abs(last - first) < NOTICED else "rises" if last > first else "falls"
        falls = sum(_over(layer.energy.after) <= _over(layer.energy.before) - NOTICED for layer in found)
        many = f"{len(found)} layer{'' if len(found) == 1 else 's'}"
        return (
            f"On this text the order parameter {moved} from the first layer's input ({first:.2f}) to the last one's"
            f" output ({last:.2f}), and attention lowers the energy by at least {NOTICED} in {falls} of {many}."
            f"{self._drawn(layers)} That tokens come into step does not say that it helps: qkflow compare does."
        )

    def table(self, layers: Sequence[PhaseSummary | None]) -> Table:
        """A row for each layer."""
        columns = ("layer", "R", "heads", "locking", "energy", "most in step")
        rows = []
        for number, layer in enumerate(layers, start=1):
            if layer is None:
                rows.append((f"{number}", *[MISSING] * (len(columns) - 1)))
                continue
            heads = [_over(head) for head in layer.order]
            energy = layer.energy
            rows.append(
                (
                    f"{number}",
                    format_number(_over(heads), 2),
                    f"{format_number(min(heads), 2)}-{format_number(max(heads), 2)}",
                    _change(layer.locking_before, layer.locking_after),
                    _change(_over(energy.before), _over(energy.after)),
                    self._named(layer.strongest[0]) if layer.strongest else MISSING,
                )
            )
        return Table(caption="How far tokens are in step", columns=columns, rows=tuple(rows), words=(0, 5))

    def _drawn(self, layers: Sequence[PhaseSummary | None]) -> str:
        """The pair that a layer has brought into step the most, if there is one."""
        numbered = [(layer, number) for number, layer in enumerate(layers, start=1) if layer is not None]
        pairs = [(layer.drawn_together[0], number) for layer, number in numbered if layer.drawn_together]
        if not pairs:
            return ""
        pair, layer = max(pairs, key=lambda found: found[0].after - found[0].before)
        if pair.after - pair.before < NOTICED:
            return ""
        return (
            f" Most drawn together: {self._token(pair.tokens[0])} (token {pair.first + 1}) and"
            f" {self._token(pair.tokens[1])} ({pair.second + 1}), from {format_signed(pair.before, 2)} to"
            f" {format_signed(pair.after, 2)} in layer {layer}."
        )

    def _named(self, pair: Pair) -> str:
        ends = zip(pair.tokens, (pair.first, pair.second), strict=True)
        return " ~ ".join(f"{self._token(token)} {n + 1}" for token, n in ends) + f": {format_number(pair.after, 2)}"

    def _token(self, token: int) -> str:
        return shorten(token_label(self.tokenizer.decode([token]), is_end=token == self.tokenizer.end), 8)


def _change(before: float, after: float) -> str:
    return f"{format_signed(before, 2)}→{format_signed(after, 2)}"


def _over(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _mean(rows: Sequence[Sequence[float]]) -> float:
    return _over([_over(row) for row in rows])
