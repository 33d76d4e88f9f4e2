"""Find the source of text for a corpus name: a built-in corpus, a Hugging Face dataset, a file or a folder.

enwik8, text8 and wikitext-103 are read from local files if there are any, otherwise from the Hugging Face Hub through
the optional `datasets` library.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from qkflow.data.recall.spec import RECALL_TASKS
from qkflow.data.text import reading
from qkflow.data.text.config import CorpusConfig
from qkflow.data.text.reading import TextFile
from qkflow.data.text.sources import STDLIB, Document, Source, from_path, row_document, standard_library, text_document
from qkflow.data.text.splits import SPLITS, hash_split
from qkflow.errors import UsageError, unknown

HUB_DATASETS = {
    "enwik8": ("LTCB/enwik8", "enwik8-raw"),
    "text8": ("afmck/text8", None),
    "wikitext-103": ("Salesforce/wikitext", "wikitext-103-raw-v1"),
}
HUB_BYTES = {"enwik8": 100_000_000, "text8": 100_000_000}
HUB_SPLITS = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
WIKITEXT_FOLDERS = ("wikitext-103", "wikitext-103-raw", "wikitext-103-v1", "wikitext-103-raw-v1", "")
WIKITEXT_SPLITS = {"train": "train", "valid": "validation", "test": "test"}
WIKITEXT_FILE = re.compile(r"(?:.*/)?wiki\.(train|valid|test)\.(tokens|raw)")
WIKITEXT_TITLE = re.compile(rb" = (?!= )[^\n]+ = \s*")

CORPUS_NAMES = (STDLIB, *HUB_DATASETS, *RECALL_TASKS)
"""Corpora with a name; recall tasks also take options, as in `mqar:pairs=4+8`."""

Dataset = Mapping[str, Iterable[Any]]


def find_source(config: CorpusConfig) -> Source:
    """Return the source that `config.source` names: a built-in corpus, `hf:NAME`, a file or a folder.

    >>> find_source(CorpusConfig(source="python-stdlib")).name
    'python-stdlib'
    """
    if config.source == STDLIB:
        return standard_library()
    if config.source in HUB_DATASETS:
        return _builtin(config)
    if config.source.startswith("hf:"):
        return _hub_source(config.source.removeprefix("hf:"), config.field)
    path = Path(config.source).expanduser()
    if config.source and path.exists():
        return from_path(path, config.field)
    raise _not_found(config.source, path)


def _not_found(source: str, path: Path) -> UsageError:
    if not path.suffix and len(path.parts) <= 1:
        name, _, options = source.partition(":")
        error = unknown("corpus", name if "=" in options else source, CORPUS_NAMES)
        return UsageError(f"{error}, hf:NAME; no file or folder has that name either")
    siblings = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
    similar = get_close_matches(path.name, siblings, n=1)
    hint = (
        f"did you mean {str(path.parent / similar[0])!r}?"
        if similar
        else f"use a path or one of {', '.join(CORPUS_NAMES)}"
    )
    return UsageError(f"no file or folder {source!r}: {hint}")


# Built-in corpora from local files


def _builtin(config: CorpusConfig) -> Source:
    """Return a built-in corpus from `data_dir`, QKFLOW_DATA, the current folder or the Hub, in that order."""
    name = config.source
    folders = [Path(folder).expanduser() for folder in (config.data_dir, os.environ.get("QKFLOW_DATA")) if folder]
    if config.data_dir and not folders[0].is_dir():
        raise UsageError(f"no folder {config.data_dir!r}: set --data-dir to the folder that contains {name}")
    for folder in (*folders, Path()):
        if name == "wikitext-103":
            if path := _find_wikitext(folder):
                return _wikitext(path)
        elif path := _find_text(folder, name):
            return _local_text(name, path)
    return _builtin_from_hub(name, folders)


def _find_text(folder: Path, name: str) -> Path | None:
    for stem in (parent / f"{name}{suffix}" for parent in (folder, folder / name) for suffix in ("", ".txt")):
        for compression in ("", *reading.COMPRESSIONS, ".zip"):
            if (path := stem.with_name(stem.name + compression)).is_file():
                return path
    return None


def _local_text(name: str, path: Path) -> Source:
    def documents() -> Iterator[Document]:
        blocks = (block for file in reading.iter_files(path) for block in reading.iter_blocks(file))
        return text_document(str(path), b"", blocks)

    return Source(name=name, identity=f"text {name}", documents=documents, files=lambda: [path], has_exact_cuts=True)


def _find_wikitext(folder: Path) -> Path | None:
    for name in WIKITEXT_FOLDERS:
        path, archive = folder / name, folder / f"{name}.zip"
        if path.is_dir() and any(_is_wikitext(reading.text_file(file)) for file in path.iterdir()):
            return path
        if name and archive.is_file():
            return archive
    return None


def _wikitext(path: Path) -> Source:
    def matches() -> Iterator[tuple[str, str, TextFile]]:
        for file in reading.iter_files(path, _is_wikitext):
            match = WIKITEXT_FILE.fullmatch(file.label)
            if match and not (path.is_dir() and "/" in file.label):  # a subfolder can hold another WikiText
                yield match[1], match[2], file

    def documents() -> Iterator[Document]:
        chosen_form = _wikitext_form(path, {(split, form) for split, form, _ in matches()})
        for split, form, file in matches():
            if form == chosen_form:
                yield from _article_documents(reading.iter_lines(file), WIKITEXT_SPLITS[split], file.name)

    def files() -> list[Path]:
        return [path] if path.is_file() else reading.list_files(path, _is_wikitext)

    return Source(name="wikitext-103", identity=f"wikitext {path.resolve()}", documents=documents, files=files)


def _is_wikitext(file: TextFile) -> bool:
    return WIKITEXT_FILE.fullmatch(file.label) is not None


def _wikitext_form(path: Path, available: set[tuple[str, str]]) -> str:
    """Return `raw` or `tokens`, whichever has all three splits."""
    for form in ("raw", "tokens"):
        if all((split, form) in available for split in WIKITEXT_SPLITS):
            return form
    raise UsageError(
        f"{path} is incomplete: expected wiki.train, wiki.valid and wiki.test, all .raw or all .tokens; "
        "download wikitext-103 again"
    )


def articles(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yield the lines of each WikiText article; an article starts at ` = Title = ` after an empty line.

    >>> text = [b" = A = \\n", b" \\n", b" = = Life = = \\n", b" x = y \\n", b" \\n", b" = B = \\n"]
    >>> [len(article) for article in articles(text)]
    [5, 1]
    """
    article: list[bytes] = []
    has_title = False
    for line in lines:
        after_empty_line = not article or not article[-1].strip()
        if after_empty_line and WIKITEXT_TITLE.fullmatch(line):
            if has_title:
                yield article
                article = []
            has_title = True
        article.append(line)
    if article:
        yield article


def _article_documents(lines: Iterable[bytes], split: str, name: str) -> Iterator[Document]:
    for article in articles(lines):
        text = b"".join(article)
        yield Document(name=name, key=text, split=split, blocks=(text,))


# Hugging Face datasets


def _builtin_from_hub(name: str, folders: list[Path]) -> Source:
    searched = ", ".join(map(str, folders)) or "--data-dir or QKFLOW_DATA (not set)"
    hint = f"{name} is not in {searched} or the current folder: put the file there"
    dataset = load_dataset(*HUB_DATASETS[name], hint=hint)

    def texts(split: str) -> Iterator[bytes]:
        for row in _rows(dataset, split):
            yield str(row["text"]).encode()

    def wikitext() -> Iterator[Document]:
        for split in SPLITS:
            lines = (text if text.endswith(b"\n") else text + b"\n" for text in texts(split))
            yield from _article_documents(lines, split, f"{name} {split}")

    def checked_blocks() -> Iterator[bytes]:
        n_bytes = 0
        for split in SPLITS:
            for text in texts(split):
                n_bytes += len(text)
                yield text
        if n_bytes != HUB_BYTES[name]:
            raise UsageError(f"the dataset {name} has {n_bytes} bytes, expected {HUB_BYTES[name]}: {hint}")

    is_wikitext = name == "wikitext-103"
    return Source(
        name=name,
        identity="wikitext" if is_wikitext else f"text {name}",
        documents=wikitext if is_wikitext else lambda: text_document(name, b"", checked_blocks()),
        files=lambda: _dataset_files(dataset),
        has_exact_cuts=not is_wikitext,
    )


def _hub_source(name: str, field: str) -> Source:
    """Return the dataset `NAME` or `NAME/CONFIG`, where NAME may be `owner/name`.

    If the dataset has only one of the validation and test splits, the other is taken from its train split by hash.
    """
    dataset = _load_by_name(name)
    split_names = {split: hub_name for split in SPLITS if (hub_name := _split_name(dataset, split))}
    if "train" not in split_names:
        raise UsageError(f"hf:{name} has no train split, only {', '.join(dataset)}: choose another dataset")
    missing = [split for split in SPLITS if split not in split_names]

    def assign(document: Document, split: str) -> Document:
        if len(missing) == 2:  # no splits of its own: all documents are split by hash
            return document
        hashed = hash_split(document.key)
        return replace(document, split=hashed if split == "train" and hashed in missing else split)

    def documents() -> Iterator[Document]:
        for split, hub_name in split_names.items():
            for number, row in enumerate(_rows(dataset, split)):
                for document in row_document(row, field, f"hf:{name} {hub_name} row {number}"):
                    yield assign(document, split)

    return Source(
        name=name.replace("/", "-"),
        identity=f"hub {name}",
        documents=documents,
        files=lambda: _dataset_files(dataset),
    )


def load_dataset(name: str, config: str | None, *, hint: str) -> Dataset:
    """Call `datasets.load_dataset` and convert its errors to a `UsageError` with `hint`. No dataset code is run."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise UsageError(f"{hint}, or install the download library: pip install 'qkflow[hf]'") from None
    try:
        return datasets.load_dataset(name, config) if config else datasets.load_dataset(name)
    except Exception as error:  # any error concerns this dataset: no network, unknown name, unsupported script
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UsageError(f"{hint}; `datasets` could not load {name} ({reason})") from error


def _load_by_name(name: str) -> Dataset:
    words = name.split("/")
    if not name or len(words) > 3 or not all(words):
        raise UsageError(f"hf:{name} is not a dataset name: use hf:NAME, hf:NAME/CONFIG or hf:OWNER/NAME/CONFIG")
    hint = f"check the name hf:{name} and the network connection, or use a file"
    if len(words) == 3:
        return load_dataset("/".join(words[:2]), words[2], hint=hint)
    try:
        return load_dataset(name, None, hint=hint)
    except UsageError as error:
        if len(words) == 1 or error.__cause__ is None:
            raise
    return load_dataset(words[0], words[1], hint=hint)  # `a/b` is either owner/name or name/config


def _split_name(dataset: Dataset, split: str) -> str | None:
    return next((name for name in HUB_SPLITS[split] if name in dataset), None)


def _rows(dataset: Dataset, split: str) -> Iterator[Any]:
    if name := _split_name(dataset, split):
        yield from dataset[name]


def _dataset_files(dataset: Dataset) -> list[Path]:
    """Return the files in which `datasets` caches the splits; an empty list if they are unknown."""
    cached = [getattr(split, "cache_files", None) for split in dataset.values()]
    return [Path(file["filename"]) for split in cached for file in split or ()] if all(cached) else []
