"""A prepared corpus: memory-mapped tokens with the spans and byte sizes of the documents.

A prepared folder contains, for each SPLIT of train, validation and test:

| file                | content                                                                |
|---------------------|------------------------------------------------------------------------|
| `SPLIT.tokens`      | the token stream, little-endian uint16 or uint32                       |
| `SPLIT.spans.npy`   | int64 `[n, 2]`: begin and end of each document's tokens                |
| `SPLIT.sizes.npy`   | int64 `[n]`: bytes of each document (recall tasks: its answer tokens)  |
| `SPLIT.answers.npy` | recall tasks only: int64 `[m, 2]`, the spans of the answers            |
| `SPLIT.cells.npy`   | recall tasks only: `[n]` of dtype `CELL_DTYPE`                         |

and `tokenizer.json` and `corpus.json`, the record of how it was prepared. The stream starts with one token of context C
(the end token E, or the last token of the previous split if a document continues), so that every document token has a
predecessor: `C document E document E ...`. Passages of one text follow each other without an end token.

The documents of a recall task are its instances, and its losses are per answer token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qkflow.data.text.tokenizers import TOKENIZER_FILE, Ids, Tokenizer, load_tokenizer, save_tokenizer
from qkflow.errors import UsageError
from qkflow.io import write_json

FORMAT = 2
RECORD_FILE = "corpus.json"
CELL_DTYPE = np.dtype([("pairs", "<i8"), ("length", "<i8"), ("depth", "<i8")])
"""Test-grid cell of a recall instance: pairs, tokens, needle depth in percent; -1 if not applicable."""


class DamagedCorpusError(UsageError):
    """A prepared folder lacks a file, has a file of the wrong size, or has another format."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """The train, validation or test split of a corpus.

    >>> Split(tokens=np.array([256, 104, 105, 256]), documents=np.array([[1, 3]]), sizes=np.array([2])).bytes
    2
    """

    tokens: np.ndarray
    """The token stream `[t]`, uint16 or uint32, read-only and memory-mapped."""
    documents: np.ndarray
    """int64 `[n, 2]`: the span [begin, end) of each document's tokens."""
    sizes: np.ndarray
    """int64 `[n]`: bytes of each document, or the number of its answer tokens in a recall task."""
    answers: np.ndarray | None = None
    """int64 `[m, 2]`: the span [begin, end) of each answer, in order; None for text, where every token is scored."""
    cells: np.ndarray | None = None
    """`[n]` of dtype `CELL_DTYPE`; None for text."""

    @property
    def bytes(self) -> int:
        """Total bytes of all documents, or total answer tokens in a recall task."""
        return int(self.sizes.sum())


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A prepared corpus: its splits, its tokenizer and its record."""

    name: str
    digest: str
    """SHA-256 of the text, or of a task's files: equal digests mean equal documents."""
    folder: Path
    """The prepared folder; `Corpus.at` opens it again."""
    record: dict[str, Any]
    """Content of `corpus.json`: format, split rule, counts, versions."""
    tokenizer: Tokenizer
    train: Split
    validation: Split
    """Evaluated during training."""
    test: Split
    """Evaluated after training."""
    notices: tuple[str, ...] = ()
    """Messages for the user about the text."""

    @property
    def vocabulary(self) -> int:
        """Number of tokens, including the end-of-document token."""
        return self.tokenizer.vocabulary

    @property
    def task(self) -> dict[str, Any] | None:
        """Record of a recall task (`name`, `spec`, `context`, `chance`, `axes`, ...); None for text."""
        return self.record.get("task")

    @property
    def context(self) -> int | None:
        """Tokens per training instance of a recall task; None for text, which allows any context length."""
        return None if self.task is None else int(self.task["context"])

    @property
    def chance(self) -> float | None:
        """Accuracy of random guessing in a recall task; None for text."""
        return None if self.task is None else float(self.task["chance"])

    @property
    def unit(self) -> str:
        """Unit of the loss: per `byte` for text, per `answer token` for a recall task."""
        return "byte" if self.task is None else "answer token"

    def decode(self, ids: Ids) -> bytes:
        """Return the bytes of the tokens; end tokens are skipped."""
        return self.tokenizer.decode(ids)

    @classmethod
    def at(cls, folder: Path | str) -> Corpus:
        """Open a prepared folder; raise a `DamagedCorpusError` if a file is missing or has the wrong size."""
        folder = Path(folder)
        hint = "delete it and prepare the corpus again"
        try:
            record = json.loads((folder / RECORD_FILE).read_text())
            if record["format"] != FORMAT:
                raise DamagedCorpusError(f"{folder} has another format, expected {FORMAT}: {hint}")
            for file, n_bytes in record["files"].items():
                if not (folder / file).is_file() or (folder / file).stat().st_size != n_bytes:
                    raise DamagedCorpusError(f"{folder / file} is missing or does not have {n_bytes} bytes: {hint}")
            dtype, name, digest = np.dtype(record["dtype"]), record["name"], record["digest"]
            is_task = record.get("task") is not None
            train, validation, test = (
                _open_split(folder, split, dtype, is_task) for split in ("train", "validation", "test")
            )
            tokenizer = load_tokenizer(folder / TOKENIZER_FILE)
        except UsageError:
            raise
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedCorpusError(f"{folder} is not a prepared corpus, or damaged ({error}): {hint}") from error
        return cls(
            name=name,
            digest=digest,
            folder=folder,
            record=record,
            tokenizer=tokenizer,
            train=train,
            validation=validation,
            test=test,
        )


def write_record(
    folder: Path, *, name: str, digest: str, tokenizer: Tokenizer, counts: dict[str, Any], details: dict[str, Any]
) -> None:
    """Write the tokenizer and the record of a prepared corpus, after its splits; `details` are added to the record."""
    save_tokenizer(tokenizer, folder / TOKENIZER_FILE)
    record = {
        "format": FORMAT,
        "name": name,
        "digest": digest,
        "tokens": tokenizer.kind,
        "vocabulary": tokenizer.vocabulary,
        "end": tokenizer.end,
        "dtype": token_dtype(tokenizer),
        "parts": counts,
        "files": {file.name: file.stat().st_size for file in sorted(folder.iterdir())},
    }
    write_json(folder / RECORD_FILE, record | details)


def token_dtype(tokenizer: Tokenizer) -> str:
    """Return the narrowest little-endian type that holds every token."""
    return "<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4"


def _open_split(folder: Path, split: str, dtype: np.dtype[Any], is_task: bool) -> Split:
    def load(kind: str) -> np.ndarray:
        return np.load(folder / f"{split}.{kind}.npy", mmap_mode="r", allow_pickle=False)

    return Split(
        tokens=np.memmap(folder / f"{split}.tokens", dtype=dtype, mode="r"),
        documents=load("spans"),
        sizes=load("sizes"),
        answers=load("answers") if is_task else None,
        cells=load("cells") if is_task else None,
    )
