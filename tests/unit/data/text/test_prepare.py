"""Corpora are prepared once, cached by content, and complete or absent after any interruption."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest

from qkflow import io
from qkflow.data import Corpus, CorpusConfig, Split, open_corpus
from qkflow.data.text import prepare, reading
from qkflow.data.text.corpus import token_dtype
from qkflow.errors import DiskError, UsageError

LONG = "".join(f"Line {n} of a long text, with é and 漢.\n" for n in range(3000)).encode()


def write_documents(path: Path, count: int = 80) -> Path:
    """Write enough documents for a split by hash."""
    path.mkdir()
    for number in range(count):
        (path / f"{number}.txt").write_text(f"Document {number}\n" * (number + 1))
    return path


def config(source: Path, **options: object) -> CorpusConfig:
    return CorpusConfig(source=str(source), **options)  # type: ignore[arg-type]


def texts(corpus: Corpus, split: Split) -> list[bytes]:
    return [corpus.decode(split.tokens[begin:end]) for begin, end in split.documents]


def splits(corpus: Corpus) -> dict[str, Split]:
    return {"train": corpus.train, "validation": corpus.validation, "test": corpus.test}


@pytest.mark.parametrize("options", [{}, {"tokens": "bpe", "vocabulary": 300}])
def test_documents_are_separated_by_end_tokens(tmp_path: Path, options: dict[str, object]) -> None:
    source = write_documents(tmp_path / "docs")
    corpus = open_corpus(config(source, **options))
    decoded = []
    for split in splits(corpus).values():
        assert len(split.documents) > 0
        assert split.tokens[0] == split.tokens[-1] == corpus.tokenizer.end
        begins, ends = split.documents.T
        assert begins.tolist() == [1, *(ends[:-1] + 1)]
        assert (split.tokens[ends] == corpus.tokenizer.end).all()
        assert (split.tokens == corpus.tokenizer.end).sum() == len(begins) + 1
        assert split.sizes.tolist() == [len(text) for text in texts(corpus, split)]
        assert split.tokens.max() < corpus.vocabulary
        decoded += texts(corpus, split)
    assert sorted(decoded) == sorted(path.read_bytes() for path in source.iterdir())
    assert corpus.record["split"]["rule"] == "hash"
    assert corpus.name == "docs"


@pytest.mark.parametrize("options", [{}, {"tokens": "bpe", "vocabulary": 400}])
def test_single_text_is_divided_into_passages(tmp_path: Path, options: dict[str, object]) -> None:
    (tmp_path / "long.txt").write_bytes(LONG)
    corpus = open_corpus(config(tmp_path / "long.txt", passage=500, **options))
    assert b"".join(text for split in splits(corpus).values() for text in texts(corpus, split)) == LONG
    assert [len(split.documents) for split in splits(corpus).values()] == [1, 13, 13]
    for split in splits(corpus).values():
        begins, ends = split.documents.T
        assert begins.tolist() == [1, *ends[:-1]]
        assert all(text.decode() for text in texts(corpus, split))
        assert split.sizes.tolist() == [len(text) for text in texts(corpus, split)]
    assert corpus.train.tokens[0] == corpus.tokenizer.end
    assert corpus.validation.tokens[0] == corpus.train.tokens[-1]
    assert corpus.test.tokens[0] == corpus.validation.tokens[-1]
    assert (corpus.validation.tokens != corpus.tokenizer.end).all()
    assert corpus.test.tokens[-1] == corpus.tokenizer.end


def test_few_documents_are_cut_contiguously(tmp_path: Path) -> None:
    source = tmp_path / "few"
    source.mkdir()
    for name, size in {"a": 850, "b": 80, "c": 20, "d": 50}.items():
        (source / f"{name}.txt").write_text(name * size)
    corpus = open_corpus(config(source, passage=30))
    assert texts(corpus, corpus.train) == [b"a" * 850, b"b" * 50]
    assert texts(corpus, corpus.validation) == [b"b" * 30, b"c" * 20]
    assert texts(corpus, corpus.test) == [b"d" * 30, b"d" * 20]
    assert corpus.validation.tokens[0] == ord("b")
    assert corpus.test.tokens[0] == corpus.tokenizer.end


def test_equal_lines_are_in_one_split(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"line {number % 200}"}) for number in range(600)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    corpus = open_corpus(config(tmp_path / "a.jsonl"))
    documents = [set(texts(corpus, split)) for split in splits(corpus).values()]
    assert sum(map(len, documents)) == len(set.union(*documents)) == 200
    assert sum(len(split.documents) for split in splits(corpus).values()) == 600


def test_location_and_compression_do_not_matter(tmp_path: Path) -> None:
    first = open_corpus(config(write_documents(tmp_path / "here")))
    shutil.copytree(tmp_path / "here", tmp_path / "there" / "deeper")
    for path in (tmp_path / "there" / "deeper").iterdir():
        (path.parent / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    second = open_corpus(config(tmp_path / "there" / "deeper"))
    assert (first.folder, first.digest) == (second.folder, second.digest)
    assert (first.name, second.name) == ("here", "deeper")


def test_cache_key_depends_on_content_names_and_relevant_options(tmp_path: Path) -> None:
    source = write_documents(tmp_path / "docs")
    (tmp_path / "long.txt").write_bytes(LONG)
    first = open_corpus(config(source))
    long = open_corpus(config(tmp_path / "long.txt"))
    assert open_corpus(config(source, vocabulary=999, passage=7)).folder == first.folder
    assert open_corpus(config(tmp_path / "long.txt", passage=7)).folder != long.folder
    bpe = {open_corpus(config(source, tokens="bpe", vocabulary=size)).folder for size in (300, 320)}
    assert len(bpe | {first.folder, long.folder}) == 4
    (source / "0.txt").rename(source / "zero.txt")
    renamed = open_corpus(config(source))
    (source / "zero.txt").write_text("other")
    changed = open_corpus(config(source))
    assert len({first.digest, renamed.digest, changed.digest}) == 3


def test_bpe_is_trained_on_the_train_split_only(tmp_path: Path) -> None:
    text = b"common words again and again. " * 300
    (tmp_path / "a.txt").write_bytes(text + b"xylophones " * 80)
    corpus = open_corpus(config(tmp_path / "a.txt", tokens="bpe", vocabulary=400))
    assert b"xylophones" in corpus.decode(corpus.test.tokens)
    assert len(corpus.tokenizer.encode(b" again")) == 1
    assert len(corpus.tokenizer.encode(b"xylophones")) > 5


def test_token_type_is_the_narrowest(tmp_path: Path) -> None:
    corpus = open_corpus(config(write_documents(tmp_path / "docs")))
    assert isinstance(corpus.train.tokens, np.memmap)
    assert corpus.train.tokens.dtype == np.dtype("<u2")
    with pytest.raises(ValueError, match="read-only"):
        corpus.train.tokens[0] = 1
    wide = corpus.tokenizer.__class__()
    wide.vocabulary = (1 << 16) + 1
    assert token_dtype(wide) == "<u4"


@pytest.mark.parametrize(
    "name", ["train.tokens", "test.spans.npy", "validation.sizes.npy", "tokenizer.json", "corpus.json"]
)
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_damaged_folder_is_prepared_again(tmp_path: Path, name: str, damage: str) -> None:
    source = write_documents(tmp_path / "docs")
    corpus = open_corpus(config(source))
    expected = texts(corpus, corpus.train)
    file = corpus.folder / name
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] if name != "corpus.json" else b"{")
    with pytest.raises(UsageError, match="prepare"):
        Corpus.at(corpus.folder)
    repaired = open_corpus(config(source))
    assert texts(repaired, repaired.train) == expected
    assert texts(Corpus.at(repaired.folder), repaired.train) == expected


def test_folder_of_another_format_raises(tmp_path: Path) -> None:
    corpus = open_corpus(config(write_documents(tmp_path / "docs")))
    (corpus.folder / "corpus.json").write_text(json.dumps(corpus.record | {"format": 99}))
    with pytest.raises(UsageError, match="another format"):
        Corpus.at(corpus.folder)
    with pytest.raises(UsageError, match="not a prepared corpus"):
        Corpus.at(tmp_path)


def test_invalid_utf8_raises_for_bpe_and_not_for_bytes(tmp_path: Path, cache: Path) -> None:
    source = write_documents(tmp_path / "docs")
    (source / "5.txt").write_bytes(b"x" * (1 << 20) + b"\xc3" + b"\xff")
    with pytest.raises(UsageError, match=r"5\.txt is not UTF-8 at byte 1048576: use --tokens bytes") as caught:
        open_corpus(config(source, tokens="bpe"))
    assert "\n" not in str(caught.value)
    assert not (cache / "corpora").exists()
    assert open_corpus(config(source)).vocabulary == 257


@pytest.mark.parametrize("text", [b"x", "漢漢漢漢漢漢漢漢".encode()])
def test_text_too_short_to_split_raises_and_leaves_no_files(tmp_path: Path, cache: Path, text: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(text)
    with pytest.raises(UsageError, match=r"a \(\d+ bytes\) is too short, .* would be empty: use more text"):
        open_corpus(config(tmp_path / "a.txt"))
    assert [path.suffix for path in (cache / "corpora").iterdir()] == [".lock"]


def test_source_that_changes_while_reading_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_documents(tmp_path / "docs")
    cached_scan = prepare.cached_scan

    def change_after(*args: object) -> object:
        result = cached_scan(*args)  # type: ignore[arg-type]
        (source / "7.txt").write_text("other text")
        return result

    monkeypatch.setattr(prepare, "cached_scan", change_after)
    with pytest.raises(UsageError, match="docs changed while it was being prepared"):
        open_corpus(config(source))
    monkeypatch.undo()


def test_full_disk_leaves_no_partial_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    source = write_documents(tmp_path / "docs")

    def disk_full(*args: object) -> object:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "write_splits", disk_full)
        with pytest.raises(DiskError, match="No space left"):
            open_corpus(config(source))
    assert [path.suffix for path in (cache / "corpora").iterdir()] == [".lock"]
    assert len(open_corpus(config(source)).train.documents) > 0


def test_temporary_folder_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    source = write_documents(tmp_path / "docs")
    folder = open_corpus(config(source)).folder
    folder.rename(folder.with_name(f".{folder.name}.{os.getpid()}.tmp"))
    assert open_corpus(config(source)).folder == folder
    assert not list(folder.parent.glob(".*.tmp"))


def test_unwritable_cache_error_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QKFLOW_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UsageError, match=r"cannot be created .*set QKFLOW_CACHE"):
        open_corpus(config(write_documents(tmp_path / "docs")))


def test_cache_folder_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert io.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("QKFLOW_CACHE")
    assert io.cache_folder() == tmp_path / "xdg" / "qkflow"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert io.cache_folder() == tmp_path / ".cache" / "qkflow"


def test_large_text_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gzip.open(tmp_path / "large.txt.gz", "wb", compresslevel=1) as file:
        for _ in range(100):
            file.write(LONG)
    monkeypatch.setattr(prepare, "ENCODE_BYTES", 1 << 18)
    monkeypatch.setattr(reading, "BLOCK_BYTES", 1 << 16)
    tracemalloc.start()
    corpus = open_corpus(config(tmp_path / "large.txt.gz"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert corpus.train.bytes > 10 << 20
    assert peak < 4 << 20


def test_concurrent_preparations_write_the_corpus_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the lock belongs to the open file, so threads exclude each other as processes do
    source = write_documents(tmp_path / "docs", count=300)
    write_splits, calls = prepare.write_splits, []
    monkeypatch.setattr(prepare, "write_splits", lambda *args: calls.append(args) or write_splits(*args))
    barrier = Barrier(2)

    def prepare_corpus(_: int) -> Path:
        barrier.wait()
        return open_corpus(config(source)).folder

    with ThreadPoolExecutor(2) as threads:
        folders = list(threads.map(prepare_corpus, range(2)))
    assert folders[0] == folders[1]
    assert len(calls) == 1


HANGING_PROCESS = """
import sys
from qkflow.data import CorpusConfig, open_corpus
from qkflow.data.text import prepare
write_splits = prepare.write_splits
def write_and_hang(folder, pieces, tokenizer):
    write_splits(folder, pieces, tokenizer)
    print("writing", flush=True)
    sys.stdin.read()
prepare.write_splits = write_and_hang
open_corpus(CorpusConfig(source=sys.argv[1]))
"""


def test_killed_preparation_is_repeated(tmp_path: Path, cache: Path) -> None:
    source = write_documents(tmp_path / "docs")
    command = [sys.executable, "-c", HANGING_PROCESS, str(source)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
    (temporary,) = (path for path in (cache / "corpora").iterdir() if path.suffix == ".tmp")
    assert (temporary / "train.tokens").stat().st_size > 0
    corpus = open_corpus(config(source))
    assert sorted(text for split in splits(corpus).values() for text in texts(corpus, split)) == sorted(
        path.read_bytes() for path in source.iterdir()
    )
    assert sorted(path.suffix for path in (cache / "corpora").iterdir()) == ["", ".lock"]
