"""`qkflow generate`."""

from __future__ import annotations

import codecs
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from qkflow.cli.options import flag
from qkflow.data import Tokenizer
from qkflow.errors import UsageError
from qkflow.models import Sampling, generate, stream
from qkflow.training import LoadedRun, load_run


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Write text with a trained model, shown as it comes.

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
    """End at this text's first token, for example a newline; may be given several times."""
    seed: int = 0
    """The same seed gives the same text."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to compute."""

    def run(self) -> int:
        """Write to the terminal."""
        run = load_run(self.run_folder, device=self.device)
        for notice in run.notices:
            Console(stderr=True, soft_wrap=True).print(f"note: {notice}", markup=False, highlight=False)
        if self.tokens < 1:
            raise UsageError(f"--tokens must be at least 1, got {self.tokens}")
        sampling = Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed)
        tokenizer = run.tokenizer
        stops = [tokenizer.end, *(_first(tokenizer, text) for text in self.stop)]
        prompts = [[tokenizer.end, *tokenizer.encode(prompt.encode())] for prompt in self._prompts]
        if len(prompts) == 1:
            self._stream(run, prompts[0], sampling, stops)
            return 0
        rows = generate(run.model, prompts, tokens=self.tokens, sampling=sampling, stop=stops)
        for prompt, row in zip(self._prompts, rows, strict=True):
            sys.stdout.write(f"{prompt}{tokenizer.decode(row).decode(errors='replace')}\n\n")
        return 0

    @property
    def _prompts(self) -> list[str]:
        return self.prompts or [""]

    def _stream(self, run: LoadedRun, prompt: list[int], sampling: Sampling, stops: list[int]) -> None:
        """Show whole characters only: a token may end in the middle of one."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        sys.stdout.write(self._prompts[0])
        for (token,) in stream(run.model, [prompt], tokens=self.tokens, sampling=sampling, stop=stops):
            if token is not None:
                sys.stdout.write(decoder.decode(run.tokenizer.decode([token])))
                sys.stdout.flush()
        sys.stdout.write(decoder.decode(b"", final=True) + "\n")


def _first(tokenizer: Tokenizer, text: str) -> int:
    tokens = tokenizer.encode(text.encode().decode("unicode_escape").encode("latin-1"))
    if len(tokens) != 1:
        raise UsageError(f"--stop takes a text that is one token, {text!r} is {len(tokens)}: give a single character")
    return tokens[0]
