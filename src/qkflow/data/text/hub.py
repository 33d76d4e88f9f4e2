"""Datasets of the Hugging Face Hub through the optional `datasets` library, with their own splits if they have any."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from qkflow.data.text.sources import Document, Source, row_document
from qkflow.data.text.splits import PARTS, part_of
from qkflow.errors import UsageError

NAMES = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
Splits = Mapping[str, Iterable[Any]]


def dataset(name: str, field: str) -> Source:
    """Any dataset by `NAME` or `NAME/CONFIG`; a NAME may itself be `owner/name`.

    A validation or test part that it lacks is taken out of its train part by content hash, 5 % each.
    """
    splits = _load_any(name)
    names = {part: found for part in PARTS if (found := _split_name(splits, part))}
    if "train" not in names:
        raise UsageError(f"hf:{name} has no train part, only {', '.join(splits)}: choose another dataset")
    missing = [part for part in PARTS if part not in names]

    def documents() -> Iterator[Document]:
        for part in names:
            for number, row in enumerate(rows(splits, part)):
                for document in row_document(row, field, f"hf:{name} {names[part]} row {number}"):
                    yield _placed(document, part, missing)

    return Source(name=name.replace("/", "-"), identity=f"hub {name}", documents=documents, files=lambda: files(splits))


def load(name: str, config: str | None, *, hint: str) -> Splits:
    """`datasets.load_dataset`, whose failures become one `UsageError` with `hint`. Code of a dataset is never run."""
    try:
        library = importlib.import_module("datasets")
    except ImportError:
        raise UsageError(f"{hint}, or install the library that fetches it: pip install 'qkflow[hf]'") from None
    try:
        return library.load_dataset(name, config) if config else library.load_dataset(name)
    except Exception as error:  # whatever it raises is about this dataset: no network, no such name, a script in it
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UsageError(f"{hint}; `datasets` could not fetch {name} ({reason})") from error


def rows(splits: Splits, part: str) -> Iterator[Any]:
    """The rows of one part; none when the dataset does not have it."""
    if name := _split_name(splits, part):
        yield from splits[name]


def files(splits: Splits) -> list[Path]:
    """The files that `datasets` keeps of these splits, or none where that is not known."""
    kept = [getattr(split, "cache_files", None) for split in splits.values()]
    return [Path(file["filename"]) for split in kept for file in split or ()] if all(kept) else []


def _load_any(name: str) -> Splits:
    words = name.split("/")
    if not name or len(words) > 3 or not all(words):
        raise UsageError(f"hf:{name} names no dataset: write hf:NAME, hf:NAME/CONFIG or hf:OWNER/NAME/CONFIG")
    hint = f"check the name hf:{name} and the network, or give a file"
    if len(words) == 3:
        return load("/".join(words[:2]), words[2], hint=hint)
    try:
        return load(name, None, hint=hint)
    except UsageError as error:
        if len(words) == 1 or error.__cause__ is None:
            raise
    return load(words[0], words[1], hint=hint)  # `a/b` can be owner and name, or name and config


def _split_name(splits: Splits, part: str) -> str | None:
    return next((name for name in NAMES[part] if name in splits), None)


def _placed(document: Document, part: str, missing: list[str]) -> Document:
    if len(missing) == 2:
        return document  # no split of its own: the usual rule
    hashed = part_of(document.key)
    own = hashed if part == "train" and hashed in missing else part
    return Document(shown=document.shown, key=document.key, part=own, pieces=document.pieces)
