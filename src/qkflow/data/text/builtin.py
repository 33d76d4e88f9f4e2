"""Corpora known by name: enwik8, text8 and wikitext-103, from local files or, failing that, from the Hub."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from qkflow.data.text import hub, reading
from qkflow.data.text.config import CorpusConfig
from qkflow.data.text.sources import Document, Source
from qkflow.errors import UsageError

NAMES = ("enwik8", "text8", "wikitext-103")
HUB = {
    "enwik8": ("LTCB/enwik8", "enwik8-raw"),
    "text8": ("afmck/text8", None),
    "wikitext-103": ("Salesforce/wikitext", "wikitext-103-raw-v1"),
}
HUB_BYTES = {"enwik8": 100_000_000, "text8": 100_000_000}
FORMS = ("", ".txt")
WIKITEXT_FOLDERS = ("wikitext-103", "wikitext-103-raw", "wikitext-103-v1", "wikitext-103-raw-v1", "")
WIKITEXT_PARTS = {"train": "train", "valid": "validation", "test": "test"}
WIKITEXT_FILE = re.compile(r"(?:.*/)?wiki\.(train|valid|test)\.(tokens|raw)")
TITLE = re.compile(rb" = (?!= )[^\n]+ = \s*")


def named(config: CorpusConfig) -> Source:
    """The corpus called `config.source`: in `data_dir`, then in QKFLOW_DATA, then here, then through `datasets`."""
    places = _places(config)
    find = _find_wikitext if config.source == "wikitext-103" else _find_text
    for place in places:
        if path := find(place, config.source):
            if config.source == "wikitext-103":
                return _wikitext(path)
            return _one_text(config.source, str(path), lambda: _entry_blocks(path), lambda: [path])
    return _from_hub(config.source, places)


def articles(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    """The lines of each WikiText article: a new one begins where ` = Title = ` follows an empty line.

    >>> text = [b" = A = \\n", b" \\n", b" = = Life = = \\n", b" x = y \\n", b" \\n", b" = B = \\n"]
    >>> [len(article) for article in articles(text)]
    [5, 1]
    """
    article: list[bytes] = []
    begun = False
    for line in lines:
        after_empty = not article or not article[-1].strip()
        if after_empty and TITLE.fullmatch(line):
            if begun:
                yield article
                article = []
            begun = True
        article.append(line)
    if article:
        yield article


def _places(config: CorpusConfig) -> list[Path]:
    places = [Path(place).expanduser() for place in (config.data_dir, os.environ.get("QKFLOW_DATA")) if place]
    if config.data_dir and not places[0].is_dir():
        raise UsageError(f"no folder {config.data_dir!r}: give --data-dir the folder that holds {config.source}")
    return [*places, Path()]


def _find_text(place: Path, name: str) -> Path | None:
    stems = [folder / f"{name}{form}" for folder in (place, place / name) for form in FORMS]
    for stem in stems:
        for compression in ("", *reading.COMPRESSIONS, ".zip"):
            if (path := stem.with_name(stem.name + compression)).is_file():
                return path
    return None


def _find_wikitext(place: Path, name: str) -> Path | None:
    del name
    for folder in WIKITEXT_FOLDERS:
        path, archive = place / folder, place / f"{folder}.zip"
        if path.is_dir() and any(WIKITEXT_FILE.fullmatch(reading.bare(file.name)) for file in path.iterdir()):
            return path
        if folder and archive.is_file():
            return archive
    return None


def _entry_blocks(path: Path) -> Iterator[bytes]:
    for entry in reading.entries(path):
        yield from reading.blocks(entry)


def _one_text(name: str, shown: str, blocks: Callable[[], Iterator[bytes]], files: Callable[[], list[Path]]) -> Source:
    def documents() -> Iterator[Document]:
        pieces = blocks()
        if first := next(pieces, b""):
            yield Document(shown=shown, key=b"", pieces=itertools.chain([first], pieces))

    return Source(name=name, identity=f"text {name}", documents=documents, files=files, exact=True)


def _wikitext(path: Path) -> Source:
    def entries() -> Iterator[tuple[str, str, reading.Entry]]:
        for entry in reading.entries(path, _is_wikitext):
            match = WIKITEXT_FILE.fullmatch(entry.label)
            if match and not (path.is_dir() and "/" in entry.label):  # a folder below can hold another WikiText
                yield match[1], match[2], entry

    def documents() -> Iterator[Document]:
        wanted = _wikitext_form(path, {(part, form) for part, form, _ in entries()})
        for part, form, entry in entries():
            if form == wanted:
                yield from _articles(reading.lines(entry), WIKITEXT_PARTS[part], entry.shown)

    def files() -> list[Path]:
        return [path] if path.is_file() else reading.files(path, _is_wikitext)

    return Source(name="wikitext-103", identity=f"wikitext {path.resolve()}", documents=documents, files=files)


def _is_wikitext(entry: reading.Entry) -> bool:
    return WIKITEXT_FILE.fullmatch(entry.label) is not None


def _wikitext_form(path: Path, found: set[tuple[str, str]]) -> str:
    """`raw` or `tokens`, whichever is there with all three parts."""
    for form in ("raw", "tokens"):
        if all((part, form) in found for part in WIKITEXT_PARTS):
            return form
    raise UsageError(
        f"{path} lacks a part of wikitext-103: it needs wiki.train, wiki.valid and wiki.test, all .raw or all .tokens"
    )


def _articles(lines: Iterable[bytes], part: str, shown: str) -> Iterator[Document]:
    for article in articles(lines):
        text = b"".join(article)
        yield Document(shown=shown, key=text, part=part, pieces=(text,))


def _from_hub(name: str, places: list[Path]) -> Source:
    looked = ", ".join(str(place) for place in places[:-1]) or "--data-dir and QKFLOW_DATA, which are not set,"
    hint = f"{name} was not found in {looked} nor here: put the file there"
    splits = hub.load(*HUB[name], hint=hint)

    def rows(wanted: str) -> Iterator[bytes]:
        for row in hub.rows(splits, wanted):
            yield str(row["text"]).encode()

    def wikitext() -> Iterator[Document]:
        for part in ("train", "validation", "test"):
            lines = (text if text.endswith(b"\n") else text + b"\n" for text in rows(part))
            yield from _articles(lines, part, f"{name} {part}")

    def whole() -> Iterator[bytes]:
        size = 0
        for part in ("train", "validation", "test"):
            for text in rows(part):
                size += len(text)
                yield text
        if size != HUB_BYTES[name]:
            raise UsageError(f"the Hub's {name} has {size} bytes, not the usual {HUB_BYTES[name]}: {hint}")

    if name == "wikitext-103":
        return Source(name=name, identity="wikitext", documents=wikitext, files=lambda: hub.files(splits))
    return _one_text(name, name, whole, lambda: hub.files(splits))
