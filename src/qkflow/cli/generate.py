"""`qkflow generate`."""

from __future__ import annotations

import codecs
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from qkflow.cli.options import flag
from qkflow.errors import UsageError
from qkflow.models import Sampling, stream
from qkflow.training import load_run


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Write text with a trained model: shown as it comes, or, from several prompts, when all are done.

    For example:
      qkflow generate runs/diff "def main("
      qkflow generate runs/diff "class " --tokens 400 --temperature 0.8 --top-p 0.95
      qkflow generate runs/diff "import " "from " --temperature 0
    """

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A folder that `qkflow train` made."""
    prompts: Annotated[list[str], tyro.conf.Positional, flag("[PROMPT ...]", "the start of a document")]
    """What to go on from; several are worked on together."""
    tokens: int = 200
    """How many tokens to write, at most."""
    temperature: float = 0.8
    """Below 1 keeps to likely tokens, 0 takes the most likely."""
    top_k: Annotated[int | None, flag("N", "all")] = None
    """Choose among so many most likely tokens."""
    top_p: Annotated[float | None, flag("P", "1")] = None
    """Choose among the most likely tokens that have this much probability together."""
    stop: Annotated[list[str], tyro.conf.UseAppendAction] = field(default_factory=list)
    """End before this text, for example \\n\\n; may be given several times."""
    seed: int = 0
    """The same seed gives the same text."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to compute."""

    def run(self) -> int:
        """Write to the terminal: a single prompt's text as it comes, several when they are done."""
        if self.tokens < 1:
            raise UsageError(f"--tokens must be at least 1, got {self.tokens}")
        sampling = Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed)
        run = load_run(self.run_folder, device=self.device)
        for notice in run.notices:
            Console(stderr=True, soft_wrap=True).print(f"note: {notice}", markup=False, highlight=False)
        prompts = [os.fsencode(prompt) for prompt in self.prompts or [""]]
        stops = [text.replace("\\n", "\n").replace("\\t", "\t").encode() for text in self.stop]
        tokenizer = run.tokenizer
        tokens = [[tokenizer.end, *tokenizer.encode(prompt)] for prompt in prompts]  # before anything is shown
        rows = [_Row(prompt, stops, shown=len(prompts) == 1) for prompt in prompts]
        for step in stream(run.model, tokens, tokens=self.tokens, sampling=sampling, stop=[tokenizer.end]):
            for row, token in zip(rows, step, strict=True):
                if token is not None:
                    row.add(tokenizer.piece(token))
            if all(row.done for row in rows):
                break
        for row in rows:
            row.close()
        return 0


class _Row:
    """One text in the making: ends before a stop text, and shows whole characters only."""

    def __init__(self, prompt: bytes, stops: list[bytes], *, shown: bool) -> None:
        self.text, self.begin, self.stops, self.shown = prompt, len(prompt), stops, shown
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.told = 0
        self.done = False
        self._show(len(prompt))

    def add(self, piece: bytes) -> None:
        if self.done:
            return
        self.text += piece
        found = [at for stop in self.stops if (at := self.text.find(stop, self.begin)) >= 0]
        if found:
            self.text, self.done = self.text[: min(found)], True
        # the end of the text may be the beginning of a stop text: wait and see
        waiting = max((len(stop) - 1 for stop in self.stops), default=0)
        self._show(len(self.text) if self.done else max(self.told, len(self.text) - waiting))

    def close(self) -> None:
        """Show what is left, and end the line."""
        self.shown = True
        self._show(len(self.text))
        sys.stdout.write(self.decoder.decode(b"", final=True) + "\n")

    def _show(self, end: int) -> None:
        if self.shown and end > self.told:
            sys.stdout.write(self.decoder.decode(self.text[self.told : end]))
            sys.stdout.flush()
            self.told = end
