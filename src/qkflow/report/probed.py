"""The page of a probe: one trained model on one text."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from qkflow.data import Tokenizer
from qkflow.io import write_file
from qkflow.probes import LayerProbe
from qkflow.probes.attention import POOLINGS, TAU, AttentionStats, RationaleConfidence
from qkflow.probes.diagnostics import Diagnostic
from qkflow.report.exhibits import exhibit_groups
from qkflow.report.gallery import alone, labels
from qkflow.report.highlight import Line, Word, lines
from qkflow.report.rows import Table
from qkflow.report.shell import record, render
from qkflow.report.wording import count, fixed, short, token_label

MOST_SHOWN = 256
"""Tokens of the maps on a page; of a longer text, the last."""
_POOLED = {
    "rollout": "along the residual stream, layer by layer",
    "average": "the mean over layers",
    "max": "the largest of any layer",
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """A reading of the model: a row for each layer, and what it comes to."""

    name: str
    """As in the JSON: `stability`."""
    title: str
    table: Table
    verdict: str
    note: str = ""
    """What the columns mean."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Probed:
    """A model on a text, with everything that a page shows of it."""

    name: str
    """The run."""
    mechanism: str
    step: int
    steps: int
    source: str
    """Where the text is from."""
    tokens: Sequence[int]
    tokenizer: Tokenizer
    maps: Sequence[Float[Tensor, "_ t t"]]
    """Each layer's."""
    own: Sequence[tuple[Diagnostic, ...]]
    """What each layer's mechanism has to show of its own."""
    own_tokens: int
    """The tokens, from the first, that this is of."""
    attention: AttentionStats
    confidence: RationaleConfidence | None
    """On the words that were named, if any were."""
    parts: Sequence[Part]
    """The first is of the maps."""
    remarks: Sequence[str] = ()
    command: Sequence[str] = ()
    config: dict[str, Any] = field(default_factory=dict)


def write_probed(found: Probed, out: Path) -> Path:
    """Write the page of a probe."""
    write_file(out, probed_page(found))
    return out


def probed_page(found: Probed) -> str:
    """The page as text."""
    begin = max(0, len(found.tokens) - MOST_SHOWN)
    shown = [LayerProbe(weights=layer[:, begin:, begin:], diagnostics=()) for layer in found.maps]
    gallery = alone(found.name, shown, labels(found.tokenizer, found.tokens[begin:]))
    if begin:
        gallery.missing.append(f"Maps are of the last {MOST_SHOWN} of {count(len(found.tokens))} tokens.")
    named = labels(found.tokenizer, found.tokens[: found.own_tokens])["tokens"]
    groups = exhibit_groups({found.name: found.own}, [found.name], named)
    content = {
        "found": found,
        "title": f"{found.name} on {short(found.source, 80)}",
        "answer": found.parts[0].verdict,
        "callouts": list(found.remarks),
        "facts": _facts(found),
        "text": _text(found),
        "tau": f"{TAU:g}",
        "confidence": None if found.confidence is None else confidence_table(found.confidence),
        "shares": _shares(found),
        "gallery": gallery,
        "groups": groups,
        "command": shlex.join(found.command),
        "kept": [record("Config (config.json)", found.config)],
    }
    drawn = {
        "figures": {f"exhibit-{n}": group.figures[0] for n, group in enumerate(groups)},
        "exhibits": [group.figures for group in groups],
        "excerpts": gallery.excerpts,
        "maps": [{**arm, "name": short(arm["name"], 60)} for arm in gallery.arms],
        "token": len(found.tokens) - begin - 1,
    }
    return render("probe.html", content, drawn)


def confidence_table(found: RationaleConfidence) -> Table:
    """The mass on the words named, under each pooling, beside what an even attention would give."""
    rows = [
        (how, fixed(found.mass[how], 3), fixed(found.uniform, 3), "yes" if found.mass[how] >= TAU else "no")
        for how in POOLINGS
    ]
    columns = ("layers pooled by", "mass on the words", "if attention were even", f"at least {TAU:g}")
    return Table(caption="Attention of the last token on the words named", columns=columns, rows=tuple(rows))


def characters(pieces: Sequence[bytes]) -> list[tuple[int, int]]:
    """Tokens that are parts of one character put together, as (begin, end); what spells none stays alone.

    >>> characters([b"a", b"\\xc3", b"\\xa9", b"\\xff"])
    [(0, 1), (1, 3), (3, 4)]
    """
    made, place = [], 0
    while place < len(pieces):
        ends = range(place + 1, min(place + 4, len(pieces)) + 1)
        end = next((end for end in ends if _whole(b"".join(pieces[place:end]))), place + 1)
        made.append((place, end))
        place = end
    return made


def _whole(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def _units(found: Probed) -> tuple[list[tuple[int, int]], list[str], set[int]]:
    """What the text is shown in: characters or longer tokens, their names, and those at which a line ends."""
    pieces = [found.tokenizer.decode([token]) for token in found.tokens]
    spans = characters(pieces)
    ends = [found.tokens[begin] == found.tokenizer.end for begin, _ in spans]
    texts = [b"".join(pieces[begin:end]) for begin, end in spans]
    names = [token_label(text, end=end) for text, end in zip(texts, ends, strict=True)]
    return spans, names, {place for place, text in enumerate(texts) if text.endswith(b"\n")}


def _pooled(found: Probed, spans: Sequence[tuple[int, int]]) -> dict[str, list[float]]:
    return {how: [sum(found.attention.pooled[how][b:e]) for b, e in spans] for how in POOLINGS}


def _text(found: Probed) -> list[tuple[Line, str]]:
    """The text, a line for each pooling, with what the pooling is."""
    spans, names, breaks = _units(found)
    marked = set() if found.confidence is None else set(found.confidence.positions)
    inside = {n for n, (begin, end) in enumerate(spans) if marked & set(range(begin, end))}
    told: dict[str, str] = {}
    if found.confidence is not None:
        told = {how: f"mass {fixed(value, 3)}" for how, value in found.confidence.mass.items()}
    made = lines(names, _pooled(found, spans), told, marked=inside, breaks=breaks, long=len(names))
    spaced = [replace(line, words=tuple(_spaced(word) for word in line.words)) for line in made]
    return [(line, _POOLED[line.name]) for line in spaced]


def _spaced(word: Word) -> Word:
    return replace(word, text=word.text.replace("␣", " "))


def _shares(found: Probed) -> Table:
    spans, names, _ = _units(found)
    pooled = _pooled(found, spans)
    rows = [
        (f"{begin + 1} {name}", *(fixed(pooled[how][n], 4) for how in POOLINGS))
        for n, ((begin, _), name) in enumerate(zip(spans, names, strict=True))
    ]
    caption = "The share of each token in the attention of the last, layers pooled in three ways"
    return Table(caption=caption, columns=("token", *POOLINGS), rows=tuple(rows))


def _facts(found: Probed) -> list[tuple[str, str]]:
    return [
        ("run", short(found.name, 60)),
        ("mechanism", short(found.mechanism, 80)),
        ("step", f"{count(found.step)} of {count(found.steps)}"),
        ("text", f"{count(len(found.tokens))} tokens of {short(found.source, 60)}"),
    ]
