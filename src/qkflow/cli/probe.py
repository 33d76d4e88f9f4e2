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

from qkflow.cli import probe_coupling, probe_phases, probe_stability
from qkflow.cli.options import flag
from qkflow.data import open_corpus, windows
from qkflow.errors import UsageError
from qkflow.mechanisms.coupling import DYNAMICS, Coupling
from qkflow.mechanisms.delta import DeltaMechanism
from qkflow.mechanisms.synchrony import SynchronyMechanism
from qkflow.probes import energies, phases, stability
from qkflow.training import LoadedRun, load_run

_BYTES = 64
"""Bytes of a file that are read for each token asked for: more than tokens have on average."""
_WINDOWS = 64
"""Windows of held-out text of which the longest is taken."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Look into a trained model: what a coupling passes on, how stable a delta memory is, which phases are in step.

    Couplings: |dk'/dq| says how much of a moved key depends on its query, |dq'/dk| the other way round; 1 is the size
    of the identity. Energy drift is how far a pair strays from the energy it began with, where the force has a
    potential.

    Delta memories: a token's error is multiplied by 1 - beta a, which shrinks it if beta a is in (0, 2); rho is the
    largest such factor. |T| is the most by which a token can stretch a memory, then so many tokens in a row; |S| is the
    memory's size at the end; bound/error is how far the theorem's bound lies above the error, in the median.

    Phases: R is the order parameter as a layer finds the tokens, 1 if all are in one phase; locking is how far two
    tokens are in step, on average, before and after the layer; energy is minus the likeness of tokens to what they
    attend to, before and after the layer's attention; then the two different tokens that it leaves most in step.

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
        coupled, delta, phased = (_has(run, part) for part in (Coupling, DeltaMechanism, SynchronyMechanism))
        if not (coupled or delta or phased):
            arms = " and ".join(dict.fromkeys(map(repr, run.config.model.mechanisms)))
            raise UsageError(
                f"{run.folder} has neither a coupling nor a delta memory nor phases to look into, its mechanism is"
                f" {arms}: expected a run of `coupled`, of `standard+X` or another mechanism with a coupling X"
                f" ({', '.join(DYNAMICS[:-1])} or {DYNAMICS[-1]}), of `deltanet`, `gated-deltanet` or `qdelta`,"
                " or of `kuramoto` or `group`"
            )
        tokens, source = self._read(run)
        parts: list[tuple[str, Any, Sequence[Any]]] = []
        if coupled:
            parts.append(("coupling", probe_coupling, energies(run.model, tokens)))
        if delta:
            parts.append(("stability", probe_stability, stability(run.model, tokens)))
        if phased:
            looks = [None if layer is None else layer.summary() for layer in phases(run.model, tokens)]
            parts.append(("phases", probe_phases.Words(run.tokenizer), looks))
        console = Console(highlight=False)
        if self.json:
            about = {"run": str(run.folder), "step": run.step, "steps": run.config.steps, "finished": run.finished}
            record: dict[str, Any] = {**about, "text": source, "tokens": len(tokens)}
            record |= {"coupling": None, "phases": None, "stability": None}
            for name, words, layers in parts:
                rows = [None if layer is None else _finite(asdict(layer)) for layer in layers]
                record[name] = {"layers": rows, "verdict": words.verdict(layers)}
            console.print(json.dumps(record, sort_keys=True), markup=False, soft_wrap=True)
            return 0
        console.print(
            f"step {run.step:,} of {run.config.steps:,}; {len(tokens):,} tokens of {source}",
            markup=False,
            soft_wrap=True,
        )
        for number, (_, words, layers) in enumerate(parts):
            if number:
                console.print()
            console.print(words.table(layers))
            console.print(words.verdict(layers), markup=False)
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


def _has(run: LoadedRun, part: type) -> bool:
    return any(isinstance(module, part) for module in run.model.modules())


def _finite(value: Any) -> Any:
    """Plain data with null for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
