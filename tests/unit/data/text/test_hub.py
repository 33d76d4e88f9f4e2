"""Datasets through the `datasets` library, which is played by a module of the test."""

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
    """What `load_dataset` answers to which arguments; anything else it has not got."""
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
def test_a_dataset_keeps_its_own_splits(library: Library, dev: str) -> None:
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
def test_a_name_can_have_an_owner_and_a_config(library: Library, source: str, names: tuple[str, ...]) -> None:
    library[names] = {"train": rows(0, 5), "validation": rows(5, 8), "test": rows(8, 10)}
    assert open_corpus(CorpusConfig(source=source)).train.bytes == 25


def test_a_dataset_without_held_out_parts_is_split_by_hash(library: Library) -> None:
    library[("toys",)] = {"train": rows(0, 200)}
    corpus = open_corpus(CorpusConfig(source="hf:toys"))
    assert corpus.record["split"]["rule"] == "hash"
    assert sorted(chain(*numbers(corpus))) == list(range(200))


def test_one_missing_part_is_taken_out_of_train(library: Library) -> None:
    library[("toys",)] = {"train": rows(0, 300), "validation": rows(300, 320)}
    train, validation, test = numbers(open_corpus(CorpusConfig(source="hf:toys")))
    assert validation == list(range(300, 320))
    assert sorted(train + test) == list(range(300))
    assert 0 < len(test) < 40


def test_a_held_out_part_of_one_long_text_is_cut_into_passages(library: Library) -> None:
    library[("toys",)] = {part: [{"text": part * 100}] for part in ("train", "validation", "test")}
    corpus = open_corpus(CorpusConfig(source="hf:toys", passage=100))
    assert [len(split.documents) for split in (corpus.train, corpus.validation, corpus.test)] == [1, 10, 4]
    assert corpus.validation.tokens[0] == corpus.end


def test_a_row_without_the_field_is_told_which_there_are(library: Library) -> None:
    library[("toys",)] = {"train": rows(0, 5)}
    with pytest.raises(UsageError, match=r"hf:toys train row 0 has no field 'body': .*\(text, other\)"):
        open_corpus(CorpusConfig(source="hf:toys", field="body"))


def test_a_dataset_without_a_train_part_is_refused(library: Library) -> None:
    library[("toys",)] = {"train2": rows(0, 5)}
    with pytest.raises(UsageError, match="hf:toys has no train part, only train2"):
        open_corpus(CorpusConfig(source="hf:toys"))


def test_a_dataset_that_cannot_be_fetched_is_told_in_one_line(library: Library) -> None:
    with pytest.raises(UsageError, match=r"check the name hf:nothing and the network.*doesn't exist") as caught:
        open_corpus(CorpusConfig(source="hf:nothing"))
    assert "\n" not in str(caught.value)


def test_without_the_library_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"pip install 'qkflow\[hf\]'"):
        open_corpus(CorpusConfig(source="hf:owner/toys"))


def test_a_dataset_that_lies_in_files_is_not_read_again(library: Library, tmp_path: Path) -> None:
    class Stored(list[dict[str, str]]):
        read = 0
        cache_files = ({"filename": str(tmp_path / "data.arrow")},)

        def __iter__(self) -> Any:
            self.read += 1
            return super().__iter__()

    (tmp_path / "data.arrow").write_bytes(b"x")
    os.utime(tmp_path / "data.arrow", (1e9, 1e9))
    stored = Stored(rows(0, 200))
    library[("toys",)] = {"train": stored}
    open_corpus(CorpusConfig(source="hf:toys"))
    read = stored.read
    open_corpus(CorpusConfig(source="hf:toys"))
    assert stored.read == read == 2
