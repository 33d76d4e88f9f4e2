"""What a corpus is made from: the part of a run's record that decides every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from qkflow.errors import UsageError, unknown

Tokens = Literal["bytes", "bpe", "gpt2", "saved"]


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """A source of text and how it becomes tokens.

    >>> CorpusConfig(source="notes.txt", tokens="bpe").vocabulary
    4096
    """

    source: str = "python-stdlib"
    """A name (`python-stdlib`, `enwik8`, `text8`, `wikitext-103`, `hf:NAME[/CONFIG]`), a file, a folder, or a recall
    task (`mqar`, `s-niah-1`, `s-niah-2`, `s-niah-3`) with its options, as in `mqar:pairs=4+8,length=64`."""
    tokens: Tokens = "bytes"
    """Bytes, byte-level BPE trained on the train part, GPT-2's BPE from local files, or those of a saved model."""
    vocabulary: int = 4096
    """Size of the trained BPE vocabulary, the 256 bytes and the end-of-document token included (`bpe` only)."""
    vocabulary_files: str | None = None
    """Folder with GPT-2's vocab.json (or encoder.json) and merges.txt (or vocab.bpe) (`gpt2`), or with the model whose
    tokens are used: a run, or what `qkflow export` wrote (`saved`)."""
    field: str = "text"
    """The field of a .jsonl line, or of a dataset's row, that holds the text; `a.b` reaches into `{"a": {"b": ..}}`."""
    passage: int = 2048
    """Bytes of a held-out passage, where a text has no documents of its own."""
    data_dir: str | None = None
    """Where named corpora are looked for first (then the folder in the environment variable QKFLOW_DATA)."""

    def __post_init__(self) -> None:
        if self.tokens not in get_args(Tokens):
            raise unknown("kind of tokens", self.tokens, get_args(Tokens))
        if self.vocabulary < 257:
            raise UsageError(f"vocabulary is {self.vocabulary}: give at least 257 (256 bytes and the end token)")
        if self.passage < 1:
            raise UsageError(f"passage is {self.passage} bytes: give at least 1")
