"""The first reading of a source: its digest, its sizes, how it can be split, and whether it is UTF-8.

The result is remembered beside the prepared corpora under the stamps (path, size, times) of the source's files, so that
a corpus of many gigabytes is not read again each time it is opened.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import json
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qkflow import io
from qkflow.config import from_dict, to_dict
from qkflow.data.text.config import CorpusConfig
from qkflow.data.text.reading import readable
from qkflow.data.text.sources import Document, Source
from qkflow.data.text.splits import PARTS, Plan, part_of
from qkflow.errors import UsageError

VERSION = 1
SETTLED = 2.0  # seconds: a file changed more recently could change again without a new time on it


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What one reading of a source tells about it."""

    digest: str
    """SHA-256 of all documents: their text, labels and given parts, in order."""
    bytes: int
    """Size of the whole text."""
    documents: tuple[int, int, int]
    """How many documents each part would have, by the source's own split or by hash."""
    official: bool
    """Whether the source comes with a split of its own."""
    not_utf8: tuple[str, int] | None
    """The first document that is not UTF-8 and the offset of the byte, if any."""


def survey(source: Source) -> Survey:
    """Read the whole source once. An empty one is a `UsageError`."""
    digest = hashlib.sha256()
    counts: dict[str, int] = dict.fromkeys(PARTS, 0)
    size, official, wrong = 0, False, None
    for document in watched(source.documents(), digest.update):
        counts[document.part or part_of(document.key)] += 1
        official = official or document.part is not None
        check = _Utf8()
        for piece in document.pieces:
            check.add(piece)
            size += len(piece)
        if wrong is None and (offset := check.wrong()) is not None:
            wrong = (document.shown, offset)
    if not size:
        raise UsageError(f"{source.name} is empty: give a file or folder with text in it")
    counted = (counts["train"], counts["validation"], counts["test"])
    return Survey(digest=digest.hexdigest(), bytes=size, documents=counted, official=official, not_utf8=wrong)


def remembered(source: Source, config: CorpusConfig, cache: Path) -> Survey:
    """`survey(source)`, read from the cache when none of the source's files has changed since."""
    began = time.time()
    with readable(source.name):
        stamps = [(str(file.resolve()), file.stat()) for file in source.files()]
    what: list[Any] = [VERSION, source.identity, config.field]
    what += [[path, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for path, s in stamps]
    note = cache / "surveys" / f"{hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]}.json"
    if stamps:
        with contextlib.suppress(OSError, ValueError):  # no note yet, or not one of ours: read the source
            if isinstance(data := json.loads(note.read_text()), dict):
                return from_dict(Survey, data)
    result = survey(source)
    if stamps and all(stat.st_mtime < began - SETTLED for _, stat in stamps):
        with contextlib.suppress(OSError):  # a cache that cannot be written only costs another reading
            io.write_json(note, to_dict(result))
    return result


def plan(source: Source, seen: Survey, config: CorpusConfig) -> Plan:
    """How this source is split: its own way, else by hash, else (if that leaves a part empty) by a contiguous cut."""
    rule = "official" if seen.official else "hash" if min(seen.documents) else "contiguous"
    utf8 = seen.not_utf8 is None
    single = tuple(part for part, count in zip(PARTS, seen.documents, strict=True) if count == 1 and part != "train")
    return Plan(
        rule=rule,
        cuts=(seen.bytes * 90 // 100, seen.bytes * 95 // 100),
        aligned=utf8 and not (source.exact and config.tokens == "bytes"),
        utf8=utf8,
        passage=config.passage,
        in_passages={"official": single, "hash": (), "contiguous": PARTS[1:]}[rule],
    )


def watched(documents: Iterable[Document], update: Callable[[bytes], None]) -> Iterator[Document]:
    """The same documents; as each is read, its text, label and part go into a digest, framed."""
    for document in documents:
        yield replace(document, pieces=_watched(document, update))


def _watched(document: Document, update: Callable[[bytes], None]) -> Iterator[bytes]:
    size, name = 0, f"{document.part or ''}\0{document.label}".encode("utf-8", "surrogateescape")
    for piece in document.pieces:
        update(piece)
        size += len(piece)
        yield piece
    update(name + struct.pack("<QQ", size, len(name)))


class _Utf8:
    """Finds the first byte that is not UTF-8 in a text that comes in pieces."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.place = 0
        self.found: int | None = None

    def add(self, piece: bytes) -> None:
        pending = len(self.decoder.getstate()[0])
        if self.found is None:
            try:
                self.decoder.decode(piece)
            except UnicodeDecodeError as error:
                self.found = self.place - pending + error.start
        self.place += len(piece)

    def wrong(self) -> int | None:
        """The offset, once all pieces are in; where the last character begins if the text ends inside it."""
        pending = len(self.decoder.getstate()[0])
        return self.found if self.found is not None else self.place - pending if pending else None
