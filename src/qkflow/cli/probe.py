"""`qkflow probe`."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from qkflow.cli.console import Console
from qkflow.cli.options import command_line, flag, print_notices
from qkflow.cli.probe_tables import attention_section, coupling_section, memory_section, phase_section
from qkflow.config import to_dict
from qkflow.data import open_corpus, windows
from qkflow.errors import UsageError
from qkflow.io import refuse_special_files
from qkflow.mechanisms import Coupling, DeltaMechanism
from qkflow.mechanisms.kuramoto import SynchronyMechanism
from qkflow.probes import (
    AttentionStats,
    RationaleConfidence,
    attention_stats,
    coupling_stats,
    layer_phases,
    memory_stats,
    probe_layers,
    rationale_confidence,
)
from qkflow.probes.attention import token_positions
from qkflow.report.attention_maps import MAX_TOKENS, label_tokens
from qkflow.report.export import finite, render_table
from qkflow.report.probe_page import ProbePart, ProbeResult, confidence_table, write_probe_page
from qkflow.training import LoadedRun, load_run

_BYTES_PER_TOKEN = 64
"""Bytes read from a file per requested token: more than tokens have on average."""
_CANDIDATE_WINDOWS = 64
"""Windows of held-out text, the longest of which is read."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Inspect a trained model: attention maps, and the diagnostics of its mechanism.

    Prints a table per layer: sharpness of attention, strength of a coupling, stability of a delta-rule memory, or
    synchronization of phases. Writes an HTML page with the maps of every head and an explanation of the columns.

    For example:
      qkflow probe runs/mine                        on held-out text of its corpus
      qkflow probe runs/mine "the author of books"  on a text
      qkflow probe runs/mine "the author of books" --rationale author
      qkflow probe runs/mine --file other.txt       on the beginning of a file
      qkflow probe runs/mine --json
    """

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder, written by `qkflow train`; training may still be running."""
    text: Annotated[list[str], tyro.conf.Positional, flag("[TEXT ...]", "held-out text of the corpus")]
    """Text to read; several arguments are joined by spaces."""
    file: Annotated[Path | None, flag("FILE")] = None
    """Read the beginning of this file instead."""
    rationale: Annotated[list[str], tyro.conf.UseAppendAction] = field(default_factory=list)
    """Words of the text; reports how much of the attention is on them."""
    tokens: int = 256
    """Maximum number of tokens; at most the context length in training."""
    out: Annotated[Path | None, flag("PAGE", "RUN/probe.html")] = None
    """Path of the HTML page."""
    data_dir: Annotated[str | None, flag("DIR")] = None
    """Folder with the files of named corpora."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON instead of tables, and write a page only with --out."""

    def run(self) -> int:
        """Print the tables or JSON, and write the page."""
        if self.tokens < 1:
            raise UsageError(f"--tokens must be at least 1, got {self.tokens}")
        if self.text and self.file is not None:
            raise UsageError("got both TEXT and --file: pass only one of them")
        run = load_run(self.run_folder, device=self.device)
        print_notices(run.notices)
        tokens, source, remarks = self._tokens(run)
        result, statistics = self._probe(run, tokens, source, [*run.notices, *remarks])
        console = Console(highlight=False)
        if self.json:
            record = _json_record(run, result, statistics)
            console.print(json.dumps(finite(record), sort_keys=True), markup=False, soft_wrap=True)
        else:
            _print_tables(console, result)
            for remark in remarks:
                console.print(f"note: {remark}", markup=False, soft_wrap=True)
        if self.json and self.out is None:
            return 0
        path = write_probe_page(result, self.out or run.folder / "probe.html")
        if not self.json:
            console.print(f"page: {path.absolute()}", markup=False, soft_wrap=True)
        return 0

    def _probe(
        self, run: LoadedRun, tokens: list[int], source: str, remarks: list[str]
    ) -> tuple[ProbeResult, dict[str, Sequence[Any]]]:
        """Return the content of the page, and the statistics of each part by layer."""
        layers = probe_layers(run.model, tokens)
        attention = attention_stats([layer.weights for layer in layers])
        rationale = None
        if self.rationale:
            pieces = [run.tokenizer.piece(token) for token in tokens]
            rationale = rationale_confidence(attention, token_positions(" ".join(self.rationale), pieces))
        sections = list(_sections(run, tokens, attention, rationale))
        # Diagnostics of longer texts are too large to draw.
        drawn = layers if len(tokens) <= MAX_TOKENS else probe_layers(run.model, tokens[:MAX_TOKENS])
        result = ProbeResult(
            name=run.folder.resolve().name,
            mechanism=" and ".join(dict.fromkeys(run.model.config.mechanisms)),
            step=run.step,
            steps=run.config.steps,
            source=source,
            tokens=tokens,
            tokenizer=run.tokenizer,
            maps=[layer.weights for layer in layers],
            diagnostics=[layer.diagnostics for layer in drawn],
            diagnostic_tokens=min(MAX_TOKENS, len(tokens)),
            attention=attention,
            confidence=rationale,
            parts=[part for part, _ in sections],
            remarks=remarks,
            command=command_line(),
            config=to_dict(run.config),
        )
        return result, {part.name: layer_stats for part, layer_stats in sections}

    def _tokens(self, run: LoadedRun) -> tuple[list[int], str, list[str]]:
        """Return the tokens to read, their source, and remarks."""
        limit = min(self.tokens, run.config.context)
        if self.text or self.file is not None:
            source = "the given text" if self.file is None else str(self.file)
            tokens = [run.tokenizer.end, *run.tokenizer.encode(self._text(limit))]
            is_cut = self.text and len(tokens) > limit
            return tokens[:limit], source, [f"{len(tokens) - limit:,} more tokens are not read."] if is_cut else []
        config = run.data
        corpus = open_corpus(replace(config, data_dir=self.data_dir or config.data_dir), tokenizer=run.tokenizer)
        candidates = windows(corpus.validation, context=limit, limit=_CANDIDATE_WINDOWS * limit)
        window = max(candidates, key=lambda window: window.length)
        tokens = corpus.validation.tokens[window.begin : window.begin + window.length]
        return [int(token) for token in tokens], f"held-out text of {corpus.name}", []

    def _text(self, limit: int) -> bytes:
        """Return TEXT, or enough of --file for `limit` tokens."""
        if self.file is None:
            return os.fsencode(" ".join(self.text))
        refuse_special_files(self.file)
        try:
            with self.file.open("rb") as file:
                start = file.read(limit * _BYTES_PER_TOKEN)
        except OSError as error:
            raise UsageError(f"{self.file} cannot be read ({error.strerror}): pass a text file") from error
        if not start:
            raise UsageError(f"{self.file} is empty: pass a file with text in it")
        return start[: codecs.utf_8_decode(start, "replace", False)[1]]  # the last character may be incomplete


def _sections(
    run: LoadedRun, tokens: list[int], attention: AttentionStats, rationale: RationaleConfidence | None
) -> Iterator[tuple[ProbePart, Sequence[Any]]]:
    """Yield the tables that apply to the model, each with its statistics by layer."""
    names = label_tokens(run.tokenizer, tokens)["tokens"]
    kinds = {kind for module in run.model.modules() for kind in type(module).__mro__}
    yield attention_section(attention, rationale, names), attention.layers
    if Coupling in kinds:
        couplings = coupling_stats(run.model, tokens)
        yield coupling_section(couplings), couplings
    if DeltaMechanism in kinds:
        memories = memory_stats(run.model, tokens)
        yield memory_section(memories), memories
    if SynchronyMechanism in kinds:
        phases = [None if layer is None else layer.summary() for layer in layer_phases(run.model, tokens)]
        yield phase_section(phases, names), phases


def _json_record(run: LoadedRun, result: ProbeResult, statistics: dict[str, Sequence[Any]]) -> dict[str, Any]:
    record: dict[str, Any] = {
        "run": str(run.folder),
        "step": result.step,
        "steps": result.steps,
        "finished": run.finished,
        "text": result.source,
        "tokens": len(result.tokens),
        "coupling": None,
        "phases": None,
        "stability": None,
        "rationale": None if result.confidence is None else asdict(result.confidence),
    }
    for part in result.parts:
        numbers = [None if layer is None else asdict(layer) for layer in statistics[part.name]]
        record[part.name] = {"layers": numbers, "verdict": part.verdict}
    record["maps"] |= {"pooled": result.attention.pooled}
    return record


def _print_tables(console: Console, result: ProbeResult) -> None:
    title = f"step {result.step:,} of {result.steps:,}; {len(result.tokens):,} tokens of {result.source}"
    console.print(title, markup=False, soft_wrap=True)
    for number, part in enumerate(result.parts):
        if number:
            console.print()
        console.print(*render_table(part.table), sep="\n")
        if number == 0 and result.confidence is not None:
            console.print()
            console.print(*render_table(confidence_table(result.confidence)), sep="\n")
        console.print(part.verdict, markup=False)
