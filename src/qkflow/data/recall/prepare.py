"""Prepare a recall task: generate its instances and write the files of a prepared corpus.

Test instances are generated first, then validation and training, each from its own random stream. An instance that is
already in an earlier split is skipped, so the splits are disjoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from qkflow.config import to_dict
from qkflow.data.recall.base import Instances, RecallCell
from qkflow.data.recall.spec import RecallTask, format_recall_spec
from qkflow.data.text.corpus import CELL_DTYPE, FORMAT, token_dtype, write_record
from qkflow.data.text.tokenizers import Tokenizer, WordTokenizer
from qkflow.errors import UsageError

GENERATOR_VERSION = 1  # increase whenever a spec would give other tokens
BLOCK_TOKENS = 1 << 19  # tokens generated at a time
MAX_TRIES = 20  # instances drawn per new one before the task counts as too small


def cache_key(task: RecallTask) -> str:
    """Return a hash of everything that the prepared files depend on."""
    key = {"format": FORMAT, "generator": GENERATOR_VERSION, "task": task.name, "config": to_dict(task)}
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def write_task(folder: Path, task: RecallTask) -> None:
    """Write the tokenizer, the splits and the record of a task into `folder`."""
    tokenizer = WordTokenizer(task.words)
    seen: set[bytes] = set()
    counts: dict[str, dict[str, int]] = {}
    digest = hashlib.sha256(json.dumps(tokenizer.to_json(), sort_keys=True).encode())
    for split, cells, count in (
        ("test", task.grid(), task.each),
        ("validation", (None,), task.validation),
        ("train", (None,), task.train),
    ):
        instances = _new_instances(task, split, cells, count, seen)
        counts[split] = _write_split(folder, split, instances, tokenizer, digest.update)
    record = {
        "name": task.name,
        "spec": format_recall_spec(task),
        "context": task.length,
        "chance": task.chance,
        "axes": list(task.axes),
        "config": to_dict(task),
        "generator": GENERATOR_VERSION,
    }
    write_record(
        folder,
        name=format_recall_spec(task),
        digest=digest.hexdigest(),
        tokenizer=tokenizer,
        counts=counts,
        details={"task": record},
    )


def _new_instances(
    task: RecallTask, split: str, cells: tuple[RecallCell | None, ...], count: int, seen: set[bytes]
) -> Iterator[Instances]:
    """Yield `count` instances per cell that are in no earlier split, in blocks; add their hashes to `seen`."""
    earlier = frozenset(seen)
    for cell in cells:
        length = task.length if cell is None else cell.length
        seed = f"{task.seed}/{split}/{cell and tuple(cell)}"
        n_drawn = n_kept = 0
        while n_kept < count:
            if n_drawn > MAX_TRIES * (count + 1):
                raise UsageError(
                    f"{format_recall_spec(task)} has too few different instances for {count} new ones in {split}: "
                    "request fewer instances, or use longer texts or answers"
                )
            block = max(1, min(BLOCK_TOKENS // length, count - n_kept))
            instances = task.draw(cell, seed=seed, first=n_drawn, count=block)
            n_drawn += block
            if earlier:
                instances = instances.select(np.array([digest not in earlier for digest in _hashes(instances)]))
            if split != "train":
                seen.update(_hashes(instances))
            n_kept += len(instances.tokens)
            yield instances


def _hashes(instances: Instances) -> list[bytes]:
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in np.ascontiguousarray(instances.tokens)]


def _write_split(
    folder: Path, split: str, blocks: Iterator[Instances], tokenizer: Tokenizer, update: Callable[[bytes], None]
) -> dict[str, int]:
    """Write the files of a split and pass their content to `update`; return its documents, answers and tokens."""
    dtype, n_tokens = token_dtype(tokenizer), 1
    spans, sizes, answers, cells = [], [], [], []
    with open(folder / f"{split}.tokens", "wb") as file:
        file.write(np.array([tokenizer.end], dtype=dtype).tobytes())
        for instances in blocks:
            count, length = instances.tokens.shape
            rows = np.pad(instances.tokens, ((0, 0), (0, 1)), constant_values=tokenizer.end).astype(dtype).tobytes()
            file.write(rows)
            update(rows)
            begins = n_tokens + (length + 1) * np.arange(count)
            spans.append(np.column_stack([begins, begins + length]))
            instance, begin, end = instances.answers.T
            answers.append(begins[instance, None] + np.column_stack([begin, end]))
            sizes.append(np.bincount(instance, weights=end - begin, minlength=count))
            cells.append(instances.cells)
            n_tokens += len(rows) // np.dtype(dtype).itemsize
    for name, arrays in (("spans", spans), ("sizes", sizes), ("answers", answers), ("cells", cells)):
        table = np.concatenate(arrays).astype(CELL_DTYPE if name == "cells" else "<i8")
        np.save(folder / f"{split}.{name}.npy", table)
        update(table.tobytes())
    return {"documents": sum(map(len, spans)), "answers": sum(map(len, answers)), "tokens": n_tokens}
