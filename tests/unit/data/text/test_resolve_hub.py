"""Hugging Face datasets, with a fake `datasets` module."""

from __future__ import annotations

import os
import sys
import types
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from qkflow.data import Corpus, CorpusConfig, open_corpus
from qkflow.errors import UsageError

Library = dict[tuple[str, ...], Any]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """The datasets that the fake `load_dataset` returns, by its arguments."""
    known: Library = {}
    module = types.ModuleType("datasets")

    def load_dataset(*names: str) -> Any:
        if names not in known:
            raise FileNotFoundError(f"Dataset {names} doesn't exist\non the Hub")
        return known[names]

    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return known


def rows(start: int, stop: int) -> list[dict[str, str]]:
    return [{"text": f"row {number}", "other": "x"} for number in range(start, stop)]


def numbers(corpus: Corpus) -> list[list[int]]:
    splits = (corpus.train, corpus.validation, corpus.test)
    return [[int(corpus.decode(split.tokens[a:b])[4:]) for a, b in split.documents] for split in splits]


@pytest.mark.parametrize("dev", ["validation", "valid", "dev"])
def test_dataset_keeps_its_splits(library: Library, dev: str) -> None:
    library[("toys",)] = {"test": rows(8, 10), "train": rows(0, 5), dev: rows(5, 8)}
    corpus = open_corpus(CorpusConfig(source="hf:toys"))
    assert numbers(corpus) == [[0, 1, 2, 3, 4], [5, 6, 7], [8, 9]]
    assert corpus.record["split"]["rule"] == "official"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("hf:toys", ("toys",)),
        ("hf:owner/toys", ("owner/toys",)),
        ("hf:toys/small", ("toys", "small")),
        ("hf:owner/toys/small", ("owner/toys", "small")),
    ],
)
def test_dataset_name_with_owner_and_config(library: Library, source: str, names: tuple[str, ...]) -> None:
    library[names] = {"train": rows(0, 5), "validation": rows(5, 8), "test": rows(8, 10)}
    assert open_corpus(CorpusConfig(source=source)).train.bytes == 25


def test_dataset_with_only_train_is_split_by_hash(library: Library) -> None:
    library[("toys",)] = {"train": rows(0, 200)}
    corpus = open_corpus(CorpusConfig(source="hf:toys"))
    assert corpus.record["split"]["rule"] == "hash"
    assert sorted(chain(*numbers(corpus))) == list(range(200))


def test_missing_split_is_taken_from_train(library: Library) -> None:
    library[("toys",)] = {"train": rows(0, 300), "validation": rows(300, 320)}
    train, validation, test = numbers(open_corpus(CorpusConfig(source="hf:toys")))
    assert validation == list(range(300, 320))
    assert sorted(train + test) == list(range(300))
    assert 0 < len(test) < 40


def test_held_out_split_of_one_text_is_cut_into_passages(library: Library) -> None:
    library[("toys",)] = {split: [{"text": split * 100}] for split in ("train", "validation", "test")}
    corpus = open_corpus(CorpusConfig(source="hf:toys", passage=100))
    assert [len(split.documents) for split in (corpus.train, corpus.validation, corpus.test)] == [1, 10, 4]
    assert corpus.validation.tokens[0] == corpus.tokenizer.end


def test_missing_field_error_lists_the_fields(library: Library) -> None:
    library[("toys",)] = {"train": rows(0, 5)}
    with pytest.raises(UsageError, match=r"hf:toys train row 0 has no field 'body': .*\(text, other\)"):
        open_corpus(CorpusConfig(source="hf:toys", field="body"))


def test_dataset_without_train_split_raises(library: Library) -> None:
    library[("toys",)] = {"train2": rows(0, 5)}
    with pytest.raises(UsageError, match="hf:toys has no train split, only train2"):
        open_corpus(CorpusConfig(source="hf:toys"))


def test_load_errors_are_one_line(library: Library) -> None:
    with pytest.raises(UsageError, match=r"check the name hf:nothing and the network.*doesn't exist") as caught:
        open_corpus(CorpusConfig(source="hf:nothing"))
    assert "\n" not in str(caught.value)


def test_missing_library_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"pip install 'qkflow\[hf\]'"):
        open_corpus(CorpusConfig(source="hf:owner/toys"))


def test_dataset_in_unchanged_files_is_scanned_once(library: Library, tmp_path: Path) -> None:
    class CachedRows(list[dict[str, str]]):
        n_reads = 0
        cache_files = ({"filename": str(tmp_path / "data.arrow")},)

        def __iter__(self) -> Any:
            self.n_reads += 1
            return super().__iter__()

    (tmp_path / "data.arrow").write_bytes(b"x")
    os.utime(tmp_path / "data.arrow", (1e9, 1e9))
    cached = CachedRows(rows(0, 200))
    library[("toys",)] = {"train": cached}
    open_corpus(CorpusConfig(source="hf:toys"))
    n_reads = cached.n_reads
    open_corpus(CorpusConfig(source="hf:toys"))
    assert cached.n_reads == n_reads == 2
