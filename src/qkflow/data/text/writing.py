"""The token files of a prepared corpus, written as the text flows by."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from qkflow.data.text.splits import PARTS, Join, Piece
from qkflow.data.text.tokenizers import Tokenizer

BATCH = 4 << 20  # bytes of text encoded at a time
WORD_END = re.compile(rb"[!-~](?:\n|(?= ))(?= ?[!-~])")
NUMBERS = 1 << 16  # numbers kept before they go to disk


def write_parts(folder: Path, pieces: Iterable[Piece], tokenizer: Tokenizer) -> dict[str, dict[str, int]]:
    """Encode the pieces into the files of `corpus.py`'s table; how many documents, bytes and tokens each part has."""
    with ExitStack() as stack:
        writers = {part: stack.enter_context(_Part(folder, part, token_type(tokenizer))) for part in PARTS}
        open_part: _Part | None = None
        last = tokenizer.end
        for batch in _batches(pieces):
            for piece, ids in zip(batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True):
                writer = writers[piece.part]
                if piece.join is not Join.SPAN:
                    if open_part:
                        open_part.finish(tokenizer.end if piece.join is Join.DOCUMENT else None)
                    writer.begin(tokenizer.end if piece.join is Join.DOCUMENT else last)
                    open_part = writer
                writer.put(ids, len(piece.text))
                last = int(ids[-1])
        if open_part:
            open_part.finish(tokenizer.end)
    return {part: writer.counts for part, writer in writers.items()}


def whole_words(pieces: Iterable[Piece], size: int = 1 << 20) -> Iterator[Piece]:
    r"""The same text cut again, into pieces of at most `size` bytes (from 4 on) with the BPE tokens of the whole.

    BPE takes a space with the word after it, and a single newline between visible ASCII characters alone; so cuts come
    before such a space or after such a newline. In a text without either they come between two UTF-8 characters, and
    the tokens there may be others.

    >>> pieces = [Piece("train", Join.DOCUMENT, b"one\ntw"), Piece("train", Join.SPAN, b"o three")]
    >>> [piece.text for piece in whole_words(pieces, size=7)]
    [b'one\ntwo', b' three']
    """
    part, join, kept = "", Join.DOCUMENT, b""
    for piece in pieces:
        if piece.join is not Join.SPAN:
            if kept:
                yield Piece(part, join, kept)
            part, join, kept = piece.part, piece.join, b""
        kept += piece.text
        while len(kept) > size:
            place = _after_word(kept, size)
            yield Piece(part, join, kept[:place])
            join, kept = Join.SPAN, kept[place:]
    if kept:
        yield Piece(part, join, kept)


def _after_word(text: bytes, size: int) -> int:
    """The last place up to `size` where the text can be cut."""
    for begin in (max(0, size - 4096), 0):  # nearly always there is one at the end
        ends = [word.end() for word in WORD_END.finditer(text, begin, size + 2) if word.end() <= size]
        if ends:
            return ends[-1]
    place = size
    while text[place] & 0xC0 == 0x80:
        place -= 1
    return place


def token_type(tokenizer: Tokenizer) -> str:
    """The narrowest little-endian type that holds every token."""
    return "<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4"


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text) + 64  # many tiny documents are heavier than their text
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Part:
    """The three growing files of one part."""

    def __init__(self, folder: Path, part: str, dtype: str) -> None:
        self.dtype = dtype
        self.counts = {"documents": 0, "bytes": 0, "tokens": 0}
        self._stack = ExitStack()
        self._tokens = self._stack.enter_context(open(folder / f"{part}.tokens", "wb"))  # noqa: SIM115
        self._spans = self._stack.enter_context(_Numbers(folder / f"{part}.spans.npy", (2,)))
        self._sizes = self._stack.enter_context(_Numbers(folder / f"{part}.sizes.npy", ()))
        self._begin = self._size = 0

    def __enter__(self) -> _Part:
        return self

    def __exit__(self, *problem: object) -> None:
        self._stack.close()

    def begin(self, context: int) -> None:
        """A span begins here; the first of all has `context` before it."""
        if not self.counts["tokens"]:
            self._write(np.array([context]))
        self._begin, self._size = self.counts["tokens"], 0

    def put(self, ids: np.ndarray, size: int) -> None:
        """Tokens of the span, and the bytes they stand for."""
        self._write(ids)
        self._size += size

    def finish(self, end: int | None) -> None:
        """The span ends here, and with it its document when there is an end token."""
        self._spans.add(self._begin, self.counts["tokens"])
        self._sizes.add(self._size)
        self.counts["documents"] += 1
        self.counts["bytes"] += self._size
        if end is not None:
            self._write(np.array([end]))

    def _write(self, ids: np.ndarray) -> None:
        self._tokens.write(ids.astype(self.dtype).tobytes())
        self.counts["tokens"] += len(ids)


class _Numbers:
    """A .npy file of int64 rows that grows: numpy leaves room in the header for the final length."""

    def __init__(self, path: Path, row: tuple[int, ...]) -> None:
        self.row = row
        self.rows = 0
        self._file = open(path, "wb")  # noqa: SIM115 - closed by __exit__
        self._kept = array("q")
        self._header()

    def __enter__(self) -> _Numbers:
        return self

    def __exit__(self, *problem: object) -> None:
        with self._file:
            self._flush()
            self._file.seek(0)
            self._header()

    def add(self, *numbers: int) -> None:
        """One more row."""
        self._kept.extend(numbers)
        self.rows += 1
        if len(self._kept) >= NUMBERS:
            self._flush()

    def _flush(self) -> None:
        self._file.write(np.array(self._kept, dtype="<i8").tobytes())
        self._kept = array("q")

    def _header(self) -> None:
        about = {"descr": "<i8", "fortran_order": False, "shape": (self.rows, *self.row)}
        np.lib.format.write_array_header_1_0(self._file, about)
