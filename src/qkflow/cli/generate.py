"""`qkflow generate`."""

from __future__ import annotations

import codecs
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from qkflow.cli.options import flag, print_notices
from qkflow.errors import UsageError
from qkflow.models import Sampling, stream
from qkflow.training import load_run


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Generate text with a trained model.

    One prompt is streamed; several are printed when all are finished.

    For example:
      qkflow generate runs/diff "def main("
      qkflow generate runs/diff "class " --tokens 400 --temperature 0.8 --top-p 0.95
      qkflow generate runs/diff "import " "from " --temperature 0
    """

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder, written by `qkflow train`."""
    prompts: Annotated[list[str], tyro.conf.Positional, flag("[PROMPT ...]", "the start of a document")]
    """Prompts, processed as one batch."""
    tokens: int = 200
    """Maximum number of new tokens per prompt."""
    temperature: float = 0.8
    """Sampling temperature; 0 takes the most likely token."""
    top_k: Annotated[int | None, flag("N", "all")] = None
    """Sample from the N most likely tokens."""
    top_p: Annotated[float | None, flag("P", "1")] = None
    """Sample from the most likely tokens whose total probability is P."""
    stop: Annotated[list[str], tyro.conf.UseAppendAction] = field(default_factory=list)
    """Stop before this text, for example \\n\\n."""
    seed: int = 0
    """Random seed of the sampling."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device."""

    def run(self) -> int:
        """Print the prompts and what the model writes after them."""
        if self.tokens < 1:
            raise UsageError(f"--tokens must be at least 1, got {self.tokens}")
        sampling = Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed)
        run = load_run(self.run_folder, device=self.device)
        print_notices(run.notices)
        prompts = [os.fsencode(prompt) for prompt in self.prompts or [""]]
        stops = [text.replace("\\n", "\n").replace("\\t", "\t").encode() for text in self.stop]
        tokenizer = run.tokenizer
        tokens = [[tokenizer.end, *tokenizer.encode(prompt)] for prompt in prompts]  # may fail: before any output
        rows = [_Output(prompt, stops, is_streamed=len(prompts) == 1) for prompt in prompts]
        for step in stream(run.model, tokens, tokens=self.tokens, sampling=sampling, stop=[tokenizer.end]):
            for row, token in zip(rows, step, strict=True):
                if token is not None:
                    row.add(tokenizer.piece(token))
            if all(row.has_stopped for row in rows):
                break
        for row in rows:
            row.close()
        return 0


class _Output:
    """The text of one prompt: ends before a stop string, and prints whole characters only."""

    def __init__(self, prompt: bytes, stops: list[bytes], *, is_streamed: bool) -> None:
        self.text, self.prompt_length, self.stops, self.is_streamed = prompt, len(prompt), stops, is_streamed
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.printed = 0
        self.has_stopped = False
        self._print(len(prompt))

    def add(self, piece: bytes) -> None:
        """Append the bytes of a token."""
        if self.has_stopped:
            return
        self.text += piece
        starts = [start for stop in self.stops if (start := self.text.find(stop, self.prompt_length)) >= 0]
        if starts:
            self.text, self.has_stopped = self.text[: min(starts)], True
        # the last bytes may be the beginning of a stop string, so hold them back
        held_back = max((len(stop) - 1 for stop in self.stops), default=0)
        self._print(len(self.text) if self.has_stopped else max(self.printed, len(self.text) - held_back))

    def close(self) -> None:
        """Print the rest and end the line."""
        self.is_streamed = True
        self._print(len(self.text))
        sys.stdout.write(self.decoder.decode(b"", final=True) + "\n")

    def _print(self, end: int) -> None:
        if self.is_streamed and end > self.printed:
            sys.stdout.write(self.decoder.decode(self.text[self.printed : end]))
            sys.stdout.flush()
            self.printed = end
