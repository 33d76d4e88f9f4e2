"""A source is scanned once, and again when its files have changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data import CorpusConfig
from qkflow.data.text import splits
from qkflow.data.text.sources import Document, Source, from_path
from qkflow.data.text.splits import ScanResult, cached_scan, scan


def source_of(*texts: list[bytes], label: str = "") -> Source:
    def documents() -> list[Document]:
        return [Document(name=str(n), label=label, key=b"", blocks=blocks) for n, blocks in enumerate(texts)]

    return Source(name="test", identity="test", documents=lambda: iter(documents()), files=list)


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[Source]:
    scanned: list[Source] = []

    def counted(source: Source) -> ScanResult:
        scanned.append(source)
        return scan(source)

    monkeypatch.setattr(splits, "scan", counted)
    return scanned


def make_old(path: Path) -> Path:
    os.utime(path, (1e9, 1e9))
    return path


def test_unchanged_source_is_scanned_once(tmp_path: Path, cache: Path, scans: list[Source]) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")
    source = from_path(make_old(path), "text")
    first = cached_scan(source, CorpusConfig(), cache)
    assert cached_scan(source, CorpusConfig(), cache) == first
    assert len(scans) == 1
    path.write_text("texu")
    assert cached_scan(from_path(make_old(path), "text"), CorpusConfig(), cache) != first
    assert len(scans) == 2


def test_recently_written_file_is_scanned_again(tmp_path: Path, cache: Path, scans: list[Source]) -> None:
    (tmp_path / "a.txt").write_text("text")
    source = from_path(tmp_path / "a.txt", "text")
    cached_scan(source, CorpusConfig(), cache)
    cached_scan(source, CorpusConfig(), cache)
    assert len(scans) == 2


def test_cache_depends_on_field_and_root(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.jsonl").write_text('{"text": "x", "body": "y"}')
    make_old(tmp_path / "docs" / "a.jsonl")
    digests = {
        cached_scan(from_path(path, field), CorpusConfig(field=field), cache).digest
        for path in (tmp_path / "docs", tmp_path / "docs" / "a.jsonl")
        for field in ("text", "body")
    }
    assert len(digests) == 2
    (tmp_path / "docs" / "b.txt").write_text("x")
    make_old(tmp_path / "docs" / "b.txt")
    (tmp_path / "docs" / "a.jsonl").unlink()
    single = cached_scan(from_path(tmp_path / "docs" / "b.txt", "text"), CorpusConfig(), cache)
    assert cached_scan(from_path(tmp_path / "docs", "text"), CorpusConfig(), cache) != single


def test_invalid_cache_entry_is_replaced(tmp_path: Path, cache: Path, scans: list[Source]) -> None:
    (tmp_path / "a.txt").write_text("text")
    source = from_path(make_old(tmp_path / "a.txt"), "text")
    first = cached_scan(source, CorpusConfig(), cache)
    (entry,) = (cache / "scans").iterdir()
    for content in ("{", "[]", '{"digest": 3}'):
        entry.write_text(content)
        assert cached_scan(source, CorpusConfig(), cache) == first
    assert len(scans) == 4


@settings(deadline=None, max_examples=25)
@given(data=st.binary(min_size=1, max_size=60), size=st.integers(1, 9))
def test_first_invalid_utf8_byte_is_found_for_any_block_size(data: bytes, size: int) -> None:
    blocks = [data[i : i + size] for i in range(0, len(data), size)]
    try:
        data.decode()
        expected = None
    except UnicodeDecodeError as error:
        expected = error.start
    not_utf8 = scan(source_of([b"fine"], blocks)).not_utf8
    assert not_utf8 == (None if expected is None else ("1", expected))


def test_digest_depends_on_text_and_borders_not_on_blocks() -> None:
    def digest(*texts: list[bytes], label: str = "") -> str:
        return scan(source_of(*texts, label=label)).digest

    assert digest([b"ab", b"c"]) == digest([b"a", b"bc"])
    borders = {digest([b"abc"]), digest([b"ab"], [b"c"]), digest([b"a"], [b"bc"])}
    labels = {digest([b"abc"], label=label) for label in ("x", "y", "xy")}
    assert len(borders | labels) == 6
