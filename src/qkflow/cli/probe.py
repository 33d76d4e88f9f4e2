"""`qkflow probe`."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from qkflow.cli import probe_coupling, probe_maps, probe_phases, probe_stability
from qkflow.cli.options import command_line, flag
from qkflow.config import to_dict
from qkflow.data import open_corpus, windows
from qkflow.errors import UsageError
from qkflow.mechanisms.coupling import Coupling
from qkflow.mechanisms.delta import DeltaMechanism
from qkflow.mechanisms.synchrony import SynchronyMechanism
from qkflow.probes import Look, energies, look, phases, stability
from qkflow.probes.attention import Attended, Confidence, attended, confidence_on, places_of
from qkflow.report.export import finite
from qkflow.report.gallery import LONGEST, labels
from qkflow.report.probed import Part, Probed, confidence_table, write_probed
from qkflow.report.tables import rendered
from qkflow.training import LoadedRun, load_run

_BYTES = 64
"""Bytes of a file that are read for each token asked for: more than tokens have on average."""
_WINDOWS = 64
"""Windows of held-out text of which the longest is taken."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Look into a trained model: where its attention lies, and what its mechanism has besides.

    Tables in the terminal say, for each layer, how sharp attention is; what a coupling passes on; how stable a delta
    memory is; which phases are in step. A page beside them has the maps of every head, and says what columns mean.

    For example:
      qkflow probe runs/mine                        on held-out text of its corpus
      qkflow probe runs/mine "the author of books"  on a text
      qkflow probe runs/mine "the author of books" --rationale author
      qkflow probe runs/mine --file other.txt       on the beginning of a file
      qkflow probe runs/mine --json
    """

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A folder that `qkflow train` made; its training may still go on."""
    text: Annotated[list[str], tyro.conf.Positional, flag("[TEXT ...]", "held-out text of the corpus")]
    """A text to read; several words are joined by blanks."""
    file: Annotated[Path | None, flag("FILE")] = None
    """A file whose beginning is read instead."""
    rationale: Annotated[list[str], tyro.conf.UseAppendAction] = field(default_factory=list)
    """Words of the text that attention should lie on: how much of it does? May be given several times."""
    tokens: int = 256
    """Tokens to read, at most; never more than the model's context in training."""
    out: Annotated[Path | None, flag("PAGE", "RUN/probe.html")] = None
    """Where to write the page."""
    data_dir: Annotated[str | None, flag("DIR")] = None
    """Where named corpora lie."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to compute."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON instead of tables, and write a page only where --out says so."""

    def run(self) -> int:
        """Print a row for each layer and what it comes to, and write the page."""
        if self.tokens < 1:
            raise UsageError(f"--tokens must be at least 1, got {self.tokens}")
        if self.text and self.file is not None:
            raise UsageError("got TEXT and --file: give one of them")
        run = load_run(self.run_folder, device=self.device)
        for notice in run.notices:
            Console(stderr=True, soft_wrap=True).print(f"note: {notice}", markup=False, highlight=False)
        tokens, source, remarks = self._read(run)
        looks = look(run.model, tokens)
        attention = attended([layer.weights for layer in looks])
        pieces = [run.tokenizer.piece(token) for token in tokens]
        on = confidence_on(attention, places_of(" ".join(self.rationale), pieces)) if self.rationale else None
        parts = _parts(run, tokens, attention, on)
        console = Console(highlight=False)
        if self.json:
            about = {"run": str(run.folder), "step": run.step, "steps": run.config.steps, "finished": run.finished}
            record = {**about, "text": source, "tokens": len(tokens), "coupling": None, "phases": None}
            record |= {"stability": None, "rationale": None if on is None else asdict(on)}
            record |= {part.name: {"layers": layers, "verdict": part.verdict} for part, layers in parts}
            record["maps"] |= {"pooled": attention.pooled}
            console.print(json.dumps(finite(record), sort_keys=True), markup=False, soft_wrap=True)
        else:
            _show(console, [part for part, _ in parts], on, f"{_standing(run)}; {len(tokens):,} tokens of {source}")
            for remark in remarks:
                console.print(f"note: {remark}", markup=False, soft_wrap=True)
        if not self.json or self.out is not None:
            found = Probed(
                name=run.folder.resolve().name,
                mechanism=" and ".join(dict.fromkeys(run.model.config.mechanisms)),
                step=run.step,
                steps=run.config.steps,
                source=source,
                tokens=tokens,
                tokenizer=run.tokenizer,
                maps=[layer.weights for layer in looks],
                own=[layer.exhibits for layer in _brief(run, tokens, looks)],
                own_tokens=min(LONGEST, len(tokens)),
                attention=attention,
                confidence=on,
                parts=[part for part, _ in parts],
                remarks=[*run.notices, *remarks],
                command=command_line(),
                config=to_dict(run.config),
            )
            page = write_probed(found, self.out or run.folder / "probe.html")
            if not self.json:
                console.print(f"the page: {page.absolute()}", markup=False, soft_wrap=True)
        return 0

    def _read(self, run: LoadedRun) -> tuple[list[int], str, list[str]]:
        """The tokens to look at, where they are from, and what was left out."""
        most = min(self.tokens, run.config.context)
        if self.text or self.file is not None:
            source = "the text given" if self.file is None else str(self.file)
            start = self._given(most)
            whole = [run.tokenizer.end, *run.tokenizer.encode(start)]
            left = [f"{len(whole) - most:,} tokens more are not read."] if self.text and len(whole) > most else []
            return whole[:most], source, left
        own = run.corpus
        corpus = open_corpus(replace(own, data_dir=self.data_dir or own.data_dir), tokenizer=run.tokenizer)
        some = windows(corpus.validation, context=most, limit=_WINDOWS * most)
        longest = max(some, key=lambda window: window.length)
        taken = corpus.validation.tokens[longest.begin : longest.begin + longest.length]
        return [int(token) for token in taken], f"held-out text of {corpus.name}", []

    def _given(self, most: int) -> bytes:
        """The user's text, or enough of the user's file."""
        if self.file is None:
            if not (text := os.fsencode(" ".join(self.text))):
                raise UsageError("TEXT is empty: give a text, or none at all for held-out text of the corpus")
            return text
        try:
            with self.file.open("rb") as file:
                start = file.read(most * _BYTES)
        except OSError as error:
            raise UsageError(f"{self.file} cannot be read ({error.strerror}): give a file of text") from error
        if not start:
            raise UsageError(f"{self.file} is empty: give a file with text in it")
        return start[: codecs.utf_8_decode(start, "replace", False)[1]]  # the last character may be cut in two


def _parts(
    run: LoadedRun, tokens: list[int], attention: Attended, on: Confidence | None
) -> list[tuple[Part, list[dict[str, Any] | None]]]:
    """What there is to say of the model, each with its numbers by layer."""
    names = labels(run.tokenizer, tokens)["tokens"]
    found = [(probe_maps.Words(names).part(attention, on), _rows(attention.layers))]
    if _has(run, Coupling):
        layers = energies(run.model, tokens)
        found.append((probe_coupling.part(layers), _rows(layers)))
    if _has(run, DeltaMechanism):
        layers = stability(run.model, tokens)
        found.append((probe_stability.part(layers), _rows(layers)))
    if _has(run, SynchronyMechanism):
        layers = [None if layer is None else layer.summary() for layer in phases(run.model, tokens)]
        found.append((probe_phases.Words(run.tokenizer).part(layers), _rows(layers)))
    return found


def _show(console: Console, parts: Sequence[Part], on: Confidence | None, about: str) -> None:
    console.print(about, markup=False, soft_wrap=True)
    for number, part in enumerate(parts):
        if number:
            console.print()
        console.print(rendered(part.table))
        if number == 0 and on is not None:
            console.print()
            console.print(rendered(confidence_table(on)))
        console.print(part.verdict, markup=False)


def _standing(run: LoadedRun) -> str:
    return f"step {run.step:,} of {run.config.steps:,}"


def _brief(run: LoadedRun, tokens: list[int], looks: list[Look]) -> list[Look]:
    """Layers on so few tokens that what their mechanisms show of them can be drawn."""
    return looks if len(tokens) <= LONGEST else look(run.model, tokens[:LONGEST])


def _rows(layers: Sequence[Any]) -> list[dict[str, Any] | None]:
    return [None if layer is None else asdict(layer) for layer in layers]


def _has(run: LoadedRun, part: type) -> bool:
    return any(isinstance(module, part) for module in run.model.modules())
