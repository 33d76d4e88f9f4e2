"""Train, validation and test: by a hash where there are documents, by a contiguous cut where there are none.

Documents go 90/5/5 by a hash of their key, so that a document's part does not depend on the others, and equal .jsonl
lines never straddle parts. A text without documents (or with too few of them) is cut contiguously 90/5/5 by bytes, and
its held-out parts into passages that serve as documents.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

from qkflow.data.text.sources import Document

PARTS = ("train", "validation", "test")
Rule = Literal["official", "hash", "contiguous"]


class Join(Enum):
    """How a piece of text stands to the piece before it."""

    DOCUMENT = "a new document"
    PASSAGE = "a new span of the same document"
    SPAN = "more of the same span"


class Piece(NamedTuple):
    """Some bytes of a part, in the order of the source."""

    part: str
    join: Join
    text: bytes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the documents of a source are divided."""

    rule: Rule
    """By the source's own split, by hash, or by a contiguous cut."""
    cuts: tuple[int, int]
    """Where validation and test begin, in bytes of the whole text (contiguous only)."""
    aligned: bool
    """Whether those cuts move forward to the next UTF-8 character."""
    utf8: bool
    """Whether cuts into passages do."""
    passage: int
    """Bytes of a passage; the last of a text has between half and one and a half of it."""
    in_passages: tuple[str, ...]
    """The parts that are cut into passages."""


def part_of(key: bytes) -> str:
    """The part that a document belongs to by the hash of its key: 90 % train, 5 % validation, 5 % test.

    >>> part_of(b"json/decoder.py")
    'validation'
    """
    place = int.from_bytes(hashlib.sha256(key).digest()[:8], "big") % 100
    return PARTS[0] if place < 90 else PARTS[1] if place < 95 else PARTS[2]


def divide(documents: Iterable[Document], plan: Plan) -> Iterator[Piece]:
    """The text of all documents, piece by piece, each with its part and how it joins the piece before."""
    position, now = 0, 0  # now: the part that a contiguous cut has come to
    for document in documents:
        part = document.part or part_of(document.key)
        passages = _Passages(plan)
        for text in document.pieces:
            if plan.rule != "contiguous":
                yield from passages.add(part, text)
                continue
            for number, inside in _cut(text, position, now, plan):
                yield from passages.add(PARTS[number], inside)
                now = number
            position += len(text)
        yield from passages.rest()


def _cut(text: bytes, position: int, now: int, plan: Plan) -> Iterator[tuple[int, bytes]]:
    """The stretches of `text`, which begins at `position` in part `now`, that lie in one part each."""
    begin = 0
    while begin < len(text):
        end = len(text) if now == 2 else max(begin, plan.cuts[now] - position)
        if end < len(text) and plan.aligned:
            end = _character(text, end)
        if end > begin:
            yield now, text[begin:end]
        if end >= len(text):
            return
        begin, now = end, now + 1


def _character(text: bytes, place: int) -> int:
    """The first place from `place` on at which no UTF-8 character is cut."""
    while place < len(text) and text[place] & 0xC0 == 0x80:
        place += 1
    return place


class _Passages:
    """Cuts one document into the passages of its parts, looking half a passage ahead so that none is tiny."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.part = ""
        self.join = Join.DOCUMENT
        self.kept = b""

    def add(self, part: str, text: bytes) -> Iterator[Piece]:
        """Take `text`, give the pieces that are settled; a change of part begins a new passage of the same document."""
        if part != self.part:
            yield from self.rest()
            self.join = Join.PASSAGE if self.part else Join.DOCUMENT
            self.part = part
        if part not in self.plan.in_passages:
            yield Piece(part, self.join, text)
            self.join = Join.SPAN
            return
        text, begin = self.kept + text, 0
        while len(text) - begin >= math.ceil(1.5 * self.plan.passage):
            end = begin + self.plan.passage
            end = _character(text, end) if self.plan.utf8 else end
            if end >= len(text):
                break
            yield Piece(part, self.join, text[begin:end])
            begin, self.join = end, Join.PASSAGE
        self.kept = text[begin:]

    def rest(self) -> Iterator[Piece]:
        """What is left at the end of the document or part."""
        if self.kept:
            yield Piece(self.part, self.join, self.kept)
        self.kept = b""
