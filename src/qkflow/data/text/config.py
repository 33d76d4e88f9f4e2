"""Configuration of a corpus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from qkflow.errors import UsageError, unknown

Tokens = Literal["bytes", "bpe", "gpt2", "saved"]


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """A source of text and how it is tokenized.

    >>> CorpusConfig(source="notes.txt", tokens="bpe").vocabulary
    4096
    """

    source: str = "python-stdlib"
    """A name (`python-stdlib`, `enwik8`, `text8`, `wikitext-103`, `hf:NAME[/CONFIG]`), a file, a folder, or a recall
    task (`mqar`, `s-niah-1`, `s-niah-2`, `s-niah-3`) with options, as in `mqar:pairs=4+8,length=64`."""
    tokens: Tokens = "bytes"
    """Tokenizer: bytes, byte-level BPE trained on the train split, GPT-2's BPE from local files, or a saved model's."""
    vocabulary: int = 4096
    """Vocabulary size of a trained BPE, including the 256 bytes and the end-of-document token (`bpe` only)."""
    vocabulary_files: str | None = None
    """Folder with GPT-2's vocab.json (or encoder.json) and merges.txt (or vocab.bpe) for `gpt2`; run folder or exported
    model for `saved`."""
    field: str = "text"
    """Field of a .jsonl line or dataset row that holds the text; `a.b` selects a nested field."""
    passage: int = 2048
    """Bytes per held-out passage, for a text that is not divided into documents."""
    data_dir: str | None = None
    """Folder to search first for named corpora (then the folder in the environment variable QKFLOW_DATA)."""

    binary: bool = False
    """Whether bytes that are not text, such as UTF-16, images or programs, are accepted."""

    def __post_init__(self) -> None:
        if self.tokens not in get_args(Tokens):
            raise unknown("kind of tokens", self.tokens, get_args(Tokens))
        if self.vocabulary < 257:
            raise UsageError(f"vocabulary must be at least 257 (256 bytes and the end token), got {self.vocabulary}")
        if self.passage < 1:
            raise UsageError(f"passage must be at least 1 byte, got {self.passage}")
