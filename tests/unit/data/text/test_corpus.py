"""The built-in corpus, and real corpora if they are available."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np

from qkflow.data import Corpus, CorpusConfig, get_batch, open_corpus, windows
from qkflow.data.text.splits import hash_split


def test_standard_library_is_prepared_completely(stdlib: Corpus) -> None:
    root = Path(sysconfig.get_path("stdlib"))
    assert stdlib.name == "python-stdlib"
    assert len(stdlib.digest) == 64
    assert (stdlib.vocabulary, stdlib.tokenizer.end) == (257, 256)
    label = "json/decoder.py"
    split = {"train": stdlib.train, "validation": stdlib.validation, "test": stdlib.test}[hash_split(label.encode())]
    stream = stdlib.decode(split.tokens)
    assert (root / label).read_bytes() in stream
    assert len(stream) == split.bytes
    total = stdlib.train.bytes + stdlib.validation.bytes + stdlib.test.bytes
    assert stdlib.record["bytes"] == total > 5 << 20
    assert stdlib.train.bytes > 0.65 * total
    assert len(stdlib.test.documents) >= 100


def test_prepared_folder_opens_without_its_source(stdlib: Corpus) -> None:
    reopened = Corpus.at(stdlib.folder)
    assert (reopened.name, reopened.digest, reopened.vocabulary) == (stdlib.name, stdlib.digest, stdlib.vocabulary)
    assert (reopened.validation.tokens == stdlib.validation.tokens).all()


def test_batches_and_windows_contain_the_text(stdlib: Corpus) -> None:
    rows = get_batch(stdlib.train, seed=0, step=10_000, batch_size=4, context=256).tokens
    stream = stdlib.train.tokens.astype(np.uint16).tobytes()
    assert all(row.astype(np.uint16).tobytes() in stream for row in rows)
    test_windows = windows(stdlib.test, context=256)
    assert sum(window.length - window.skip for window in test_windows) == stdlib.test.bytes


def test_encode_and_decode(stdlib: Corpus) -> None:
    tokenizer = stdlib.tokenizer
    assert tokenizer.encode("é".encode()) == [195, 169]
    assert tokenizer.encode(b"\xff") == [255]
    assert stdlib.decode([*tokenizer.encode(b"def f():"), tokenizer.end]) == b"def f():"


def test_enwik8_has_the_usual_splits(real: Callable[[str], Path]) -> None:
    corpus = open_corpus(CorpusConfig(source="enwik8", data_dir=str(real("enwik8"))))
    assert [split.bytes for split in (corpus.train, corpus.validation, corpus.test)] == [
        90_000_000,
        5_000_000,
        5_000_000,
    ]
    assert corpus.decode(corpus.train.tokens[1:11]) == b"<mediawiki"


def test_each_medline_title_is_a_document(real: Callable[[str], Path]) -> None:
    corpus = open_corpus(CorpusConfig(source=str(real("medline")), field="title"))
    assert sum(len(split.documents) for split in (corpus.train, corpus.validation, corpus.test)) > 30_000
