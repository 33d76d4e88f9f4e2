"""A corpus in the tokens of a model that exists, wherever its folder lies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from qkflow.data import CorpusConfig, Tokenizer, WordTokenizer, open_corpus, save_tokenizer
from qkflow.data.text.tokenizer_io import find_tokenizer, saved_tokenizer
from qkflow.data.text.tokenizers import ByteTokenizer, train_bpe
from qkflow.errors import UsageError

TEXT = "".join(f"Line {n} of a long text, with é and 漢.\n" for n in range(600))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QKFLOW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def kept(folder: Path, tokenizer: Tokenizer, name: str = "tokenizer.json") -> str:
    folder.mkdir()
    save_tokenizer(tokenizer, folder / name)
    return str(folder)


def test_a_text_is_read_in_the_tokens_of_a_run_found_by_their_content(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    own = train_bpe([TEXT.encode()], 300)
    run = kept(tmp_path / "run", own)
    corpus = open_corpus(CorpusConfig(source=str(tmp_path / "text.txt"), tokens="saved", vocabulary_files=run))
    assert (corpus.vocabulary, corpus.end) == (own.vocabulary, own.end)
    assert corpus.tokenizer.to_json() == own.to_json()
    begin, end = corpus.train.documents[0]
    assert own.decode(corpus.train.tokens[begin:end]) == corpus.decode(corpus.train.tokens[begin:end])
    moved = shutil.move(run, tmp_path / "moved")
    again = open_corpus(CorpusConfig(source=str(tmp_path / "text.txt"), tokens="saved", vocabulary_files=str(moved)))
    assert again.folder == corpus.folder
    other = kept(tmp_path / "other", train_bpe([b"quite another text, quite another"], 280))
    apart = open_corpus(CorpusConfig(source=str(tmp_path / "text.txt"), tokens="saved", vocabulary_files=other))
    assert apart.folder != corpus.folder


def test_saved_bytes_are_the_same_corpus_as_bytes(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    folder = kept(tmp_path / "run", ByteTokenizer(), "qkflow_tokenizer.json")
    plain = open_corpus(CorpusConfig(source=str(tmp_path / "text.txt")))
    saved = open_corpus(CorpusConfig(source=str(tmp_path / "text.txt"), tokens="saved", vocabulary_files=folder))
    assert saved.folder == plain.folder


def test_the_words_of_a_task_read_no_text(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    folder = kept(tmp_path / "run", WordTokenizer(["a", "b"]))
    with pytest.raises(UsageError, match="name a task"):
        open_corpus(CorpusConfig(source=str(tmp_path / "text.txt"), tokens="saved", vocabulary_files=folder))


def test_ours_comes_before_that_of_the_library(tmp_path: Path) -> None:
    folder = kept(tmp_path / "both", ByteTokenizer(), "qkflow_tokenizer.json")
    (Path(folder) / "tokenizer.json").write_text("{")
    assert isinstance(saved_tokenizer(folder), ByteTokenizer)


def test_a_folder_without_a_tokenizer_of_ours_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--vocabulary-files"):
        saved_tokenizer(None)
    with pytest.raises(UsageError, match="no tokenizer of ours"):
        saved_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("not json")
    with pytest.raises(UsageError, match="damaged"):
        saved_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFC"}},
        {"added_tokens": []},
        {"model": {"type": "Unigram", "vocab": []}},
        {"pre_tokenizer": {"type": "Whitespace"}},
    ],
    ids=str,
)
def test_a_tokenizer_that_never_was_ours_is_none(tmp_path: Path, change: dict[str, object]) -> None:
    ours = json.loads(train_bpe([TEXT.encode()], 300).model.to_str())
    end = {"id": 299, "content": "<|endoftext|>", "special": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**ours, "added_tokens": [end], **change}))
    assert find_tokenizer(tmp_path) is None
