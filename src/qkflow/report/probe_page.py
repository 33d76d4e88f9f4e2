"""The page of `qkflow probe`: one trained model on one text."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from qkflow.data import Tokenizer
from qkflow.formatting import format_integer, format_number, shorten, token_label
from qkflow.io import write_file
from qkflow.probes import LayerProbe
from qkflow.probes.attention import POOLINGS, TAU, AttentionStats, RationaleConfidence
from qkflow.probes.diagnostics import Diagnostic
from qkflow.report.attention_maps import color_lines, label_tokens, single_model_maps
from qkflow.report.diagnostics import diagnostic_blocks
from qkflow.report.html import render
from qkflow.report.sections import (
    Block,
    BulletList,
    ColoredText,
    Definitions,
    MapViewer,
    Note,
    Record,
    ReportContent,
    Section,
    Table,
    text_table,
)

MAX_TOKENS = 256
"""Tokens of the maps; of a longer text the page shows the last ones."""
_POOLINGS = {
    "rollout": "attention rollout along the residual stream",
    "average": "mean over layers",
    "max": "maximum over layers",
}


@dataclass(frozen=True, kw_only=True)
class ProbePart:
    """One analysis of the model: a table with a row per layer, and its conclusion."""

    name: str
    """The key in the JSON output: `stability`."""
    title: str
    table: Table
    verdict: str
    note: str = ""
    """What the columns mean."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ProbeResult:
    """A model on a text, with everything that the page shows."""

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
    """The attention maps of each layer."""
    diagnostics: Sequence[tuple[Diagnostic, ...]]
    """The diagnostics of each layer's mechanism."""
    diagnostic_tokens: int
    """The number of tokens, from the first, that the diagnostics cover."""
    attention: AttentionStats
    confidence: RationaleConfidence | None
    """On the words of `--rationale`, if any."""
    parts: Sequence[ProbePart]
    """The first is about the maps."""
    remarks: Sequence[str] = ()
    command: Sequence[str] = ()
    config: dict[str, Any] = field(default_factory=dict)


def write_probe_page(result: ProbeResult, path: Path) -> Path:
    """Write the page of a probe."""
    write_file(path, render(probe_report(result)))
    return path


def probe_report(result: ProbeResult) -> ReportContent:
    """The report of a probe."""
    layers, *parts = map(_part_section, result.parts)
    layers = replace(layers, name="layers", nav="Layers")
    sections = [_text_section(result), layers, _map_section(result), *parts]
    labels = label_tokens(result.tokenizer, result.tokens[: result.diagnostic_tokens])["tokens"]
    if blocks := diagnostic_blocks({result.name: result.diagnostics}, [result.name], labels):
        if result.diagnostic_tokens < len(result.tokens):
            blocks.insert(0, Note(text=f"On the first {result.diagnostic_tokens} tokens."))
        title = "Diagnostics of the mechanism"
        sections.append(Section(name="diagnostics", title=title, nav="Diagnostics", blocks=blocks))
    command = Definitions(items=(("command", f"`{shlex.join(result.command)}`", ""),))
    record = (command, Record(title="Config (config.json)", content=result.config))
    sections.append(Section(name="record", title="How to reproduce", nav="Reproduce", blocks=record))
    return ReportContent(
        kind="probe",
        title=f"{result.name} on {shorten(result.source, 80)}",
        answer=result.parts[0].verdict,
        callouts=result.remarks,
        facts=(
            ("run", shorten(result.name, 60)),
            ("mechanism", shorten(result.mechanism, 80)),
            ("step", f"{format_integer(result.step)} of {format_integer(result.steps)}"),
            ("text", f"{format_integer(len(result.tokens))} tokens of {shorten(result.source, 60)}"),
        ),
        sections=sections,
        source="the run folder and the text",
    )


def confidence_table(confidence: RationaleConfidence) -> Table:
    """The attention mass on the rationale for each pooling, and that of uniform attention."""
    uniform = format_number(confidence.uniform, 3)
    rows = [
        (pooling, format_number(mass, 3), uniform, "yes" if mass >= TAU else "no")
        for pooling, mass in ((pooling, confidence.mass[pooling]) for pooling in POOLINGS)
    ]
    columns = ("layers pooled by", "mass on the rationale", "uniform attention", f"at least {TAU:g}")
    return text_table(caption="Attention of the last token on the rationale", columns=columns, rows=rows)


def characters(pieces: Sequence[bytes]) -> list[tuple[int, int]]:
    """Join tokens that are parts of one UTF-8 character: (begin, end) of each; invalid bytes stay alone.

    >>> characters([b"a", b"\\xc3", b"\\xa9", b"\\xff"])
    [(0, 1), (1, 3), (3, 4)]
    """
    spans, begin = [], 0
    while begin < len(pieces):
        ends = range(begin + 1, min(begin + 4, len(pieces)) + 1)
        end = next((end for end in ends if _is_utf8(b"".join(pieces[begin:end]))), begin + 1)
        spans.append((begin, end))
        begin = end
    return spans


def _is_utf8(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def _part_section(part: ProbePart) -> Section:
    blocks: list[Block] = [part.table, Note(text=part.note)]
    if part.name != "maps":  # its verdict is the answer of the page
        blocks.insert(0, Note(text=part.verdict, style="plain"))
    return Section(name=part.name, title=part.title, nav=part.title, blocks=blocks)


def _map_section(result: ProbeResult) -> Section:
    begin = max(0, len(result.tokens) - MAX_TOKENS)
    shown = [LayerProbe(weights=layer[:, begin:, begin:], diagnostics=()) for layer in result.maps]
    maps = single_model_maps(result.name, shown, label_tokens(result.tokenizer, result.tokens[begin:]))
    text = (
        "Attention of each token (row) to itself and to earlier tokens (columns), in one head and in the mean over the"
        " heads of its layer. Colours follow the square root of the weight, so that small weights are visible."
    )
    if begin:
        maps.missing.append(f"Maps show the last {MAX_TOKENS} of {format_integer(len(result.tokens))} tokens.")
    viewer = MapViewer(maps=maps, has_choice=False, token=len(result.tokens) - begin - 1)
    blocks: list[Block] = [Note(text=text), viewer]
    if maps.missing:
        blocks.append(BulletList(items=maps.missing))
    return Section(name="attention", title="Attention maps", nav="Maps", blocks=blocks)


def _text_section(result: ProbeResult) -> Section:
    """The text shaded by the attention of its last token, one line per pooling."""
    pieces = [result.tokenizer.decode([token]) for token in result.tokens]
    spans = characters(pieces)
    texts = [b"".join(pieces[begin:end]) for begin, end in spans]
    names = [
        token_label(text, is_end=result.tokens[begin] == result.tokenizer.end)
        for text, (begin, _) in zip(texts, spans, strict=True)
    ]
    pooled = result.attention.pooled
    shares = {pooling: [sum(pooled[pooling][begin:end]) for begin, end in spans] for pooling in POOLINGS}
    confidence = result.confidence
    marked = set() if confidence is None else set(confidence.positions)
    mass = {} if confidence is None else {name: f"mass {format_number(x, 3)}" for name, x in confidence.mass.items()}
    lines = color_lines(
        names,
        shares,
        mass,
        marked={n for n, (begin, end) in enumerate(spans) if marked & set(range(begin, end))},
        breaks={n for n, text in enumerate(texts) if text.endswith(b"\n")},
        max_words=len(names),
    )
    lines = [
        replace(line, words=[replace(word, text=word.text.replace("␣", " ")) for word in line.words]) for line in lines
    ]
    note = (
        "Colour: the share of each token in the attention of the last token; mean over heads, layers pooled in three"
        " ways, one scale for all. Signed or unnormalised maps count by their absolute"
        f" values.{' Underlined: the rationale.' if confidence else ''} Point at a token to see its share."
    )
    blocks: list[Block] = [
        Note(text=note),
        ColoredText(
            caption="The text, shaded by the attention of its last token",
            name_title="layers pooled by",
            end_title="mass",
            lines=lines,
            is_spaced=False,
        ),
        BulletList(items=tuple(f"{pooling}: {_POOLINGS[pooling]}" for pooling in POOLINGS)),
    ]
    if confidence is not None:
        mass_note = (
            "Mass is the share of the attention on the rationale. Over many texts, AC(tau) is the percentage with a"
            f" mass of at least tau = {TAU:g}."
        )
        blocks += [confidence_table(confidence), Note(text=mass_note)]
    rows = [
        (f"{begin + 1} {name}", *(format_number(shares[pooling][n], 4) for pooling in POOLINGS))
        for n, ((begin, _), name) in enumerate(zip(spans, names, strict=True))
    ]
    caption = "The share of each token in the attention of the last token"
    table = text_table(caption=caption, columns=("token", *POOLINGS), rows=rows)
    blocks.append(replace(table, summary="Every token as a table"))
    return Section(name="text", title="Attention of the last token", nav="Text", blocks=blocks)
