"""A prepared corpus: tokens on disk, mapped into memory, with the spans and byte sizes of its documents.

A prepared folder holds, for each part of train, validation and test:

| file               | content                                                             |
|--------------------|---------------------------------------------------------------------|
| `PART.tokens`      | the token stream, little-endian uint16 or uint32                    |
| `PART.spans.npy`   | int64 `[n, 2]`: where each document's own tokens begin and end      |
| `PART.sizes.npy`   | int64 `[n]`: the bytes of each document, or its answers' tokens     |
| `PART.answers.npy` | recall tasks only: int64 `[m, 2]`, the spans of the answers         |
| `PART.cells.npy`   | recall tasks only: `[n]` of dtype `CELL_DTYPE`, what each document asks   |

and `tokenizer.json` and `corpus.json`, the record. The stream begins with one token of context C (the end token E, or
the last token of the part before where one text goes on), so that every document token has a token before it:
`C document E document E ...`; passages of one text follow each other without an end token between them. The documents
of a recall task are its instances, and their sizes the tokens of their answers: there, losses are per answer token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qkflow.data.text.tokenizers import Ids, Tokenizer, load_tokenizer
from qkflow.errors import UsageError

FORMAT = 1
RECORD = "corpus.json"
CELL_DTYPE = np.dtype([("pairs", "<i8"), ("length", "<i8"), ("depth", "<i8")])
"""What a document of a recall task asks: pairs, tokens, the needle's depth in percent; -1 where there is none."""


class DamagedError(UsageError):
    """A prepared folder is missing a file, or has one of the wrong size, or is of another format."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """The train, validation or test part of a corpus.

    >>> Split(tokens=np.array([256, 104, 105, 256]), documents=np.array([[1, 3]]), sizes=np.array([2])).bytes
    2
    """

    tokens: np.ndarray
    """The token stream `[t]`, uint16 or uint32, read-only and mapped from disk."""
    documents: np.ndarray
    """int64 `[n, 2]`: the span [begin, end) of each document's own tokens."""
    sizes: np.ndarray
    """int64 `[n]`: the bytes of each document, or the tokens of its answers where it has any."""
    answers: np.ndarray | None = None
    """int64 `[m, 2]`: the span [begin, end) of each answer's tokens, in order; None for text: every token counts."""
    cells: np.ndarray | None = None
    """`[n]` of dtype `CELL_DTYPE`: what each document asks; None for text."""

    @property
    def bytes(self) -> int:
        """Bytes of all documents together, or tokens of all answers."""
        return int(self.sizes.sum())


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Tokens, their tokenizer, and the record of how they came about."""

    name: str
    """What people call it."""
    digest: str
    """SHA-256 of the text, or of a task's files, in hex: equal digests mean equal documents."""
    folder: Path
    """Where it is prepared; `Corpus.at` opens it again."""
    record: dict[str, Any]
    """Everything on record about it: format, split rule, counts, versions."""
    tokenizer: Tokenizer
    """Text to tokens and back."""
    train: Split
    """What is learnt from."""
    validation: Split
    """What is watched during training."""
    test: Split
    """What is reported at the end."""

    @property
    def vocabulary(self) -> int:
        """How many tokens there are, the end-of-document token included."""
        return self.tokenizer.vocabulary

    @property
    def end(self) -> int:
        """The end-of-document token."""
        return self.tokenizer.end

    @property
    def task(self) -> dict[str, Any] | None:
        """The record of a recall task (`name`, `spec`, `context`, `chance`, `axes`, ..), or None for text."""
        return self.record.get("task")

    @property
    def context(self) -> int | None:
        """The tokens of a task's training instances; None for text, which takes any context length."""
        return None if self.task is None else int(self.task["context"])

    @property
    def chance(self) -> float | None:
        """The accuracy of guessing the answers of a task; None for text."""
        return None if self.task is None else float(self.task["chance"])

    @property
    def unit(self) -> str:
        """What losses are per: `byte` for text, `answer token` for a task."""
        return "byte" if self.task is None else "answer token"

    def encode(self, text: str | bytes) -> list[int]:
        """The tokens of a text."""
        return self.tokenizer.encode(text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text)

    def decode(self, ids: Ids) -> bytes:
        """The bytes of some tokens; end tokens give none."""
        return self.tokenizer.decode(ids)

    @classmethod
    def at(cls, folder: Path | str) -> Corpus:
        """Open a prepared folder; a missing file or one of the wrong size is a `UsageError` that names it."""
        folder = Path(folder)
        record = _record(folder)
        try:
            dtype, name, digest = np.dtype(record["dtype"]), record["name"], record["digest"]
            task = record.get("task") is not None
            splits = {part: _split(folder, part, dtype, task) for part in ("train", "validation", "test")}
            tokenizer = load_tokenizer(folder / "tokenizer.json")
        except (OSError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, UsageError):
                raise
            raise DamagedError(f"{folder} is damaged ({error}): remove it and prepare the corpus again") from error
        return cls(name=name, digest=digest, folder=folder, record=record, tokenizer=tokenizer, **splits)


def _record(folder: Path) -> dict[str, Any]:
    try:
        record = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError) as error:
        raise DamagedError(f"{folder} is not a prepared corpus (no readable {RECORD}): prepare it again") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT or not isinstance(record.get("files"), dict):
        raise DamagedError(f"{folder} is of another format than {FORMAT}: remove it and prepare the corpus again")
    for name, size in record["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise DamagedError(f"{path} is missing or not {size} bytes long: remove {folder} and prepare it again")
    return record


def _split(folder: Path, part: str, dtype: np.dtype[Any], task: bool) -> Split:
    def numbers(kind: str) -> np.ndarray:
        return np.load(folder / f"{part}.{kind}.npy", mmap_mode="r", allow_pickle=False)

    return Split(
        tokens=np.memmap(folder / f"{part}.tokens", dtype=dtype, mode="r"),
        documents=numbers("spans"),
        sizes=numbers("sizes"),
        answers=numbers("answers") if task else None,
        cells=numbers("cells") if task else None,
    )
