"""Tokenizers of runs and exported models, and corpora that use them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from qkflow.data import CorpusConfig, Tokenizer, WordTokenizer, open_corpus, save_tokenizer
from qkflow.data.text.tokenizers import ByteTokenizer, find_tokenizer, saved_tokenizer, train_bpe
from qkflow.errors import UsageError

TEXT = "".join(f"Line {n} of a long text, with é and 漢.\n" for n in range(600))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QKFLOW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def save(folder: Path, tokenizer: Tokenizer, name: str = "tokenizer.json") -> str:
    folder.mkdir()
    save_tokenizer(tokenizer, folder / name)
    return str(folder)


def test_saved_corpus_is_cached_by_tokenizer_content(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    tokenizer = train_bpe([TEXT.encode()], 300)
    run = save(tmp_path / "run", tokenizer)
    corpus = open_corpus(CorpusConfig(source=str(tmp_path / "text.txt"), tokens="saved", vocabulary_files=run))
    assert (corpus.vocabulary, corpus.tokenizer.end) == (tokenizer.vocabulary, tokenizer.end)
    assert corpus.tokenizer.to_json() == tokenizer.to_json()
    begin, end = corpus.train.documents[0]
    assert tokenizer.decode(corpus.train.tokens[begin:end]) == corpus.decode(corpus.train.tokens[begin:end])
    moved = shutil.move(run, tmp_path / "moved")
    again = open_corpus(CorpusConfig(source=str(tmp_path / "text.txt"), tokens="saved", vocabulary_files=str(moved)))
    assert again.folder == corpus.folder
    other = save(tmp_path / "other", train_bpe([b"quite another text, quite another"], 280))
    other_corpus = open_corpus(CorpusConfig(source=str(tmp_path / "text.txt"), tokens="saved", vocabulary_files=other))
    assert other_corpus.folder != corpus.folder


def test_saved_byte_tokenizer_gives_the_byte_corpus(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    folder = save(tmp_path / "run", ByteTokenizer(), "qkflow_tokenizer.json")
    plain = open_corpus(CorpusConfig(source=str(tmp_path / "text.txt")))
    saved = open_corpus(CorpusConfig(source=str(tmp_path / "text.txt"), tokens="saved", vocabulary_files=folder))
    assert saved.folder == plain.folder


def test_word_tokenizer_on_text_raises(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    folder = save(tmp_path / "run", WordTokenizer(["a", "b"]))
    with pytest.raises(UsageError, match="use a recall task"):
        open_corpus(CorpusConfig(source=str(tmp_path / "text.txt"), tokens="saved", vocabulary_files=folder))


def test_exported_tokenizer_takes_precedence(tmp_path: Path) -> None:
    folder = save(tmp_path / "both", ByteTokenizer(), "qkflow_tokenizer.json")
    (Path(folder) / "tokenizer.json").write_text("{")
    assert isinstance(saved_tokenizer(folder), ByteTokenizer)


def test_folder_without_a_tokenizer_raises(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--vocabulary-files"):
        saved_tokenizer(None)
    with pytest.raises(UsageError, match="no qkflow tokenizer"):
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
def test_foreign_tokenizer_is_not_found(tmp_path: Path, change: dict[str, object]) -> None:
    exported = json.loads(train_bpe([TEXT.encode()], 300).model.to_str())
    end = {"id": 299, "content": "<|endoftext|>", "special": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**exported, "added_tokens": [end], **change}))
    assert find_tokenizer(tmp_path) is None
