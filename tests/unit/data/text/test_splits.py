"""Dividing loses no text, duplicates none and cuts no character, for any block size."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data.text.sources import Document
from qkflow.data.text.splits import SPLITS, Boundary, SplitPlan, TextPiece, divide, hash_split

QUICK = settings(deadline=None, max_examples=25)
TEXTS = st.lists(st.text("aé漢\n𝄞 ", min_size=1, max_size=300), min_size=1, max_size=4)


def documents(texts: list[bytes], size: int) -> list[Document]:
    cut = [[text[i : i + size] for i in range(0, len(text), size)] for text in texts]
    return [Document(name="", key=str(number).encode(), blocks=blocks) for number, blocks in enumerate(cut)]


def contiguous(texts: list[bytes], passage: int, *, aligned: bool = True) -> SplitPlan:
    total = sum(map(len, texts))
    cuts = (total * 90 // 100, total * 95 // 100)
    return SplitPlan(
        rule="contiguous",
        test_percent=5,
        cuts=cuts,
        align_cuts=aligned,
        is_utf8=aligned,
        passage=passage,
        passage_splits=("validation", "test"),
    )


def spans(pieces: list[TextPiece]) -> list[TextPiece]:
    """Join the pieces of each span."""
    joined: list[TextPiece] = []
    for piece in pieces:
        if piece.boundary is Boundary.NONE:
            assert piece.split == joined[-1].split
            joined[-1] = joined[-1]._replace(text=joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined


@QUICK
@given(texts=TEXTS, size=st.integers(1, 400), passage=st.integers(1, 40))
def test_contiguous_split_keeps_text_order_characters_and_documents(texts: list[str], size: int, passage: int) -> None:
    raw = [text.encode() for text in texts]
    plan = contiguous(raw, passage)
    pieces = spans(list(divide(documents(raw, size), plan)))
    assert b"".join(piece.text for piece in pieces) == b"".join(raw)
    assert [SPLITS.index(piece.split) for piece in pieces] == sorted(SPLITS.index(piece.split) for piece in pieces)
    assert all(piece.text.decode() for piece in pieces)
    rebuilt: list[bytes] = []
    for piece in pieces:
        if piece.boundary is Boundary.DOCUMENT:
            rebuilt.append(b"")
        rebuilt[-1] += piece.text
    assert rebuilt == raw


@QUICK
@given(texts=TEXTS, size=st.integers(1, 400), passage=st.integers(1, 40))
def test_spans_do_not_depend_on_the_block_size(texts: list[str], size: int, passage: int) -> None:
    raw = [text.encode() for text in texts]
    plan = contiguous(raw, passage)
    assert spans(list(divide(documents(raw, size), plan))) == spans(list(divide(documents(raw, 10**6), plan)))


@QUICK
@given(text=st.binary(min_size=20, max_size=3000), passage=st.integers(1, 100), size=st.integers(1, 500))
def test_text_that_is_not_utf8_is_cut_at_exact_bytes(text: bytes, passage: int, size: int) -> None:
    plan = contiguous([text], passage, aligned=False)
    pieces = spans(list(divide(documents([text], size), plan)))
    sizes = Counter[str]()
    for piece in pieces:
        sizes[piece.split] += len(piece.text)
    assert [sizes[split] for split in SPLITS] == [plan.cuts[0], plan.cuts[1] - plan.cuts[0], len(text) - plan.cuts[1]]
    held_out = [piece for piece in pieces if piece.split != "train"]
    for this, after in pairwise(held_out):
        if this.split == after.split:
            assert len(this.text) == passage
    assert all(2 * len(piece.text) < 3 * passage + 1 for piece in held_out)


def test_cut_inside_a_character_moves_to_its_end() -> None:
    text = b"a" * 17 + "é".encode() + b"b"  # 90 % of 20 bytes is inside the é
    pieces = spans(list(divide(documents([text], 5), contiguous([text], 8))))
    assert [(piece.split, piece.text) for piece in pieces] == [
        ("train", text[:19]),
        ("validation", b""),
        ("test", b"b"),
    ][::2]


def test_hash_split_has_the_right_shares() -> None:
    share = Counter(hash_split(f"file-{number}.txt".encode()) for number in range(20_000))
    assert share["train"] == pytest.approx(18_000, rel=0.02)
    assert share["validation"] == pytest.approx(1_000, rel=0.15)
    assert share["test"] == pytest.approx(1_000, rel=0.15)


def test_more_test_documents_come_from_train_and_validation_stays() -> None:
    keys = [f"file-{number}.txt".encode() for number in range(20_000)]
    few, many = [hash_split(key) for key in keys], [hash_split(key, 20) for key in keys]
    assert Counter(many)["test"] == pytest.approx(4_000, rel=0.1)
    moved = {(before, after) for before, after in zip(few, many, strict=True) if before != after}
    assert moved == {("train", "test")}


def test_hash_split_keeps_documents_whole_and_depends_only_on_the_key() -> None:
    texts = [f"text {number}".encode() for number in range(200)]
    plan = SplitPlan(
        rule="hash", test_percent=20, cuts=(0, 0), align_cuts=True, is_utf8=True, passage=3, passage_splits=()
    )
    pieces = spans(list(divide(documents(texts, 3), plan)))
    assert [piece.text for piece in pieces] == texts
    assert [piece.split for piece in pieces] == [hash_split(str(number).encode(), 20) for number in range(200)]
    assert {piece.boundary for piece in pieces} == {Boundary.DOCUMENT}
