"""`qkflow eval`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from qkflow.cli.options import flag
from qkflow.cli.recall_table import percent, tables
from qkflow.data import Corpus, open_corpus
from qkflow.training import CellResult, Evaluation, by_cell, evaluate, load_run


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Measure a trained model: bits per byte of held-out text, or accuracy on a task.

    For example:
      qkflow eval runs/diff            the test part of the corpus it was trained on
      qkflow eval runs/diff other.txt  the test part of another text
      qkflow eval runs/diff other.txt --split train --json
      qkflow eval runs/needle s-niah-2:lengths=512+2048
    """

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A folder that `qkflow train` made."""
    corpus: Annotated[str | None, tyro.conf.Positional, flag("CORPUS", "the run's own")] = None
    """A file or folder of text, or a name; for a run of a task, another spec of it."""
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
        own = run.corpus
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
        if self.json:
            record = {"run": str(run.folder), "step": run.step, "corpus": corpus.name, "digest": corpus.digest}
            record |= {"split": self.split, **result.summary(), **_on_record(corpus, result)}
            console.print(json.dumps(record, sort_keys=True), markup=False)
            return 0
        console.print(f"{corpus.name} ({corpus.digest[:12]}), {self.split} part", markup=False)
        if corpus.task is None:
            _tell_text(console, result, run.step)
        else:
            _tell_task(console, result, run.step, corpus.task)
        return 0


def _on_record(corpus: Corpus, result: Evaluation) -> dict[str, Any]:
    """What JSON tells of a task besides: first what its "bytes" are."""
    if corpus.task is None:
        return {}
    return {"unit": corpus.unit, "chance": corpus.chance, "cells": [_figures(cell) for cell in by_cell(result)]}


def _figures(cell: CellResult) -> dict[str, Any]:
    return {**asdict(cell), "accuracy": cell.accuracy, "low": cell.low, "high": cell.high}


def _tell_text(console: Console, result: Evaluation, step: int) -> None:
    figures = result.summary()
    console.print(f"{figures['bits_per_byte']:.4f} bits per byte, perplexity {result.perplexity:,.3f} per token")
    console.print(f"{figures['scored_documents']:,} documents, {figures['scored_bytes']:,} bytes; step {step:,}")


def _tell_task(console: Console, result: Evaluation, step: int, task: dict[str, Any]) -> None:
    figures = result.summary()
    for table in tables(by_cell(result), task["axes"]):
        console.print(table, soft_wrap=False)
        console.print()
    if "depth" in task["axes"]:
        console.print("accuracy in % and its 95 % interval, by depth of the needle and length")
    right = f"{percent(figures['accuracy'])} of {figures['questions']:,} questions right"
    console.print(f"{right} (chance {percent(task['chance'])})")
    console.print(f"{figures['bits_per_byte']:.4f} bits per answer token; step {step:,}")
