"""Where text comes from: the standard library of this Python, a file, a folder, a name, or a dataset of the Hub.

A source gives the same documents in the same order each time it is asked, a piece at a time, so that no text need ever
be in memory as a whole.
"""

from __future__ import annotations

import itertools
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkflow.data.text import reading
from qkflow.data.text.reading import Entry
from qkflow.errors import UsageError

STDLIB = "python-stdlib"
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text that is never divided between train, validation and test when there are enough of its kind."""

    shown: str
    """What to call it in a message."""
    label: str = ""
    """Its path inside the source, where it has one that means something."""
    key: bytes
    """What the split hashes: the label of a file, the content of a .jsonl line."""
    part: str | None = None
    """Its part, where the source comes with a split of its own."""
    pieces: Iterable[bytes]
    """The text, in order; read it before asking for the next document. Never empty altogether."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A corpus as text."""

    name: str
    """What people call it."""
    identity: str
    """How its files are read, from which root: the same file can be two different texts."""
    documents: Callable[[], Iterator[Document]]
    """The documents, from the start each time."""
    files: Callable[[], list[Path]]
    """The files that the content rests on; none when that is not known."""
    exact: bool = False
    """Whether a cut of one long text falls at exactly 90 % and 95 % of its bytes, as published results have it."""


def from_path(path: Path, field: str) -> Source:
    """A file or a folder: each file is a document, each line of a .jsonl is one."""

    def documents() -> Iterator[Document]:
        entries, texts = 0, 0
        for entry in reading.entries(path):
            entries += 1
            for document in _lines(entry, field) if reading.ending(entry.shown) == ".jsonl" else _file(entry):
                yield document
                texts += 1
        if entries and not texts:
            raise UsageError(f"{path} is empty: give a file or folder with text in it")
        if not entries:
            raise UsageError(
                f"{path} holds no text: expected files that end in {', '.join(reading.TEXTS)} "
                "(also .gz, .xz, .bz2) or .zip with such files; a file of another ending is read when named itself"
            )

    def files() -> list[Path]:
        return reading.files(path) if path.is_dir() else [path]

    name = path.resolve().name if path.is_dir() else Path(reading.bare(path.name)).stem
    return Source(name=name, identity=f"path {path.resolve()}", documents=documents, files=files)


def standard_library() -> Source:
    """The running interpreter's own library, without its tests: real text on every machine, nothing to download."""
    root = Path(sysconfig.get_path("stdlib"))

    def files() -> list[Path]:
        found: list[Path] = []
        for place, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in NOT_LIBRARY]
            found += [Path(place, name) for name in names if name.endswith(".py")]
        if not found:
            raise UsageError(f"this Python has no library source in {root}: give a file or folder of text instead")
        return sorted(found, key=lambda file: file.relative_to(root).as_posix())

    def documents() -> Iterator[Document]:
        for file in files():
            label = file.relative_to(root).as_posix()
            yield from _file(Entry(label=label, shown=str(file), open=reading.opener(file)))

    return Source(name=STDLIB, identity=f"library {root}", documents=documents, files=files)


def _file(entry: Entry) -> Iterator[Document]:
    pieces = reading.blocks(entry)
    if first := next(pieces, b""):  # an empty file is no document
        key = entry.label.encode("utf-8", "surrogateescape")
        yield Document(shown=entry.shown, label=entry.label, key=key, pieces=itertools.chain([first], pieces))


def _lines(entry: Entry, field: str) -> Iterator[Document]:
    for number, line in enumerate(reading.lines(entry), start=1):
        if not line.strip():
            continue
        where = f"{entry.shown} line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else getattr(error, "msg", error)
            raise UsageError(f"{where} is not JSON ({reason}): mend the line, or name the file .txt") from None
        yield from row_document(row, field, where)


def row_document(row: Any, field: str, where: str, part: str | None = None) -> Iterator[Document]:
    """The text of a row as a document that the split knows by its content; none when it is empty or null."""
    text = _field(row, field, where)
    content = text.encode("utf-8", "replace")  # JSON can spell half a surrogate pair, which no encoding has
    if content:
        yield Document(shown=where, key=content, part=part, pieces=(content,))


def _field(row: Any, field: str, where: str) -> str:
    """The text under a dotted path; lists on the way are joined by newlines."""
    if not isinstance(row, dict):
        raise UsageError(f"{where} is {_kind(row)}, not an object with a field {field!r}: give one object a line")
    if field in row:
        return _text(row[field], field, where)
    head, _, rest = field.partition(".")
    if not rest or head not in row:
        names = ", ".join(map(str, row)) or "none"
        raise UsageError(f"{where} has no field {field!r}: choose one of its fields with --field ({names})")
    inner = row[head] if isinstance(row[head], list) else [row[head]]
    return "\n".join(_field(item, rest, f"{where}, in {head!r},") for item in inner)


def _text(value: Any, field: str, where: str) -> str:
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return "\n".join(value)
    if not isinstance(value, str):
        inside = value[0] if isinstance(value, list) and value else value
        deeper = f", for example {field}.{next(iter(inside))}" if isinstance(inside, dict) and inside else ""
        raise UsageError(f"{where}: field {field!r} is {_kind(value)}, not text: choose another with --field{deeper}")
    return value


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
