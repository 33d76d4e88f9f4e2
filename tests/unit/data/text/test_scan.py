"""A source is read once, and again when its files have changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data import CorpusConfig
from qkflow.data.text import scan
from qkflow.data.text.sources import Document, Source, from_path


def source_of(*texts: list[bytes], label: str = "") -> Source:
    def documents() -> list[Document]:
        return [Document(shown=str(n), label=label, key=b"", pieces=pieces) for n, pieces in enumerate(texts)]

    return Source(name="made", identity="made", documents=lambda: iter(documents()), files=list)


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[Source]:
    found: list[Source] = []
    read = scan.survey
    monkeypatch.setattr(scan, "survey", lambda source: found.append(source) or read(source))
    return found


def aged(path: Path) -> Path:
    os.utime(path, (1e9, 1e9))
    return path


def test_a_source_that_has_not_changed_is_not_read_again(tmp_path: Path, cache: Path, readings: list[Source]) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")
    source = from_path(aged(path), "text")
    first = scan.remembered(source, CorpusConfig(), cache)
    assert scan.remembered(source, CorpusConfig(), cache) == first
    assert len(readings) == 1
    path.write_text("texu")
    assert scan.remembered(from_path(aged(path), "text"), CorpusConfig(), cache) != first
    assert len(readings) == 2


def test_a_file_just_written_is_not_trusted_to_stay(tmp_path: Path, cache: Path, readings: list[Source]) -> None:
    (tmp_path / "a.txt").write_text("text")
    source = from_path(tmp_path / "a.txt", "text")
    scan.remembered(source, CorpusConfig(), cache)
    scan.remembered(source, CorpusConfig(), cache)
    assert len(readings) == 2


def test_one_file_read_two_ways_is_two_texts(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.jsonl").write_text('{"text": "x", "body": "y"}')
    aged(tmp_path / "docs" / "a.jsonl")
    found = {
        scan.remembered(from_path(path, field), CorpusConfig(field=field), cache).digest
        for path in (tmp_path / "docs", tmp_path / "docs" / "a.jsonl")
        for field in ("text", "body")
    }
    assert len(found) == 2
    (tmp_path / "docs" / "b.txt").write_text("x")
    aged(tmp_path / "docs" / "b.txt")
    (tmp_path / "docs" / "a.jsonl").unlink()
    alone = scan.remembered(from_path(tmp_path / "docs" / "b.txt", "text"), CorpusConfig(), cache)
    assert scan.remembered(from_path(tmp_path / "docs", "text"), CorpusConfig(), cache) != alone


def test_a_broken_note_is_written_again(tmp_path: Path, cache: Path, readings: list[Source]) -> None:
    (tmp_path / "a.txt").write_text("text")
    source = from_path(aged(tmp_path / "a.txt"), "text")
    first = scan.remembered(source, CorpusConfig(), cache)
    (note,) = (cache / "surveys").iterdir()
    for content in ("{", "[]", '{"digest": 3}'):
        note.write_text(content)
        assert scan.remembered(source, CorpusConfig(), cache) == first
    assert len(readings) == 4


@settings(deadline=None, max_examples=25)
@given(data=st.binary(min_size=1, max_size=60), size=st.integers(1, 9))
def test_the_first_byte_that_is_not_utf8_is_found_in_any_pieces(data: bytes, size: int) -> None:
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    try:
        data.decode()
        want = None
    except UnicodeDecodeError as error:
        want = error.start
    found = scan.survey(source_of([b"fine"], pieces)).not_utf8
    assert found == (None if want is None else ("1", want))


def test_the_digest_depends_on_text_and_bounds_and_not_on_pieces() -> None:
    def digest(*texts: list[bytes], label: str = "") -> str:
        return scan.survey(source_of(*texts, label=label)).digest

    assert digest([b"ab", b"c"]) == digest([b"a", b"bc"])
    bounds = {digest([b"abc"]), digest([b"ab"], [b"c"]), digest([b"a"], [b"bc"])}
    labels = {digest([b"abc"], label=label) for label in ("x", "y", "xy")}
    assert len(bounds | labels) == 6
