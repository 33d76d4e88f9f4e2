"""Read files as byte streams (plain, .gz, .xz, .bz2, or inside a .zip), and JSON from them.

A damaged, encrypted or unreadable file raises a `UsageError` that names it.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import json
import lzma
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from io import BufferedIOBase
from pathlib import Path, PurePosixPath
from typing import Any, cast

from qkflow.errors import UsageError
from qkflow.formatting import format_bytes
from qkflow.io import refuse_special_files

BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 256 << 20
"""A longer line is refused: a small compressed file can hold one that does not fit in memory."""
MAX_JSON_BYTES = 1 << 30
"""A larger JSON file is refused."""
COMPRESSIONS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
TEXT_SUFFIXES = (".txt", ".md", ".py", ".jsonl")
UNSUPPORTED_SUFFIXES = (".tar", ".tgz", ".txz", ".zst", ".7z", ".rar", ".parquet", ".arrow")


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """A file on disk or in a .zip archive. Read it before requesting the next one: an archive does not stay open."""

    label: str
    """Path relative to the source, with `/` separators and without a compression suffix."""
    name: str
    """Name for error messages."""
    open: Callable[[], BufferedIOBase]
    """Opens the decompressed content."""


Predicate = Callable[[TextFile], bool]


def text_file(path: Path) -> TextFile:
    """Return the file at `path`, labelled with its name."""
    return TextFile(label=strip_compression(path.name), name=str(path), open=partial(_open_stream, path))


def strip_compression(name: str) -> str:
    """Remove a compression suffix from a file name.

    >>> strip_compression("a/b.txt.gz"), strip_compression("c.md")
    ('a/b.txt', 'c.md')
    """
    return str(PurePosixPath(name).with_suffix("")) if PurePosixPath(name).suffix.lower() in COMPRESSIONS else name


def content_suffix(name: str) -> str:
    """Return the lower-case suffix of a file name, ignoring a compression suffix.

    >>> content_suffix("a.JSONL.xz"), content_suffix("README")
    ('.jsonl', '')
    """
    return PurePosixPath(strip_compression(name)).suffix.lower()


def is_text(file: TextFile) -> bool:
    """Whether a file has a text suffix, or has no suffix and starts without a NUL byte (such as enwik8)."""
    if suffix := content_suffix(file.label):
        return suffix in TEXT_SUFFIXES
    with reading_errors(file.name), file.open() as stream:
        return b"\0" not in stream.read(4096)


def iter_files(path: Path, predicate: Predicate = is_text) -> Iterator[TextFile]:
    """Yield the matching files of a folder (recursively) or .zip in order of their labels, or the file itself."""
    if path.is_dir():
        for file in list_files(path, predicate):
            label = file.relative_to(path).as_posix()
            if file.suffix.lower() == ".zip":
                yield from _iter_zip(file, f"{label}/", predicate)
            else:
                yield replace(text_file(file), label=strip_compression(label))
        return
    refuse_special_files(path)
    if path.suffix.lower() == ".zip":
        yield from _iter_zip(path, "", predicate)
    elif content_suffix(path.name) in UNSUPPORTED_SUFFIXES:
        raise UsageError(f"{path} is not a text file: unpack it, or use .txt or .jsonl (also .gz, .xz, .bz2 or .zip)")
    else:
        yield replace(text_file(path), label="")


def list_files(folder: Path, predicate: Predicate = is_text) -> list[Path]:
    """Return the matching files of a folder and every .zip, sorted by relative path; hidden files are skipped.

    A matching pipe, device or socket raises a `UsageError`.
    """
    paths: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=_raise_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(parent, name) for name in names if not name.startswith(".")):
            if path.exists() and (path.suffix.lower() == ".zip" or predicate(text_file(path))):
                refuse_special_files(path)
                paths.append(path)
    return sorted(paths, key=lambda path: path.relative_to(folder).as_posix())


def files_with_suffix(path: Path, suffix: str) -> list[Path]:
    """Return the files directly in a folder with a suffix, ignoring compression suffixes; or the file itself."""
    if not path.is_dir():
        return [path]
    with reading_errors(str(path)):
        files = sorted(file for file in path.iterdir() if content_suffix(file.name) == suffix and not file.is_dir())
    for file in files:
        refuse_special_files(file)
    return [file for file in files if file.is_file()]


def iter_blocks(file: TextFile) -> Iterator[bytes]:
    """Yield the content of a file in blocks of about a megabyte."""
    return _iter_reads(file, lambda stream: stream.read(BLOCK_BYTES))


def iter_lines(file: TextFile) -> Iterator[bytes]:
    """Yield the lines of a file, each with its newline; a line of more than `MAX_LINE_BYTES` raises a `UsageError`."""
    reads = _iter_reads(file, lambda stream: stream.readline(MAX_LINE_BYTES + 1))
    for number, line in enumerate(reads, start=1):
        if len(line) > MAX_LINE_BYTES:
            size = format_bytes(MAX_LINE_BYTES)
            raise UsageError(f"{file.name}, line {number} is longer than {size}: divide it into several lines")
        yield line


def read_json(path: Path, expected: str) -> dict[str, Any]:
    """Return the JSON object in a file; `expected` describes the right content in error messages."""
    blocks, n_bytes = list[bytes](), 0
    for block in iter_blocks(text_file(path)):
        blocks.append(block)
        n_bytes += len(block)
        if n_bytes > MAX_JSON_BYTES:
            raise UsageError(f"{path} is larger than {format_bytes(MAX_JSON_BYTES)}: expected {expected}")
    content = b"".join(blocks)
    if not content.strip():
        raise UsageError(f"{path} is empty: expected {expected}")
    value = _parse_json(content, str(path), expected)
    if not isinstance(value, dict):
        raise UsageError(f"{path} holds a {type(value).__name__}, not a JSON object: expected {expected}")
    return value


def iter_json_lines(file: TextFile, expected: str) -> Iterator[tuple[str, Any]]:
    """Yield the location and the value of each line of a JSON Lines file; empty lines are skipped."""
    for number, line in enumerate(iter_lines(file), start=1):
        if line.strip():
            location = f"{file.name}, line {number}"
            yield location, _parse_json(line, location, expected)


def _parse_json(content: bytes, location: str, expected: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # the message gives the position and never quotes the content
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg} at line {error.lineno}, column {error.colno}"
        else:
            reason = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else "nested too deeply"
        raise UsageError(f"{location} is not valid JSON ({reason}): expected {expected}") from None


@contextlib.contextmanager
def reading_errors(name: str) -> Iterator[None]:
    """Convert the errors of reading a damaged, encrypted or unreadable file into a `UsageError`."""
    try:
        yield
    except (EOFError, zlib.error, zipfile.BadZipFile, lzma.LZMAError) as error:
        raise UsageError(f"{name} is damaged or truncated ({error}): download or create it again") from error
    except RuntimeError as error:  # an encrypted .zip, or (NotImplementedError) an unknown compression method
        raise UsageError(f"{name} cannot be unpacked ({error}): unpack it with another program first") from error
    except OSError as error:
        raise UsageError(
            f"{name} cannot be read ({error.strerror or error}): check its permissions, or download it again"
        ) from error


def _iter_reads(file: TextFile, read: Callable[[BufferedIOBase], bytes]) -> Iterator[bytes]:
    with contextlib.ExitStack() as stack:
        with reading_errors(file.name):
            stream = stack.enter_context(file.open())
        while True:
            with reading_errors(file.name):  # around the read only, not around the caller's code
                content = read(stream)
            if not content:
                return
            yield content


def _open_stream(source: Path | zipfile.ZipFile, member: str = "") -> BufferedIOBase:
    """Open a file, or a member of an archive, as decompressed bytes."""
    name = member or str(source)
    if isinstance(source, Path):
        refuse_special_files(source)
    stream = source.open(member) if isinstance(source, zipfile.ZipFile) else source
    compression = COMPRESSIONS.get(PurePosixPath(name).suffix.lower())
    if compression is None:
        return cast(BufferedIOBase, open(stream, "rb") if isinstance(stream, Path) else stream)
    return compression(stream, "rb")


def _iter_zip(path: Path, prefix: str, predicate: Predicate) -> Iterator[TextFile]:
    with contextlib.ExitStack() as stack:
        with reading_errors(str(path)):
            archive = stack.enter_context(zipfile.ZipFile(path))
        for member in sorted(archive.namelist()):
            label = prefix + strip_compression(member)
            file = TextFile(label=label, name=f"{path}:{member}", open=partial(_open_stream, archive, member))
            is_hidden = any(word.startswith((".", "__MACOSX")) for word in member.split("/"))
            if not is_hidden and not member.endswith("/") and predicate(file):
                yield file


def _raise_unreadable(error: OSError) -> None:
    raise UsageError(f"{error.filename} cannot be read ({error.strerror}): check its permissions") from error
