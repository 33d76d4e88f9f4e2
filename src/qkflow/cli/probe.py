"""`qkflow probe`."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from qkflow.cli.options import flag
from qkflow.data import open_corpus, windows
from qkflow.errors import UsageError
from qkflow.mechanisms.coupling import DYNAMICS, Coupling
from qkflow.probes import CouplingLook, energies
from qkflow.report.wording import MISSING, fixed
from qkflow.training import LoadedRun, load_run

FAINT = 0.01
"""Below this part of the identity, a dependence is called hardly there."""
_BYTES = 64
"""Bytes of a file that are read for each token asked for: more than tokens have on average."""
_WINDOWS = 64
"""Windows of held-out text of which the longest is taken."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Look into the coupling of a trained model: what passes between queries and keys in each layer.

    |dk'/dq| says how much of a moved key depends on its query, |dq'/dk| the other way round; 1 is the size of the
    identity. Energy drift is how far a pair strays from the energy it began with, where the force has a potential.

    For example:
      qkflow probe runs/mine                   on held-out text of its corpus
      qkflow probe runs/mine --text other.txt  on the beginning of a file
      qkflow probe runs/mine --json
    """

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A folder that `qkflow train` made; its training may still go on."""
    text: Annotated[Path | None, flag("FILE", "the corpus")] = None
    """A file whose beginning is read instead of held-out text."""
    tokens: int = 256
    """Tokens to read, at most; never more than the model's context in training."""
    data_dir: Annotated[str | None, flag("DIR")] = None
    """Where named corpora lie."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to compute."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        """Print a row for each layer, and what it comes to."""
        if self.tokens < 1:
            raise UsageError(f"--tokens must be at least 1, got {self.tokens}")
        run = load_run(self.run_folder, device=self.device)
        for notice in run.notices:
            Console(stderr=True, soft_wrap=True).print(f"note: {notice}", markup=False, highlight=False)
        if not any(isinstance(module, Coupling) for module in run.model.modules()):
            arms = " and ".join(dict.fromkeys(map(repr, run.config.model.mechanisms)))
            raise UsageError(
                f"{run.folder} has no coupling to look into, its mechanism is {arms}: expected a run of `coupled`, or"
                f" of `standard+X` or `differential+X` where X is {', '.join(DYNAMICS[:-1])} or {DYNAMICS[-1]}"
            )
        tokens, source = self._read(run)
        layers = energies(run.model, tokens)
        console, found = Console(highlight=False), verdict(layers)
        if self.json:
            about = {"run": str(run.folder), "step": run.step, "steps": run.config.steps, "finished": run.finished}
            rows = [None if layer is None else _finite(asdict(layer)) for layer in layers]
            record = {**about, "text": source, "tokens": len(tokens), "layers": rows, "verdict": found}
            console.print(json.dumps(record, sort_keys=True), markup=False, soft_wrap=True)
            return 0
        console.print(
            f"step {run.step:,} of {run.config.steps:,}; {len(tokens):,} tokens of {source}",
            markup=False,
            soft_wrap=True,
        )
        console.print(_table(layers))
        console.print(found, markup=False)
        return 0

    def _read(self, run: LoadedRun) -> tuple[list[int], str]:
        """The tokens to look at, and where they are from."""
        most = min(self.tokens, run.config.context)
        if self.text is not None:
            try:
                with self.text.open("rb") as file:
                    start = file.read(most * _BYTES)
            except OSError as error:
                raise UsageError(f"{self.text} cannot be read ({error.strerror}): give a file of text") from error
            if not start:
                raise UsageError(f"{self.text} is empty: give a file with text in it")
            whole = codecs.utf_8_decode(start, "replace", False)[1]  # the last character may be cut in two
            return [run.tokenizer.end, *run.tokenizer.encode(start[:whole])][:most], str(self.text)
        own = run.config.corpus
        corpus = open_corpus(replace(own, data_dir=self.data_dir or own.data_dir), tokenizer=run.tokenizer)
        some = windows(corpus.validation, context=most, limit=_WINDOWS * most)
        longest = max(some, key=lambda window: window.length)
        taken = corpus.validation.tokens[longest.begin : longest.begin + longest.length]
        return [int(token) for token in taken], f"held-out text of {corpus.name}"


def verdict(layers: Sequence[CouplingLook | None]) -> str:
    """In words, whether anything passes between queries and keys, and no more than the figures say."""
    found = [layer for layer in layers if layer is not None]
    coupled = [layer for layer in found if not layer.control]
    if not coupled:
        names = " and ".join(dict.fromkeys(layer.dynamics for layer in found))
        return f"A control ({names}): nothing passes between queries and keys, by construction."
    keys = [layer.strength.key_on_query for layer in coupled]
    queries = [layer.strength.query_on_key for layer in coupled]
    if not all(map(math.isfinite, keys + queries)):
        return "Some figures are not finite: the model has diverged, or its numbers are too large to look into."
    many = f"{len(coupled)} coupled layer{'' if len(coupled) == 1 else 's'}"
    used, taken = sum(size >= FAINT for size in keys), sum(size >= FAINT for size in queries)
    if not used and not taken:
        return f"Hardly used on this text: in none of {many} does |dk'/dq| or |dq'/dk| reach {FAINT}."
    if not used and all(layer.dt is not None for layer in coupled):
        return (
            f"No sign that the coupling is used on this text: in none of {many} does |dk'/dq| reach {FAINT}. What is"
            " left is nearly a drift of queries along their keys, which a plain projection could do as well."
        )
    always = any(layer.energy is not None for layer in coupled)
    return (
        f"On this text keys depend on their queries in {used} of {many} (|dk'/dq| at least {FAINT}, up to"
        f" {max(keys):.2g}), queries on their keys in {taken} (|dq'/dk| up to {max(queries):.2g})."
        f"{' A potential does this from the start, before any training.' if always else ''}"
        " That the coupling moves them does not say that it helps: qkflow compare does."
    )


def _table(layers: Sequence[CouplingLook | None]) -> Table:
    table = Table("layer", "dynamics", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("dt (start → now)", "|dk'/dq|", "|dq'/dk|", "energy drift"):
        table.add_column(column, justify="right")
    for number, layer in enumerate(layers, start=1):
        if layer is None:
            table.add_row(f"{number}", *[MISSING] * 5)
            continue
        dt = MISSING if layer.dt is None else f"{layer.dt_start:g} → {fixed(layer.dt)}"
        sizes = fixed(layer.strength.key_on_query), fixed(layer.strength.query_on_key)
        drift = MISSING if layer.energy is None else f"{layer.energy.drift:.2g}"
        table.add_row(f"{number}", layer.dynamics, dt, *sizes, drift)
    return table


def _finite(value: Any) -> Any:
    """Plain data with null for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
