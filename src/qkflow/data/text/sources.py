"""Sources of text: files, folders and the standard library of the running Python.

A source yields the same documents in the same order every time. Documents are read in blocks, so a text never has to
fit in memory.
"""

from __future__ import annotations

import itertools
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qkflow.data.text import reading
from qkflow.data.text.reading import TextFile
from qkflow.errors import UsageError

STDLIB = "python-stdlib"
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
JSON_LINES = "one JSON object per line (name a plain-text file .txt)"


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text that belongs to one split as a whole, unless the source has too few documents."""

    name: str
    """Name for error messages."""
    label: str = ""
    """Path relative to the source, if there is one."""
    key: bytes
    """Bytes hashed to choose the split: the label of a file, the content of a .jsonl line."""
    split: str | None = None
    """The document's split, if the source defines one."""
    blocks: Iterable[bytes]
    """The text in order, never empty. Read it before requesting the next document."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A corpus as text."""

    name: str
    """Display name."""
    identity: str
    """What the documents depend on besides the content of the files."""
    documents: Callable[[], Iterator[Document]]
    """Yields all documents, from the start at each call."""
    files: Callable[[], list[Path]]
    """Returns the files that hold the content; an empty list if they are unknown."""
    has_exact_cuts: bool = False
    """Whether a single text is split at exactly 90 % and 95 % of its bytes, as in published results."""


def from_path(path: Path, field: str) -> Source:
    """Return a file or folder as a source: each file is a document, each line of a .jsonl file is a document."""

    def documents() -> Iterator[Document]:
        n_files = n_documents = 0
        for file in reading.iter_files(path):
            n_files += 1
            is_jsonl = reading.content_suffix(file.name) == ".jsonl"
            for document in _line_documents(file, field) if is_jsonl else _file_document(file):
                yield document
                n_documents += 1
        if not n_files:
            raise UsageError(
                f"{path} contains no text files: expected {', '.join(reading.TEXT_SUFFIXES)} (also .gz, .xz, .bz2) or "
                ".zip; to read a file with another suffix, pass the path of the file itself"
            )
        if not n_documents:
            raise UsageError(f"{path} is empty: use a file or folder that contains text")

    def files() -> list[Path]:
        return reading.list_files(path) if path.is_dir() else [path]

    name = path.resolve().name if path.is_dir() else Path(reading.strip_compression(path.name)).stem
    return Source(name=name, identity=f"path {path.resolve()}", documents=documents, files=files)


def standard_library() -> Source:
    """Return the standard library of the running Python without its tests: text that needs no download."""
    root = Path(sysconfig.get_path("stdlib"))

    def files() -> list[Path]:
        paths: list[Path] = []
        for parent, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in NOT_LIBRARY]
            paths += [Path(parent, name) for name in names if name.endswith(".py")]
        if not paths:
            raise UsageError(f"no library source files in {root}: use a file or folder of text instead")
        return sorted(paths, key=lambda path: path.relative_to(root).as_posix())

    def documents() -> Iterator[Document]:
        for path in files():
            label = path.relative_to(root).as_posix()
            yield from _file_document(replace(reading.text_file(path), label=label))

    return Source(name=STDLIB, identity=f"library {root}", documents=documents, files=files)


def text_document(name: str, key: bytes, blocks: Iterator[bytes], label: str = "") -> Iterator[Document]:
    """Yield one document, or none if the text is empty."""
    if first := next(blocks, b""):
        yield Document(name=name, label=label, key=key, blocks=itertools.chain([first], blocks))


def row_document(row: Any, field: str, name: str, split: str | None = None) -> Iterator[Document]:
    """Yield the text of a row as a document, or nothing if the text is empty or null."""
    text = _field_text(row, field, name)
    content = text.encode("utf-8", "replace")  # JSON can contain unpaired surrogates
    if content:
        yield Document(name=name, key=content, split=split, blocks=(content,))


def _file_document(file: TextFile) -> Iterator[Document]:
    key = file.label.encode("utf-8", "surrogateescape")
    return text_document(file.name, key, reading.iter_blocks(file), file.label)


def _line_documents(file: TextFile, field: str) -> Iterator[Document]:
    for location, row in reading.iter_json_lines(file, JSON_LINES):
        yield from row_document(row, field, location)


def _field_text(row: Any, field: str, name: str) -> str:
    """Return the text under a dotted path; lists along the path are joined by newlines."""
    if not isinstance(row, dict):
        raise UsageError(f"{name}: expected an object with a field {field!r}, got {_json_type(row)}")
    if field in row:
        return _as_text(row[field], field, name)
    head, _, rest = field.partition(".")
    if not rest or head not in row:
        names = ", ".join(map(str, row)) or "none"
        raise UsageError(f"{name} has no field {field!r}: choose one of its fields with --field ({names})")
    items = row[head] if isinstance(row[head], list) else [row[head]]
    return "\n".join(_field_text(item, rest, f"{name}, in {head!r}") for item in items)


def _as_text(value: Any, field: str, name: str) -> str:
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return "\n".join(value)
    if not isinstance(value, str):
        inner = value[0] if isinstance(value, list) and value else value
        example = f", for example {field}.{next(iter(inner))}" if isinstance(inner, dict) and inner else ""
        raise UsageError(
            f"{name}: field {field!r} is {_json_type(value)}, not text: choose another field with --field{example}"
        )
    return value


def _json_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
