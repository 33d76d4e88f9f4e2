"""`qkflow eval`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.table import Table

from qkflow.cli.console import Console
from qkflow.cli.options import flag, print_notices
from qkflow.data import Corpus, open_corpus
from qkflow.formatting import MISSING, format_accuracy
from qkflow.training import CellResult, Evaluation, by_cell, evaluate, load_run, together
from qkflow.training.run_dir import recorded_digest

_MAX_DEPTHS = 21
"""Maximum number of rows; more depths are grouped into bands, since training instances have any depth."""
_BAND = 10
"""Width of a band, in percent."""
_MAX_LENGTHS = 6
"""Columns per table: as many as fit into 80 characters with their intervals."""


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
    binary: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Accept bytes that are not text, such as UTF-16 or programs."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON."""

    def run(self) -> int:
        """Evaluate and print the results."""
        run = load_run(self.run_folder, device=self.device)
        own = run.data
        source = replace(own, source=self.corpus or own.source, data_dir=self.data_dir or own.data_dir)
        source = replace(source, binary=self.binary or own.binary)
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
        print_notices(run.notices + corpus.notices)
        digest = recorded_digest(run.folder)
        if source.source == own.source and digest is not None and digest != corpus.digest:
            changed = f"{corpus.name} has changed since the run was trained on it"
            print_notices([f"{changed} (its SHA-256 was {digest[:12]}...)"])
        if self.json:
            record = {"run": str(run.folder), "step": run.step, "data": corpus.name, "digest": corpus.digest}
            record |= {"split": self.split, **result.summary(), **_recall_record(corpus, result)}
            console.print(json.dumps(record, sort_keys=True), markup=False)
            return 0
        console.print(f"{corpus.name} ({corpus.digest[:12]}), {self.split} split", markup=False)
        summary = result.summary()
        if corpus.task is None:
            console.print(
                f"{summary['bits_per_byte']:.4f} bits per byte, perplexity {result.perplexity:,.3f} per token"
            )
            documents, size = summary["scored_documents"], summary["scored_bytes"]
            console.print(f"{documents:,} documents, {size:,} bytes; step {run.step:,}")
            return 0
        for table in recall_tables(by_cell(result), corpus.task["axes"]):
            console.print(table, soft_wrap=False)
            console.print()
        if "depth" in corpus.task["axes"]:
            console.print("accuracy in % and its 95 % interval, by depth of the needle and length")
        right = f"{format_accuracy(summary['accuracy'])} of {summary['questions']:,} questions right"
        console.print(f"{right} (chance {format_accuracy(corpus.task['chance'])})")
        console.print(f"{summary['bits_per_byte']:.4f} bits per answer token; step {run.step:,}")
        return 0


def _recall_record(corpus: Corpus, result: Evaluation) -> dict[str, Any]:
    """Further results of a recall task; "unit" says what its "bytes" are."""
    if corpus.task is None:
        return {}
    cells = [
        {**asdict(cell), "accuracy": cell.accuracy, "low": cell.low, "high": cell.high} for cell in by_cell(result)
    ]
    return {"unit": corpus.unit, "chance": corpus.chance, "cells": cells}


def recall_tables(cells: Sequence[CellResult], axes: Sequence[str]) -> Iterator[Table]:
    """Tables of a grid: one row per number of pairs, or one row per depth and one column per length."""
    if "depth" not in axes:
        yield _by_pairs(cells)
        return
    lengths = sorted({cell.length or 0 for cell in cells})
    for begin in range(0, len(lengths), _MAX_LENGTHS):
        yield _by_depth(cells, lengths[begin : begin + _MAX_LENGTHS])


def _by_pairs(cells: Sequence[CellResult]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("pairs", "length", "accuracy", "95 % interval", "questions"):
        table.add_column(column, justify="right", no_wrap=True)
    for cell in cells:
        interval = f"{100 * cell.low:.1f} to {100 * cell.high:.1f} %"
        table.add_row(
            f"{cell.pairs:,}", f"{cell.length:,}", format_accuracy(cell.accuracy), interval, f"{cell.questions:,}"
        )
    return table


def _by_depth(cells: Sequence[CellResult], lengths: Sequence[int]) -> Table:
    """Accuracies in percent with their intervals; the last row is the mean over depths."""
    table = Table(box=None, pad_edge=False)
    table.add_column("depth", justify="right", no_wrap=True)
    for length in lengths:
        table.add_column(f"{length:,}", justify="right", no_wrap=True)
    for name, depths in _bands(sorted({cell.depth or 0 for cell in cells})):
        row = [[cell for cell in cells if cell.length == length and cell.depth in depths] for length in lengths]
        table.add_row(name, *map(_brief, row))
    columns = [[cell for cell in cells if cell.length == length] for length in lengths]
    table.add_row("mean", *map(_brief, columns), style="bold")
    return table


def _bands(depths: Sequence[int]) -> list[tuple[str, Sequence[int]]]:
    """Labels and their depths: one depth each, or bands if there are too many."""
    if len(depths) <= _MAX_DEPTHS:
        return [(f"{depth} %", [depth]) for depth in depths]
    firsts = range(0, 100, _BAND)
    bands = [(first, 100 if first == firsts[-1] else first + _BAND - 1) for first in firsts]
    return [(f"{first}-{last} %", range(first, last + 1)) for first, last in bands]


def _brief(cells: Sequence[CellResult]) -> str:
    if not cells:
        return MISSING
    cell = together(cells)
    return f"{100 * cell.accuracy:.0f} [dim]{100 * cell.low:.0f}-{100 * cell.high:.0f}[/]"
