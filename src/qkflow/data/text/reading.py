"""Files as streams of bytes: plain, .gz, .xz, .bz2, in a .zip; damage becomes a `UsageError` that names the file."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from io import BufferedIOBase
from pathlib import Path, PurePosixPath
from typing import cast

from qkflow.errors import UsageError

BLOCK = 1 << 20
COMPRESSIONS = {".gz": "gzip", ".xz": "lzma", ".bz2": "bz2"}
TEXTS = (".txt", ".md", ".py", ".jsonl")
REFUSED = (".tar", ".tgz", ".txz", ".zst", ".7z", ".rar", ".parquet", ".arrow")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One stored text; read it before asking for the next, since a .zip is open only that long."""

    label: str
    """Its path inside the source with `/` separators and without a compression ending: the same wherever it lies."""
    shown: str
    """What to call it in a message."""
    open: Callable[[], BufferedIOBase]
    """Opens it, decompressed."""


def bare(name: str) -> str:
    """A file's name without the ending of its compression.

    >>> bare("a/b.txt.gz"), bare("c.md")
    ('a/b.txt', 'c.md')
    """
    return str(PurePosixPath(name).with_suffix("")) if PurePosixPath(name).suffix.lower() in COMPRESSIONS else name


def ending(name: str) -> str:
    """The ending that says what is inside, in lower case, whatever compression is around it.

    >>> ending("a.JSONL.xz"), ending("README")
    ('.jsonl', '')
    """
    return PurePosixPath(bare(name)).suffix.lower()


def holds_text(entry: Entry) -> bool:
    """Whether a file has one of the usual endings, or none at all and text inside (like enwik8)."""
    if ending(entry.label):
        return ending(entry.label) in TEXTS
    with readable(entry.shown), entry.open() as file:
        return b"\0" not in file.read(4096)


Wanted = Callable[[Entry], bool]


def entries(path: Path, wanted: Wanted = holds_text) -> Iterator[Entry]:
    """The wanted texts of a .zip or a folder (recursive) in the order of their labels, or the file itself."""
    if path.is_dir():
        for file in files(path, wanted):
            label = file.relative_to(path).as_posix()
            if file.suffix.lower() == ".zip":
                yield from _members(file, f"{label}/", wanted)
            else:
                yield Entry(label=bare(label), shown=str(file), open=opener(file))
    elif path.suffix.lower() == ".zip":
        yield from _members(path, "", wanted)
    else:
        if ending(path.name) in REFUSED:
            raise UsageError(f"{path} is not text: unpack it first, or give .txt or .jsonl (also .gz, .xz, .bz2, .zip)")
        yield Entry(label="", shown=str(path), open=opener(path))


def files(folder: Path, wanted: Wanted = holds_text) -> list[Path]:
    """The wanted files of a folder and every .zip, sorted by relative path; hidden ones are left out."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder, onerror=_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(place, name) for name in names if not name.startswith(".")):
            entry = Entry(label=bare(path.name), shown=str(path), open=opener(path))
            if path.is_file() and (path.suffix.lower() == ".zip" or wanted(entry)):
                found.append(path)
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def blocks(entry: Entry) -> Iterator[bytes]:
    """The text of an entry in pieces of about a megabyte."""
    with contextlib.ExitStack() as stack:
        with readable(entry.shown):
            file = stack.enter_context(entry.open())
        while True:
            with readable(entry.shown):
                block = file.read(BLOCK)
            if not block:
                return
            yield block


def lines(entry: Entry) -> Iterator[bytes]:
    """The text of an entry line by line, each with its newline."""
    with contextlib.ExitStack() as stack:
        with readable(entry.shown):
            file = stack.enter_context(entry.open())
        while True:
            with readable(entry.shown):
                line = file.readline()
            if not line:
                return
            yield line


def opener(place: Path | zipfile.ZipFile, member: str = "") -> Callable[[], BufferedIOBase]:
    """How to open a file, or a member of an archive, as decompressed bytes."""
    compression = COMPRESSIONS.get(PurePosixPath(member or str(place)).suffix.lower())
    return partial(_decompressed, compression, place, member) if compression else partial(_stored, place, member)


def _stored(place: Path | zipfile.ZipFile, member: str) -> BufferedIOBase:
    return cast(BufferedIOBase, place.open(member) if isinstance(place, zipfile.ZipFile) else open(place, "rb"))


def _decompressed(compression: str, place: Path | zipfile.ZipFile, member: str) -> BufferedIOBase:
    try:
        module = importlib.import_module(compression)
    except ImportError:
        name = member or str(place)
        raise UsageError(f"{name}: this Python was built without {compression}: unpack the file first") from None
    return module.open(place if isinstance(place, Path) else _stored(place, member), "rb")


@contextlib.contextmanager
def readable(shown: str) -> Iterator[None]:
    """Turn whatever reading a damaged, truncated, encrypted or forbidden file raises into one `UsageError`."""
    lzma = sys.modules.get("lzma")
    damage = (EOFError, zlib.error, zipfile.BadZipFile, *([lzma.LZMAError] if lzma else []))
    try:
        yield
    except damage as error:
        raise UsageError(f"{shown} is damaged or truncated ({error}): fetch or write it again") from error
    except RuntimeError as error:  # a .zip with a password, or (NotImplementedError) of an unknown method
        raise UsageError(f"{shown} cannot be unpacked here ({error}): unpack it first") from error
    except OSError as error:
        raise UsageError(f"{shown} cannot be read ({error.strerror or error}): fetch it again or check it") from error


def _members(path: Path, prefix: str, wanted: Wanted) -> Iterator[Entry]:
    with contextlib.ExitStack() as stack:
        with readable(str(path)):
            archive = stack.enter_context(zipfile.ZipFile(path))
        for member in sorted(archive.namelist()):
            entry = Entry(label=prefix + bare(member), shown=f"{path}:{member}", open=opener(archive, member))
            hidden = any(word.startswith((".", "__MACOSX")) for word in member.split("/"))
            if not hidden and not member.endswith("/") and wanted(entry):
                yield entry


def _unreadable(error: OSError) -> None:
    raise UsageError(f"{error.filename} cannot be read ({error.strerror}): check its permissions") from error
