"""`qkflow eval`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from qkflow.cli.options import flag
from qkflow.data import open_corpus
from qkflow.training import evaluate, load_run


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Measure a trained model on held-out text, in bits per byte and perplexity per token.

    For example:
      qkflow eval runs/diff            the test part of the corpus it was trained on
      qkflow eval runs/diff other.txt  the test part of another text
      qkflow eval runs/diff other.txt --split train --json
    """

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A folder that `qkflow train` made."""
    corpus: Annotated[str | None, tyro.conf.Positional, flag("CORPUS", "the run's own")] = None
    """A file or folder of text, or a name."""
    split: Literal["train", "validation", "test"] = "test"
    """Which part of the corpus."""
    limit: Annotated[int | None, flag("N", "all")] = None
    """About so many tokens of it, as whole documents spread over all."""
    data_dir: Annotated[str | None, flag("DIR")] = None
    """Where named corpora lie."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to compute."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON instead of a sentence."""

    def run(self) -> int:
        """Print the figures."""
        run = load_run(self.run_folder, device=self.device)
        own = run.config.corpus
        given = replace(own, source=self.corpus or own.source, data_dir=self.data_dir or own.data_dir)
        corpus = open_corpus(given, tokenizer=run.tokenizer)
        config = run.config
        result = evaluate(
            run.model,
            {"train": corpus.train, "validation": corpus.validation, "test": corpus.test}[self.split],
            context=config.context,
            batch=config.evaluate_batch,
            stride=config.stride,
            limit=self.limit,
        )
        console = Console(soft_wrap=True, highlight=False)
        for notice in run.notices:
            Console(stderr=True, soft_wrap=True).print(f"note: {notice}", markup=False, highlight=False)
        figures = result.summary()
        if self.json:
            record = {"run": str(run.folder), "step": run.step, "corpus": corpus.name, "digest": corpus.digest}
            console.print(json.dumps({**record, "split": self.split, **figures}, sort_keys=True), markup=False)
            return 0
        console.print(f"{corpus.name} ({corpus.digest[:12]}), {self.split} part", markup=False)
        console.print(f"{figures['bits_per_byte']:.4f} bits per byte, perplexity {result.perplexity:,.3f} per token")
        console.print(
            f"{figures['scored_documents']:,} documents, {figures['scored_bytes']:,} bytes; step {run.step:,}"
        )
        return 0
