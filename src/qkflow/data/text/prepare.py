"""From a source to a prepared corpus: once, streamed, cached by content, safe against crashes and other processes."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from qkflow import io
from qkflow.data.recall import from_spec, is_task
from qkflow.data.recall import prepare as recall
from qkflow.data.text.config import CorpusConfig
from qkflow.data.text.corpus import FORMAT, RECORD, Corpus, DamagedError
from qkflow.data.text.resolve import find_source
from qkflow.data.text.scan import Survey, plan, remembered, watched
from qkflow.data.text.sources import Source
from qkflow.data.text.splits import Plan, divide
from qkflow.data.text.tokenizer_io import saved_tokenizer
from qkflow.data.text.tokenizers import (
    ByteTokenizer,
    Tokenizer,
    WordTokenizer,
    gpt2_digest,
    load_gpt2,
    save_tokenizer,
    train_bpe,
)
from qkflow.data.text.writing import token_type, whole_words, write_parts
from qkflow.errors import UsageError


def open_corpus(config: CorpusConfig, *, tokenizer: Tokenizer | None = None) -> Corpus:
    """The corpus that `config` describes, prepared now unless it was before.

    The cache is the folder in QKFLOW_CACHE, else qkflow in XDG_CACHE_HOME or ~/.cache. A corpus is found again by its
    content and by what of the config matters, wherever the source lies; a damaged one is prepared again. A `tokenizer`
    that is given makes the tokens, whatever the config says of them: so a model reads another text with its own. A
    recall task has words of its own, and no other tokenizer reads it.

    >>> corpus = open_corpus(CorpusConfig(source="python-stdlib"))  # doctest: +SKIP
    >>> corpus.vocabulary  # doctest: +SKIP
    257
    """
    if tokenizer is None and config.tokens == "saved":
        tokenizer = saved_tokenizer(config.vocabulary_files)
    if is_task(config.source):
        return _open_task(config, tokenizer)
    source = find_source(config)
    vocabulary = None
    if tokenizer is not None:
        if tokenizer.kind == WordTokenizer.kind:
            raise UsageError(f"{config.source} is text, which the words of a recall task cannot spell: name a task")
        config = replace(config, tokens=cast(Any, tokenizer.kind))
        vocabulary = hashlib.sha256(json.dumps(tokenizer.to_json(), sort_keys=True).encode()).hexdigest()
    elif config.tokens == "gpt2":
        vocabulary = gpt2_digest(config.vocabulary_files)
    seen = remembered(source, config, io.cache_folder())
    if config.tokens != "bytes" and seen.not_utf8:
        name, offset = seen.not_utf8
        raise UsageError(f"{name} is not UTF-8 at byte {offset}: use --tokens bytes, or convert it to UTF-8")
    split = plan(source, seen, config)
    folder = io.cache_folder() / "corpora" / _key(seen, split, config, vocabulary)
    with contextlib.suppress(DamagedError):
        return replace(Corpus.at(folder), name=source.name)
    _prepare(folder, lambda temporary: _fill(temporary, source, seen, split, config, tokenizer))
    return replace(Corpus.at(folder), name=source.name)


def _open_task(config: CorpusConfig, tokenizer: Tokenizer | None) -> Corpus:
    """A recall task, which is made and not read."""
    task = from_spec(config.source)
    own = WordTokenizer(task.words)
    if tokenizer is None and config.tokens != CorpusConfig.tokens:
        raise UsageError(f"{task.name} has words of its own for tokens, got --tokens {config.tokens}: leave it out")
    if tokenizer is not None and tokenizer.to_json() != own.to_json():
        got = f"{tokenizer.vocabulary} tokens of kind {tokenizer.kind!r}"
        want = f"another vocabulary than the {own.vocabulary} tokens of {config.source}"
        other = "a task with the words it was trained on" if tokenizer.kind == own.kind else "text"
        raise UsageError(f"the model has {want} ({got}): evaluate it on {other}")
    folder = io.cache_folder() / "corpora" / recall.key(task)
    with contextlib.suppress(DamagedError):
        return Corpus.at(folder)
    _prepare(folder, lambda temporary: recall.fill(temporary, task))
    return Corpus.at(folder)


def _key(seen: Survey, split: Plan, config: CorpusConfig, vocabulary: str | None) -> str:
    """A hash of everything that decides the prepared files, and of nothing else."""
    what: dict[str, Any] = {"format": FORMAT, "digest": seen.digest, "tokens": config.tokens}
    if config.tokens == "bpe":
        what["vocabulary"] = config.vocabulary
    if vocabulary and config.tokens != "bytes":
        what["files"] = vocabulary
    if split.in_passages:
        what["passage"] = config.passage
    if split.rule == "contiguous":
        what["aligned"] = split.aligned
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]


def _prepare(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill `folder` under a lock, unless another process did while we waited for it."""
    _check_writable(folder.parent)
    with io.locked(folder.with_name(f".{folder.name}.lock"), wait=True):
        with contextlib.suppress(DamagedError):
            Corpus.at(folder)
            return
        io.discard(folder)
        _sweep(folder)
        try:
            io.write_folder(folder, fill)
        finally:
            _sweep(folder)


def _check_writable(folder: Path) -> None:
    hint = "set QKFLOW_CACHE to a folder that can be written"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the cache {folder} cannot be made ({error.strerror}): {hint}") from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"the cache {folder} is read-only: {hint}")


def _sweep(folder: Path) -> None:
    """Remove what interrupted preparations left; whoever holds the lock may."""
    for left in folder.parent.glob(f".{folder.name}.*.tmp"):
        io.discard(left)


def _fill(
    folder: Path, source: Source, seen: Survey, split: Plan, config: CorpusConfig, given: Tokenizer | None
) -> None:
    tokenizer = _tokenizer(source, split, config) if given is None else given
    digest = hashlib.sha256()
    pieces = divide(watched(source.documents(), digest.update), split)
    counts = write_parts(folder, pieces if config.tokens == "bytes" else whole_words(pieces), tokenizer)
    if digest.hexdigest() != seen.digest:
        raise UsageError(f"{source.name} changed while it was being prepared: run again when it is written")
    if empty := [part for part, count in counts.items() if not count["documents"]]:
        missing = " and ".join(empty)
        raise UsageError(f"{source.name} ({seen.bytes} bytes) is too short, {missing} would be empty: give more text")
    save_tokenizer(tokenizer, folder / "tokenizer.json")
    record = {
        "format": FORMAT,
        "name": source.name,
        "digest": seen.digest,
        "bytes": seen.bytes,
        "tokens": config.tokens,
        "vocabulary": tokenizer.vocabulary,
        "end": tokenizer.end,
        "dtype": token_type(tokenizer),
        "split": {
            "rule": split.rule,
            "cuts": list(split.cuts) if split.rule == "contiguous" else None,
            "passage": config.passage if split.in_passages else None,
        },
        "parts": counts,
        "tokenizers": importlib.metadata.version("tokenizers") if config.tokens != "bytes" else None,
        "files": {file.name: file.stat().st_size for file in sorted(folder.iterdir())},
    }
    io.write_json(folder / RECORD, record)


def _tokenizer(source: Source, split: Plan, config: CorpusConfig) -> Tokenizer:
    if config.tokens == "bytes":
        return ByteTokenizer()
    if config.tokens == "gpt2":
        return load_gpt2(config.vocabulary_files)
    pieces = whole_words(divide(source.documents(), split))
    return train_bpe((piece.text for piece in pieces if piece.part == "train"), config.vocabulary)
