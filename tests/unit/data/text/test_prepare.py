"""Prepared once, found by content, whole or absent, whatever interrupts it."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qkflow import io
from qkflow.data import Corpus, CorpusConfig, Split, open_corpus
from qkflow.data.text import prepare
from qkflow.data.text.writing import token_type
from qkflow.errors import DiskError, UsageError

LONG = "".join(f"Line {n} of a long text, with é and 漢.\n" for n in range(3000)).encode()


def folder_of(path: Path, count: int = 80) -> Path:
    """A folder of documents, enough of them for a split by hash."""
    path.mkdir()
    for number in range(count):
        (path / f"{number}.txt").write_text(f"Document {number}\n" * (number + 1))
    return path


def config(source: Path, **options: object) -> CorpusConfig:
    return CorpusConfig(source=str(source), **options)  # type: ignore[arg-type]


def texts(corpus: Corpus, split: Split) -> list[bytes]:
    return [corpus.decode(split.tokens[begin:end]) for begin, end in split.documents]


def parts(corpus: Corpus) -> dict[str, Split]:
    return {"train": corpus.train, "validation": corpus.validation, "test": corpus.test}


@pytest.mark.parametrize("options", [{}, {"tokens": "bpe", "vocabulary": 300}])
def test_documents_stand_between_end_tokens_and_give_their_text_back(
    tmp_path: Path, options: dict[str, object]
) -> None:
    source = folder_of(tmp_path / "docs")
    corpus = open_corpus(config(source, **options))
    found = []
    for split in parts(corpus).values():
        assert len(split.documents) > 0
        assert split.tokens[0] == split.tokens[-1] == corpus.end
        begins, ends = split.documents.T
        assert begins.tolist() == [1, *(ends[:-1] + 1)]
        assert (split.tokens[ends] == corpus.end).all()
        assert (split.tokens == corpus.end).sum() == len(begins) + 1
        assert split.sizes.tolist() == [len(text) for text in texts(corpus, split)]
        assert split.tokens.max() < corpus.vocabulary
        found += texts(corpus, split)
    assert sorted(found) == sorted(path.read_bytes() for path in source.iterdir())
    assert corpus.record["split"]["rule"] == "hash"
    assert corpus.name == "docs"


@pytest.mark.parametrize("options", [{}, {"tokens": "bpe", "vocabulary": 400}])
def test_one_long_text_is_tiled_by_passages(tmp_path: Path, options: dict[str, object]) -> None:
    (tmp_path / "long.txt").write_bytes(LONG)
    corpus = open_corpus(config(tmp_path / "long.txt", passage=500, **options))
    assert b"".join(text for split in parts(corpus).values() for text in texts(corpus, split)) == LONG
    assert [len(split.documents) for split in parts(corpus).values()] == [1, 13, 13]
    for split in parts(corpus).values():
        begins, ends = split.documents.T
        assert begins.tolist() == [1, *ends[:-1]]
        assert all(text.decode() for text in texts(corpus, split))
        assert split.sizes.tolist() == [len(text) for text in texts(corpus, split)]
    assert corpus.train.tokens[0] == corpus.end
    assert corpus.validation.tokens[0] == corpus.train.tokens[-1]
    assert corpus.test.tokens[0] == corpus.validation.tokens[-1]
    assert (corpus.validation.tokens != corpus.end).all()
    assert corpus.test.tokens[-1] == corpus.end


def test_a_few_documents_are_cut_contiguously_and_keep_their_ends(tmp_path: Path) -> None:
    source = tmp_path / "few"
    source.mkdir()
    for name, size in {"a": 850, "b": 80, "c": 20, "d": 50}.items():
        (source / f"{name}.txt").write_text(name * size)
    corpus = open_corpus(config(source, passage=30))
    assert texts(corpus, corpus.train) == [b"a" * 850, b"b" * 50]
    assert texts(corpus, corpus.validation) == [b"b" * 30, b"c" * 20]
    assert texts(corpus, corpus.test) == [b"d" * 30, b"d" * 20]
    assert corpus.validation.tokens[0] == ord("b")
    assert corpus.test.tokens[0] == corpus.end


def test_equal_lines_never_straddle_parts(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"line {number % 200}"}) for number in range(600)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    corpus = open_corpus(config(tmp_path / "a.jsonl"))
    seen = [set(texts(corpus, split)) for split in parts(corpus).values()]
    assert sum(map(len, seen)) == len(set.union(*seen)) == 200
    assert sum(len(split.documents) for split in parts(corpus).values()) == 600


def test_where_and_how_the_text_lies_does_not_matter(tmp_path: Path) -> None:
    first = open_corpus(config(folder_of(tmp_path / "here")))
    shutil.copytree(tmp_path / "here", tmp_path / "there" / "deeper")
    for path in (tmp_path / "there" / "deeper").iterdir():
        (path.parent / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    second = open_corpus(config(tmp_path / "there" / "deeper"))
    assert (first.folder, first.digest) == (second.folder, second.digest)
    assert (first.name, second.name) == ("here", "deeper")


def test_content_names_and_options_that_matter_do(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "docs")
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


def test_bpe_learns_from_the_train_part_alone(tmp_path: Path) -> None:
    text = b"common words again and again. " * 300
    (tmp_path / "a.txt").write_bytes(text + b"xylophones " * 80)
    corpus = open_corpus(config(tmp_path / "a.txt", tokens="bpe", vocabulary=400))
    assert b"xylophones" in corpus.decode(corpus.test.tokens)
    assert len(corpus.encode(b" again")) == 1
    assert len(corpus.encode(b"xylophones")) > 5


def test_tokens_are_as_narrow_as_the_vocabulary_allows(tmp_path: Path) -> None:
    corpus = open_corpus(config(folder_of(tmp_path / "docs")))
    assert isinstance(corpus.train.tokens, np.memmap)
    assert corpus.train.tokens.dtype == np.dtype("<u2")
    with pytest.raises(ValueError, match="read-only"):
        corpus.train.tokens[0] = 1
    wide = corpus.tokenizer.__class__()
    wide.vocabulary = (1 << 16) + 1
    assert token_type(wide) == "<u4"


@pytest.mark.parametrize(
    "name", ["train.tokens", "test.spans.npy", "validation.sizes.npy", "tokenizer.json", "corpus.json"]
)
@pytest.mark.parametrize("harm", ["gone", "short"])
def test_a_damaged_folder_is_noticed_and_prepared_again(tmp_path: Path, name: str, harm: str) -> None:
    source = folder_of(tmp_path / "docs")
    corpus = open_corpus(config(source))
    want = texts(corpus, corpus.train)
    file = corpus.folder / name
    if harm == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] if name != "corpus.json" else b"{")
    with pytest.raises(UsageError, match="prepare"):
        Corpus.at(corpus.folder)
    again = open_corpus(config(source))
    assert texts(again, again.train) == want
    assert texts(Corpus.at(again.folder), again.train) == want


def test_a_folder_of_another_format_is_refused(tmp_path: Path) -> None:
    corpus = open_corpus(config(folder_of(tmp_path / "docs")))
    (corpus.folder / "corpus.json").write_text(json.dumps(corpus.record | {"format": 99}))
    with pytest.raises(UsageError, match="another format"):
        Corpus.at(corpus.folder)
    with pytest.raises(UsageError, match="not a prepared corpus"):
        Corpus.at(tmp_path)


def test_bytes_that_are_not_utf8_are_named_under_bpe_and_welcome_as_bytes(tmp_path: Path, cache: Path) -> None:
    source = folder_of(tmp_path / "docs")
    (source / "5.txt").write_bytes(b"x" * (1 << 20) + b"\xc3" + b"\xff")
    with pytest.raises(UsageError, match=r"5\.txt is not UTF-8 at byte 1048576: use --tokens bytes") as caught:
        open_corpus(config(source, tokens="bpe"))
    assert "\n" not in str(caught.value)
    assert not (cache / "corpora").exists()
    assert open_corpus(config(source)).vocabulary == 257


@pytest.mark.parametrize("text", [b"x", "漢漢漢漢漢漢漢漢".encode()])
def test_a_text_too_short_to_be_split_is_refused_and_leaves_nothing(tmp_path: Path, cache: Path, text: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(text)
    with pytest.raises(UsageError, match=r"a \(\d+ bytes\) is too short, .* would be empty: give more text"):
        open_corpus(config(tmp_path / "a.txt"))
    assert [path.suffix for path in (cache / "corpora").iterdir()] == [".lock"]


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder_of(tmp_path / "docs")
    survey = prepare.remembered

    def change_after(*args: object) -> object:
        result = survey(*args)  # type: ignore[arg-type]
        (source / "7.txt").write_text("other text")
        return result

    monkeypatch.setattr(prepare, "remembered", change_after)
    with pytest.raises(UsageError, match="docs changed while it was being prepared"):
        open_corpus(config(source))
    monkeypatch.undo()


def test_a_full_disk_leaves_nothing_that_is_taken_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    source = folder_of(tmp_path / "docs")

    def full(*args: object) -> object:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "write_parts", full)
        with pytest.raises(DiskError, match="No space left"):
            open_corpus(config(source))
    assert [path.suffix for path in (cache / "corpora").iterdir()] == [".lock"]
    assert len(open_corpus(config(source)).train.documents) > 0


def test_what_a_killed_process_of_our_own_id_left_is_no_obstacle(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "docs")
    folder = open_corpus(config(source)).folder
    folder.rename(folder.with_name(f".{folder.name}.{os.getpid()}.tmp"))
    assert open_corpus(config(source)).folder == folder
    assert not list(folder.parent.glob(".*.tmp"))


def test_a_cache_that_cannot_be_written_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QKFLOW_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UsageError, match=r"cannot be made .*set QKFLOW_CACHE"):
        open_corpus(config(folder_of(tmp_path / "docs")))


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert io.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("QKFLOW_CACHE")
    assert io.cache_folder() == tmp_path / "xdg" / "qkflow"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert io.cache_folder() == tmp_path / ".cache" / "qkflow"


def test_a_large_text_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "large.txt.gz", "wb", compresslevel=1) as file:
        for _ in range(400):
            file.write(LONG)
    tracemalloc.start()
    corpus = open_corpus(config(tmp_path / "large.txt.gz"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert corpus.train.bytes > 40 << 20
    assert peak < 24 << 20


SCRIPT = """
import os, sys
from pathlib import Path
from qkflow.data import CorpusConfig, open_corpus, prepare
source, mode, log = sys.argv[1:]
write = prepare.write_parts
def watched(folder, pieces, tokenizer):
    with open(log, "a") as file:
        file.write("filled\\n")
    counts = write(folder, pieces, tokenizer)
    if mode == "hang":
        print("writing", flush=True)
        sys.stdin.read()
    return counts
prepare.write_parts = watched
if mode == "race":
    print("ready", flush=True)
    sys.stdin.readline()
corpus = open_corpus(CorpusConfig(source=source))
print(corpus.folder, corpus.train.documents[-1, 1], flush=True)
"""


@pytest.fixture
def process(tmp_path: Path, cache: Path) -> Callable[[Path, str], subprocess.Popen[str]]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def start(source: Path, mode: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(script), str(source), mode, str(tmp_path / "log")]
        environment = os.environ | {"QKFLOW_CACHE": str(cache)}
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    return start


def test_two_processes_prepare_a_corpus_once(
    tmp_path: Path, process: Callable[[Path, str], subprocess.Popen[str]]
) -> None:
    source = folder_of(tmp_path / "docs", count=300)
    both = [process(source, "race") for _ in range(2)]
    for child in both:
        assert child.stdout
        assert child.stdout.readline() == "ready\n"
    for child in both:
        assert child.stdin
        child.stdin.write("go\n")
        child.stdin.flush()
    said = [child.communicate()[0] for child in both]
    assert [child.returncode for child in both] == [0, 0]
    assert said[0] == said[1] != ""
    assert (tmp_path / "log").read_text() == "filled\n"


def test_a_preparation_killed_in_the_middle_is_done_again(
    tmp_path: Path, cache: Path, process: Callable[[Path, str], subprocess.Popen[str]]
) -> None:
    source = folder_of(tmp_path / "docs")
    child = process(source, "hang")
    assert child.stdout
    assert child.stdout.readline() == "writing\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    (left,) = (path for path in (cache / "corpora").iterdir() if path.suffix == ".tmp")
    assert (left / "train.tokens").stat().st_size > 0
    corpus = open_corpus(config(source))
    assert sorted(text for split in parts(corpus).values() for text in texts(corpus, split)) == sorted(
        path.read_bytes() for path in source.iterdir()
    )
    assert sorted(path.suffix for path in (cache / "corpora").iterdir()) == ["", ".lock"]
