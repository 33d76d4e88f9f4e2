"""Scan a source, and divide it into train, validation and test.

| rule         | used for                       | how                                                                 |
|--------------|--------------------------------|---------------------------------------------------------------------|
| `official`   | sources that define splits     | as defined                                                          |
| `hash`       | sources with enough documents  | by a hash of each key; equal .jsonl lines are in one split          |
| `contiguous` | one text, or too few documents | 90/5/5 by bytes; held-out text is cut into passages, the documents  |

The hash puts 5 % of the documents into validation, and 5 to 20 % into test: as many as are needed for about 105
documents there, because differences between models are judged on them.

The result of a scan is cached under the path, size and modification times of the source's files, so a large corpus is
scanned only once.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import itertools
import json
import math
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple

from qkflow import io
from qkflow.config import from_dict, to_dict
from qkflow.data.text.config import CorpusConfig
from qkflow.data.text.reading import reading_errors
from qkflow.data.text.sources import Document, Source
from qkflow.errors import UsageError

SplitName = Literal["train", "validation", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")
Rule = Literal["official", "hash", "contiguous"]
SCAN_VERSION = 3
SETTLED_SECONDS = 2.0  # a file modified more recently could change again without a new modification time


TEST_DOCUMENTS = 105
"""Test documents to aim at."""
_LEAST_TEST_PERCENT, _MOST_TEST_PERCENT = 5, 20


def hash_split(key: bytes, test_percent: int = _LEAST_TEST_PERCENT) -> str:
    """Return the split of a document by the hash of its key: 5 % validation, `test_percent` test, the rest train.

    >>> hash_split(b"json/decoder.py")
    'validation'
    """
    percent = int.from_bytes(hashlib.sha256(key).digest()[:8], "big") % 100
    if 90 <= percent < 95:
        return SPLITS[1]
    return SPLITS[2] if (percent + 5) % 100 < test_percent else SPLITS[0]


def choose_test_percent(documents: int) -> int:
    """Return the percentage of the documents for test.

    >>> choose_test_percent(731), choose_test_percent(100_000), choose_test_percent(50)
    (15, 5, 20)
    """
    return min(_MOST_TEST_PERCENT, max(_LEAST_TEST_PERCENT, math.ceil(100 * TEST_DOCUMENTS / documents)))


# Scanning


@dataclass(frozen=True, kw_only=True)
class ScanResult:
    """Properties of a source that require reading it once."""

    digest: str
    """SHA-256 of all documents: text, labels and splits, in order."""
    bytes: int
    """Size of the text."""
    documents: tuple[int, int, int]
    """Number of documents per split, by the source's own splits or by hash."""
    has_splits: bool
    """Whether the source defines splits."""
    not_utf8: tuple[str, int] | None
    """Name of the first document that is not UTF-8, and the offset of the invalid byte."""
    nul_bytes: int
    """Number of NUL bytes, which text does not contain."""
    nul_document: str | None
    """Name of the document with most NUL bytes."""
    wide: tuple[str, str] | None
    """Name of the first document with a byte-order mark of UTF-16 or UTF-32, and that encoding."""


def scan(source: Source) -> ScanResult:
    """Read the whole source once; raise a `UsageError` if it is empty."""
    digest = hashlib.sha256()
    counts: dict[str, int] = dict.fromkeys(SPLITS, 0)
    n_bytes, nul_bytes, has_splits, not_utf8, wide = 0, 0, False, None, None
    nul_document, most_nul = None, 0
    for document in with_digest(source.documents(), digest.update):
        counts[document.split or hash_split(document.key)] += 1
        has_splits = has_splits or document.split is not None
        decoder, offset, nul_here = codecs.getincrementaldecoder("utf-8")(), 0, 0
        for block in itertools.chain(document.blocks, [None]):  # None: the end of the document
            if not_utf8 is None:
                n_pending = len(decoder.getstate()[0])
                try:
                    decoder.decode(block or b"", final=block is None)
                except UnicodeDecodeError as error:
                    not_utf8 = (document.name, offset - n_pending + error.start)
            if wide is None and block and not offset and (encoding := _wide_encoding(block)) is not None:
                wide = (document.name, encoding)
            offset += len(block or b"")
            nul_here += (block or b"").count(0)
        n_bytes += offset
        nul_bytes += nul_here
        if nul_here > most_nul:
            nul_document, most_nul = document.name, nul_here
    if not n_bytes:
        raise UsageError(f"{source.name} is empty: use a file or folder that contains text")
    documents = (counts["train"], counts["validation"], counts["test"])
    return ScanResult(
        digest=digest.hexdigest(),
        bytes=n_bytes,
        documents=documents,
        has_splits=has_splits,
        not_utf8=not_utf8,
        nul_bytes=nul_bytes,
        nul_document=nul_document,
        wide=wide,
    )


def _wide_encoding(start: bytes) -> str | None:
    """The encoding that a byte-order mark shows, or None: the mark of UTF-32 begins with that of UTF-16."""
    if start.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "UTF-32"
    return "UTF-16" if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else None


def refuse_binary(source: Source, scanned: ScanResult) -> None:
    """Raise `UsageError` if the source is UTF-16 or UTF-32, or more than a thousandth of its bytes are NUL."""
    reason = None
    if scanned.wide is not None:
        name, encoding = scanned.wide
        reason = f"{name} is {encoding}"
    elif 1000 * scanned.nul_bytes > scanned.bytes:
        share = f"{scanned.nul_bytes / scanned.bytes:.1%} of the bytes of {source.name} are NUL"
        reason = f"{scanned.nul_document} is not text ({share})"
    if reason is not None:
        raise UsageError(f"{reason}: convert it to UTF-8, or use --binary to train on its bytes")


def cached_scan(source: Source, config: CorpusConfig, cache: Path) -> ScanResult:
    """Return `scan(source)`, from the cache if no file of the source has changed."""
    started = time.time()
    with reading_errors(source.name):
        stats = [(str(file.resolve()), file.stat()) for file in source.files()]
    key: list[Any] = [SCAN_VERSION, source.identity, config.field]
    key += [[path, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for path, s in stats]
    cached = cache / "scans" / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}.json"
    if stats:
        with contextlib.suppress(OSError, ValueError):  # not cached, or of another version: scan the source
            if isinstance(data := json.loads(cached.read_text()), dict):
                return from_dict(ScanResult, data)
    result = scan(source)
    if stats and all(stat.st_mtime < started - SETTLED_SECONDS for _, stat in stats):
        with contextlib.suppress(OSError):  # a read-only cache only costs another scan
            io.write_json(cached, to_dict(result))
    return result


def with_digest(documents: Iterable[Document], update: Callable[[bytes], None]) -> Iterator[Document]:
    """Yield the same documents; reading them passes their text, label and split to `update`, with lengths."""
    for document in documents:
        yield replace(document, blocks=_blocks_with_digest(document, update))


def _blocks_with_digest(document: Document, update: Callable[[bytes], None]) -> Iterator[bytes]:
    n_bytes, header = 0, f"{document.split or ''}\0{document.label}".encode("utf-8", "surrogateescape")
    for block in document.blocks:
        update(block)
        n_bytes += len(block)
        yield block
    update(header + struct.pack("<QQ", n_bytes, len(header)))


# Dividing


class Boundary(Enum):
    """What starts with a piece of text."""

    DOCUMENT = "a new document"
    PASSAGE = "a new passage of the same document"
    NONE = "nothing: the piece continues the previous one"


class TextPiece(NamedTuple):
    """A piece of the text of a split, in source order."""

    split: str
    boundary: Boundary
    text: bytes


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """How the documents of a source are divided."""

    rule: Rule
    test_percent: int
    """Percentage of the documents for test (hash only)."""
    cuts: tuple[int, int]
    """Byte offsets at which validation and test start (contiguous only)."""
    align_cuts: bool
    """Whether cuts move forward to the next UTF-8 character."""
    is_utf8: bool
    """Whether the text is UTF-8, so that passages end between characters."""
    passage: int
    """Bytes per passage; the last passage of a text has between half and one and a half of it."""
    passage_splits: tuple[str, ...]
    """Splits that are cut into passages."""


def plan_split(source: Source, scanned: ScanResult, config: CorpusConfig) -> SplitPlan:
    """Choose the rule by which a source is divided: official splits, else hash, else contiguous."""
    rule = "official" if scanned.has_splits else "hash" if min(scanned.documents) else "contiguous"
    is_utf8 = scanned.not_utf8 is None
    single = tuple(
        split for split, count in zip(SPLITS, scanned.documents, strict=True) if count == 1 and split != "train"
    )
    return SplitPlan(
        rule=rule,
        test_percent=choose_test_percent(sum(scanned.documents)),
        cuts=(scanned.bytes * 90 // 100, scanned.bytes * 95 // 100),
        align_cuts=is_utf8 and not (source.has_exact_cuts and config.tokens == "bytes"),
        is_utf8=is_utf8,
        passage=config.passage,
        passage_splits={"official": single, "hash": (), "contiguous": SPLITS[1:]}[rule],
    )


def divide(documents: Iterable[Document], plan: SplitPlan) -> Iterator[TextPiece]:
    """Yield the text of all documents in pieces, each with its split and the boundary before it."""
    position, current = 0, 0  # current: index of the split at `position` under the contiguous rule
    for document in documents:
        split = document.split or hash_split(document.key, plan.test_percent)
        cutter = _PassageCutter(plan)
        for text in document.blocks:
            if plan.rule != "contiguous":
                yield from cutter.add(split, text)
                continue
            for index, piece in _cut(text, position, current, plan):
                yield from cutter.add(SPLITS[index], piece)
                current = index
            position += len(text)
        yield from cutter.flush()


def _cut(text: bytes, position: int, split: int, plan: SplitPlan) -> Iterator[tuple[int, bytes]]:
    """Cut `text`, which starts at byte `position` in split number `split`, at the borders between splits."""
    begin = 0
    while begin < len(text):
        end = len(text) if split == 2 else max(begin, plan.cuts[split] - position)
        if end < len(text) and plan.align_cuts:
            end = _next_character(text, end)
        if end > begin:
            yield split, text[begin:end]
        if end >= len(text):
            return
        begin, split = end, split + 1


def _next_character(text: bytes, index: int) -> int:
    """Return the first index >= `index` at which a UTF-8 character starts."""
    while index < len(text) and text[index] & 0xC0 == 0x80:
        index += 1
    return index


class _PassageCutter:
    """Cuts a document into passages. It holds back half a passage, so that the last passage is not too short."""

    def __init__(self, plan: SplitPlan) -> None:
        self.plan = plan
        self.split = ""
        self.boundary = Boundary.DOCUMENT
        self.pending = b""

    def add(self, split: str, text: bytes) -> Iterator[TextPiece]:
        """Add text and yield the complete pieces; a change of split starts a new passage of the same document."""
        if split != self.split:
            yield from self.flush()
            self.boundary = Boundary.PASSAGE if self.split else Boundary.DOCUMENT
            self.split = split
        if split not in self.plan.passage_splits:
            yield TextPiece(split, self.boundary, text)
            self.boundary = Boundary.NONE
            return
        text, begin = self.pending + text, 0
        while len(text) - begin >= math.ceil(1.5 * self.plan.passage):
            end = begin + self.plan.passage
            end = _next_character(text, end) if self.plan.is_utf8 else end
            if end >= len(text):
                break
            yield TextPiece(split, self.boundary, text[begin:end])
            begin, self.boundary = end, Boundary.PASSAGE
        self.pending = text[begin:]

    def flush(self) -> Iterator[TextPiece]:
        """Yield the rest of the document or split."""
        if self.pending:
            yield TextPiece(self.split, self.boundary, self.pending)
        self.pending = b""
