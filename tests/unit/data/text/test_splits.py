"""No text lost, none in two parts, no character cut, whatever the size of a read."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data.text.sources import Document
from qkflow.data.text.splits import PARTS, Join, Piece, Plan, divide, part_of

QUICK = settings(deadline=None, max_examples=25)
TEXTS = st.lists(st.text("aé漢\n𝄞 ", min_size=1, max_size=300), min_size=1, max_size=4)


def documents(texts: list[bytes], size: int) -> list[Document]:
    cut = [[text[i : i + size] for i in range(0, len(text), size)] for text in texts]
    return [Document(shown="", key=str(number).encode(), pieces=pieces) for number, pieces in enumerate(cut)]


def contiguous(texts: list[bytes], passage: int, *, aligned: bool = True) -> Plan:
    total = sum(map(len, texts))
    cuts = (total * 90 // 100, total * 95 // 100)
    return Plan(
        rule="contiguous", cuts=cuts, aligned=aligned, utf8=aligned, passage=passage, in_passages=("validation", "test")
    )


def spans(pieces: list[Piece]) -> list[Piece]:
    """Pieces of one span joined, so that only the spans are left."""
    joined: list[Piece] = []
    for piece in pieces:
        if piece.join is Join.SPAN:
            assert piece.part == joined[-1].part
            joined[-1] = joined[-1]._replace(text=joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined


@QUICK
@given(texts=TEXTS, size=st.integers(1, 400), passage=st.integers(1, 40))
def test_a_contiguous_cut_loses_nothing_and_keeps_order_characters_and_documents(
    texts: list[str], size: int, passage: int
) -> None:
    raw = [text.encode() for text in texts]
    plan = contiguous(raw, passage)
    found = spans(list(divide(documents(raw, size), plan)))
    assert b"".join(piece.text for piece in found) == b"".join(raw)
    assert [PARTS.index(piece.part) for piece in found] == sorted(PARTS.index(piece.part) for piece in found)
    assert all(piece.text.decode() for piece in found)
    begun: list[bytes] = []
    for piece in found:
        if piece.join is Join.DOCUMENT:
            begun.append(b"")
        begun[-1] += piece.text
    assert begun == raw


@QUICK
@given(texts=TEXTS, size=st.integers(1, 400), passage=st.integers(1, 40))
def test_the_size_of_a_read_changes_no_span(texts: list[str], size: int, passage: int) -> None:
    raw = [text.encode() for text in texts]
    plan = contiguous(raw, passage)
    assert spans(list(divide(documents(raw, size), plan))) == spans(list(divide(documents(raw, 10**6), plan)))


@QUICK
@given(text=st.binary(min_size=20, max_size=3000), passage=st.integers(1, 100), size=st.integers(1, 500))
def test_a_text_that_is_not_utf8_is_cut_at_exact_bytes(text: bytes, passage: int, size: int) -> None:
    plan = contiguous([text], passage, aligned=False)
    found = spans(list(divide(documents([text], size), plan)))
    sizes = Counter[str]()
    for piece in found:
        sizes[piece.part] += len(piece.text)
    assert [sizes[part] for part in PARTS] == [plan.cuts[0], plan.cuts[1] - plan.cuts[0], len(text) - plan.cuts[1]]
    held_out = [piece for piece in found if piece.part != "train"]
    for this, after in pairwise(held_out):
        if this.part == after.part:
            assert len(this.text) == passage
    assert all(2 * len(piece.text) < 3 * passage + 1 for piece in held_out)


def test_a_cut_inside_a_character_moves_to_its_end() -> None:
    text = b"a" * 17 + "é".encode() + b"b"  # 90 % of 20 bytes is inside the é
    found = spans(list(divide(documents([text], 5), contiguous([text], 8))))
    assert [(piece.part, piece.text) for piece in found] == [("train", text[:19]), ("validation", b""), ("test", b"b")][
        ::2
    ]


def test_documents_are_divided_by_hash_in_about_the_right_shares() -> None:
    share = Counter(part_of(f"file-{number}.txt".encode()) for number in range(20_000))
    assert share["train"] == pytest.approx(18_000, rel=0.02)
    assert share["validation"] == pytest.approx(1_000, rel=0.15)
    assert share["test"] == pytest.approx(1_000, rel=0.15)


def test_a_document_stays_whole_and_its_part_depends_on_its_key_alone() -> None:
    texts = [f"text {number}".encode() for number in range(200)]
    plan = Plan(rule="hash", cuts=(0, 0), aligned=True, utf8=True, passage=3, in_passages=())
    found = spans(list(divide(documents(texts, 3), plan)))
    assert [piece.text for piece in found] == texts
    assert [piece.part for piece in found] == [part_of(str(number).encode()) for number in range(200)]
    assert {piece.join for piece in found} == {Join.DOCUMENT}
