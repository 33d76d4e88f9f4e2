"""A recall task as a prepared corpus: the files of `corpus.py`'s table, made from the task's config alone.

Test instances are made first, then those of validation and training, each from a stream of its own; one that an
earlier part has is passed over, so that no instance is in two parts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from qkflow import io
from qkflow.config import to_dict
from qkflow.data.recall.base import Cell, Instances
from qkflow.data.recall.spec import RecallTask, to_spec
from qkflow.data.text.corpus import CELL_DTYPE, FORMAT, RECORD
from qkflow.data.text.tokenizers import Tokenizer, WordTokenizer, save_tokenizer
from qkflow.data.text.writing import token_type
from qkflow.errors import UsageError

VERSION = 1  # of the generators: another one whenever a spec would give other tokens
BLOCK = 1 << 19  # tokens made at a time
PATIENCE = 20  # instances tried for each that is kept, before the task is held to be too small


def key(task: RecallTask) -> str:
    """A hash of everything that decides the prepared files."""
    what = {"format": FORMAT, "generator": VERSION, "task": task.name, "config": to_dict(task)}
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]


def fill(folder: Path, task: RecallTask) -> None:
    """Write the task's tokenizer, parts and record into `folder`."""
    tokenizer = WordTokenizer(task.words)
    seen: set[bytes] = set()
    counts: dict[str, dict[str, int]] = {}
    digest = hashlib.sha256(json.dumps(tokenizer.to_json(), sort_keys=True).encode())
    for part, cells, count in (
        ("test", task.grid(), task.each),
        ("validation", (None,), task.validation),
        ("train", (None,), task.train),
    ):
        before = frozenset(seen)
        instances = (made for cell in cells for made in _made(task, part, cell, count, before))
        counts[part] = _write(folder, part, _noted(instances, seen, kept=part != "train"), tokenizer, digest.update)
    save_tokenizer(tokenizer, folder / "tokenizer.json")
    record: dict[str, Any] = {
        "format": FORMAT,
        "name": to_spec(task),
        "digest": digest.hexdigest(),
        "tokens": tokenizer.kind,
        "vocabulary": tokenizer.vocabulary,
        "end": tokenizer.end,
        "dtype": token_type(tokenizer),
        "task": {
            "name": task.name,
            "spec": to_spec(task),
            "context": task.length,
            "chance": task.chance,
            "axes": list(task.axes),
            "config": to_dict(task),
            "generator": VERSION,
        },
        "parts": counts,
        "files": {file.name: file.stat().st_size for file in sorted(folder.iterdir())},
    }
    io.write_json(folder / RECORD, record)


def _made(task: RecallTask, part: str, cell: Cell | None, count: int, seen: frozenset[bytes]) -> Iterator[Instances]:
    """`count` instances of a cell that no earlier part has, a block at a time."""
    length = task.length if cell is None else cell.length
    seed = f"{task.seed}/{part}/{cell and tuple(cell)}"
    first = kept = 0
    while kept < count:
        if first > PATIENCE * (count + 1):
            few = f"{to_spec(task)} has too few different instances to fill {part} with {count} that are new"
            raise UsageError(f"{few}: ask for fewer, or give longer texts or answers")
        size = max(1, min(BLOCK // length, count - kept))
        made = task.draw(cell, seed=seed, first=first, count=size)
        first += size
        if seen:
            made = made.where(np.array([name not in seen for name in _names(made)]))
        kept += len(made.tokens)
        yield made


def _noted(instances: Iterator[Instances], seen: set[bytes], *, kept: bool) -> Iterator[Instances]:
    """The same, each remembered for the parts that follow."""
    for made in instances:
        if kept:
            seen.update(_names(made))
        yield made


def _names(made: Instances) -> list[bytes]:
    """A short hash of each instance."""
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in np.ascontiguousarray(made.tokens)]


def _write(
    folder: Path, part: str, instances: Iterator[Instances], tokenizer: Tokenizer, watch: Callable[[bytes], None]
) -> dict[str, int]:
    """The files of one part, their content told to `watch`; how many documents, answers and tokens it has."""
    dtype, at = token_type(tokenizer), 1
    spans, sizes, answers, cells = [], [], [], []
    with open(folder / f"{part}.tokens", "wb") as file:
        file.write(np.array([tokenizer.end], dtype=dtype).tobytes())
        for made in instances:
            count, length = made.tokens.shape
            closed = np.pad(made.tokens, ((0, 0), (0, 1)), constant_values=tokenizer.end).astype(dtype).tobytes()
            file.write(closed)
            watch(closed)
            begins = at + (length + 1) * np.arange(count)
            spans.append(np.column_stack([begins, begins + length]))
            instance, begin, end = made.answers.T
            answers.append(begins[instance, None] + np.column_stack([begin, end]))
            sizes.append(np.bincount(instance, weights=end - begin, minlength=count))
            cells.append(made.cells)
            at += len(closed) // np.dtype(dtype).itemsize
    for name, blocks in (("spans", spans), ("sizes", sizes), ("answers", answers), ("cells", cells)):
        table = np.concatenate(blocks).astype(CELL_DTYPE if name == "cells" else "<i8")
        np.save(folder / f"{part}.{name}.npy", table)
        watch(table.tobytes())
    return {"documents": sum(map(len, spans)), "answers": sum(map(len, answers)), "tokens": at}
