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
    """Evaluate a trained model: bits per byte of text, or accuracy on a recall task.

    For example:
      qkflow eval runs/diff            test split of its training corpus
      qkflow eval runs/diff other.txt  test split of another text
      qkflow eval runs/diff other.txt --split train --json
      qkflow eval runs/needle s-niah-2:lengths=512+2048
    """

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder."""
    corpus: Annotated[str | None, tyro.conf.Positional, flag("CORPUS", "the run's own")] = None
    """Another text or named corpus; for a run on a recall task, another spec of it."""
    split: Literal["train", "validation", "test"] = "test"
    """Split of the corpus."""
    limit: Annotated[int | None, flag("N", "all")] = None
    """Evaluate about this many tokens, as evenly spaced whole documents."""
    data_dir: Annotated[str | None, flag("DIR")] = None
    """Folder with the files of named corpora."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON."""

    def run(self) -> int:
        """Evaluate and print the results."""
        run = load_run(self.run_folder, device=self.device)
        own = run.corpus
        source = replace(own, source=self.corpus or own.source, data_dir=self.data_dir or own.data_dir)
        corpus = open_corpus(source, tokenizer=run.tokenizer)
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
            record |= {"split": self.split, **result.summary(), **_recall_record(corpus, result)}
            console.print(json.dumps(record, sort_keys=True), markup=False)
            return 0
        console.print(f"{corpus.name} ({corpus.digest[:12]}), {self.split} split", markup=False)
        if corpus.task is None:
            _print_text(console, result, run.step)
        else:
            _print_recall(console, result, run.step, corpus.task)
        return 0


def _recall_record(corpus: Corpus, result: Evaluation) -> dict[str, Any]:
    """Further results of a recall task; "unit" says what its "bytes" are."""
    if corpus.task is None:
        return {}
    return {"unit": corpus.unit, "chance": corpus.chance, "cells": [_cell_record(cell) for cell in by_cell(result)]}


def _cell_record(cell: CellResult) -> dict[str, Any]:
    return {**asdict(cell), "accuracy": cell.accuracy, "low": cell.low, "high": cell.high}


def _print_text(console: Console, result: Evaluation, step: int) -> None:
    results = result.summary()
    console.print(f"{results['bits_per_byte']:.4f} bits per byte, perplexity {result.perplexity:,.3f} per token")
    console.print(f"{results['scored_documents']:,} documents, {results['scored_bytes']:,} bytes; step {step:,}")


def _print_recall(console: Console, result: Evaluation, step: int, task: dict[str, Any]) -> None:
    results = result.summary()
    for table in tables(by_cell(result), task["axes"]):
        console.print(table, soft_wrap=False)
        console.print()
    if "depth" in task["axes"]:
        console.print("accuracy in % and its 95 % interval, by depth of the needle and length")
    right = f"{percent(results['accuracy'])} of {results['questions']:,} questions right"
    console.print(f"{right} (chance {percent(task['chance'])})")
    console.print(f"{results['bits_per_byte']:.4f} bits per answer token; step {step:,}")
