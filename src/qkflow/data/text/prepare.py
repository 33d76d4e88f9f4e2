"""Prepare a corpus: tokenize a source once, in a stream, into a cache folder named after its content.

Preparing is safe against crashes and concurrent processes: a folder is written under a lock and a temporary name, and
renamed when it is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from qkflow import io
from qkflow.data.recall import is_recall_task, parse_recall_spec
from qkflow.data.recall import prepare as recall
from qkflow.data.text.config import CorpusConfig
from qkflow.data.text.corpus import FORMAT, Corpus, DamagedCorpusError, token_dtype, write_record
from qkflow.data.text.resolve import find_source
from qkflow.data.text.sources import Source
from qkflow.data.text.splits import (
    SPLITS,
    Boundary,
    ScanResult,
    SplitPlan,
    TextPiece,
    cached_scan,
    divide,
    plan_split,
    refuse_binary,
    with_digest,
)
from qkflow.data.text.tokenizers import (
    ByteTokenizer,
    Tokenizer,
    WordTokenizer,
    gpt2_digest,
    load_gpt2,
    saved_tokenizer,
    train_bpe,
)
from qkflow.errors import UsageError

ENCODE_BYTES = 4 << 20  # bytes of text encoded at a time
WORD_END = re.compile(rb"[!-~](?:\n|(?= ))(?= ?[!-~])")


def open_corpus(config: CorpusConfig, *, tokenizer: Tokenizer | None = None) -> Corpus:
    """Return the corpus described by `config`; prepare it unless it is in the cache.

    The cache is the folder in QKFLOW_CACHE, else `qkflow` in XDG_CACHE_HOME or ~/.cache. Entries depend on the content
    of the source and on the relevant options, not on the location of the source. A damaged entry is prepared again.

    Args:
        config: The source and its tokenization.
        tokenizer: Overrides `config.tokens`, for example to evaluate a trained model on another text. A recall task
            accepts only its own tokenizer.

    >>> corpus = open_corpus(CorpusConfig(source="python-stdlib"))  # doctest: +SKIP
    >>> corpus.vocabulary  # doctest: +SKIP
    257
    """
    if tokenizer is None and config.tokens == "saved":
        tokenizer = saved_tokenizer(config.vocabulary_files)
    if is_recall_task(config.source):
        return _open_task(config, tokenizer)
    source = find_source(config)
    vocabulary_digest = None
    if tokenizer is not None:
        if tokenizer.kind == WordTokenizer.kind:
            raise UsageError(
                f"{config.source} is text, which the word list of a recall task cannot encode: use a recall task"
            )
        config = replace(config, tokens=cast(Any, tokenizer.kind))
        vocabulary_digest = hashlib.sha256(json.dumps(tokenizer.to_json(), sort_keys=True).encode()).hexdigest()
    elif config.tokens == "gpt2":
        vocabulary_digest = gpt2_digest(config.vocabulary_files)
    scanned = cached_scan(source, config, io.cache_folder())
    if config.tokens != "bytes" and scanned.not_utf8:
        name, offset = scanned.not_utf8
        raise UsageError(f"{name} is not UTF-8 at byte {offset}: use --tokens bytes, or convert it to UTF-8")
    notices: tuple[str, ...] = ()
    if not config.binary:
        refuse_binary(source, scanned)
        if scanned.not_utf8:
            name, offset = scanned.not_utf8
            notices = (f"{name} is not UTF-8 at byte {offset}: the model learns its bytes (--binary omits this note)",)
    plan = plan_split(source, scanned, config)
    folder = _cached(
        _cache_key(scanned, plan, config, vocabulary_digest),
        lambda temporary: _write_corpus(temporary, source, scanned, plan, config, tokenizer),
    )
    return replace(Corpus.at(folder), name=source.name, notices=notices)


def _open_task(config: CorpusConfig, tokenizer: Tokenizer | None) -> Corpus:
    """Return a recall task, which is generated instead of read."""
    task = parse_recall_spec(config.source)
    own = WordTokenizer(task.words)
    if tokenizer is None and config.tokens != CorpusConfig.tokens:
        raise UsageError(f"{task.name} has its own word tokenizer, got --tokens {config.tokens}: omit --tokens")
    if tokenizer is not None and tokenizer.to_json() != own.to_json():
        alternative = "a task with the words it was trained on" if tokenizer.kind == own.kind else "text"
        raise UsageError(
            f"the model's vocabulary ({tokenizer.vocabulary} tokens of kind {tokenizer.kind!r}) differs from the "
            f"{own.vocabulary} tokens of {config.source}: evaluate the model on {alternative}"
        )
    return Corpus.at(_cached(recall.cache_key(task), lambda temporary: recall.write_task(temporary, task)))


def _cache_key(scanned: ScanResult, plan: SplitPlan, config: CorpusConfig, vocabulary_digest: str | None) -> str:
    """Return a hash of everything that the prepared files depend on."""
    key: dict[str, Any] = {"format": FORMAT, "digest": scanned.digest, "tokens": config.tokens}
    if config.tokens == "bpe":
        key["vocabulary"] = config.vocabulary
    if vocabulary_digest and config.tokens != "bytes":
        key["files"] = vocabulary_digest
    if plan.passage_splits:
        key["passage"] = config.passage
    if plan.rule == "hash":
        key["test_percent"] = plan.test_percent
    if plan.rule == "contiguous":
        key["aligned"] = plan.align_cuts
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def _cached(key: str, write: Callable[[Path], None]) -> Path:
    """Return the cache folder `key`; write it under a lock unless it exists and is complete."""
    folder = io.cache_folder() / "corpora" / key
    if _is_complete(folder):
        return folder
    hint = "set QKFLOW_CACHE to a writable folder"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the cache folder {folder.parent} cannot be created ({error.strerror}): {hint}") from error
    if not os.access(folder.parent, os.W_OK):
        raise UsageError(f"the cache folder {folder.parent} is read-only: {hint}")
    with io.locked(folder.with_name(f".{folder.name}.lock"), wait=True):
        if not _is_complete(folder):  # another process may have written it while this one waited
            io.discard(folder)
            _remove_temporary(folder)
            try:
                io.write_folder(folder, write)
            finally:
                _remove_temporary(folder)
    return folder


def _is_complete(folder: Path) -> bool:
    with contextlib.suppress(DamagedCorpusError):
        Corpus.at(folder)
        return True
    return False


def _remove_temporary(folder: Path) -> None:
    """Delete what interrupted processes left behind; requires the lock."""
    for path in folder.parent.glob(f".{folder.name}.*.tmp"):
        io.discard(path)


def _write_corpus(
    folder: Path,
    source: Source,
    scanned: ScanResult,
    plan: SplitPlan,
    config: CorpusConfig,
    tokenizer: Tokenizer | None,
) -> None:
    if tokenizer is None:
        if config.tokens == "bytes":
            tokenizer = ByteTokenizer()
        elif config.tokens == "gpt2":
            tokenizer = load_gpt2(config.vocabulary_files)
        else:
            pieces = cut_at_words(divide(source.documents(), plan))
            tokenizer = train_bpe((piece.text for piece in pieces if piece.split == "train"), config.vocabulary)
    digest = hashlib.sha256()
    pieces = divide(with_digest(source.documents(), digest.update), plan)
    counts = write_splits(folder, pieces if config.tokens == "bytes" else cut_at_words(pieces), tokenizer)
    if digest.hexdigest() != scanned.digest:
        raise UsageError(f"{source.name} changed while it was being prepared: run again when it no longer changes")
    if empty := [split for split, count in counts.items() if not count["documents"]]:
        raise UsageError(
            f"{source.name} ({scanned.bytes} bytes) is too short, {' and '.join(empty)} would be empty: use more text"
        )
    details = {
        "bytes": scanned.bytes,
        "split": {
            "rule": plan.rule,
            "test_percent": plan.test_percent if plan.rule == "hash" else None,
            "cuts": list(plan.cuts) if plan.rule == "contiguous" else None,
            "passage": config.passage if plan.passage_splits else None,
        },
        "tokenizers": importlib.metadata.version("tokenizers") if config.tokens != "bytes" else None,
    }
    write_record(folder, name=source.name, digest=scanned.digest, tokenizer=tokenizer, counts=counts, details=details)


def cut_at_words(pieces: Iterable[TextPiece], size: int = 1 << 20) -> Iterator[TextPiece]:
    r"""Cut the text into pieces of at most `size` (>= 4) bytes whose BPE tokens are those of the whole text.

    BPE merges a space with the word after it, and keeps a single newline between visible ASCII characters separate. So
    cuts are placed before such a space or after such a newline. A text without either is cut between two UTF-8
    characters, where tokens may differ.

    >>> pieces = [TextPiece("train", Boundary.DOCUMENT, b"one\ntw"), TextPiece("train", Boundary.NONE, b"o three")]
    >>> [piece.text for piece in cut_at_words(pieces, size=7)]
    [b'one\ntwo', b' three']
    """
    split, boundary, pending = "", Boundary.DOCUMENT, b""
    for piece in pieces:
        if piece.boundary is not Boundary.NONE:
            if pending:
                yield TextPiece(split, boundary, pending)
            split, boundary, pending = piece.split, piece.boundary, b""
        pending += piece.text
        while len(pending) > size:
            cut = _last_word_end(pending, size)
            yield TextPiece(split, boundary, pending[:cut])
            boundary, pending = Boundary.NONE, pending[cut:]
    if pending:
        yield TextPiece(split, boundary, pending)


def _last_word_end(text: bytes, size: int) -> int:
    """Return the last index up to `size` at which the text can be cut."""
    for begin in (max(0, size - 4096), 0):  # nearly always close to the end
        ends = [match.end() for match in WORD_END.finditer(text, begin, size + 2) if match.end() <= size]
        if ends:
            return ends[-1]
    index = size
    while text[index] & 0xC0 == 0x80:
        index -= 1
    return index


def write_splits(folder: Path, pieces: Iterable[TextPiece], tokenizer: Tokenizer) -> dict[str, dict[str, int]]:
    """Encode the pieces into the files of a prepared corpus; return the documents, bytes and tokens of each split."""
    with ExitStack() as stack:
        writers = {split: stack.enter_context(_SplitWriter(folder, split, token_dtype(tokenizer))) for split in SPLITS}
        current: _SplitWriter | None = None
        last_token = tokenizer.end
        for batch in _batches(pieces):
            for piece, ids in zip(batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True):
                writer = writers[piece.split]
                if piece.boundary is not Boundary.NONE:
                    is_document = piece.boundary is Boundary.DOCUMENT
                    if current:
                        current.end_span(tokenizer.end if is_document else None)
                    writer.begin_span(tokenizer.end if is_document else last_token)
                    current = writer
                writer.write(ids, len(piece.text))
                last_token = int(ids[-1])
        if current:
            current.end_span(tokenizer.end)
    return {split: writer.counts for split, writer in writers.items()}


def _batches(pieces: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    batch: list[TextPiece] = []
    n_bytes = 0
    for piece in pieces:
        batch.append(piece)
        n_bytes += len(piece.text) + 64  # overhead of a piece in memory
        if n_bytes >= ENCODE_BYTES:
            yield batch
            batch, n_bytes = [], 0
    if batch:
        yield batch


class _SplitWriter:
    """Writes the tokens of one split as they arrive, and its spans and sizes at the end."""

    def __init__(self, folder: Path, split: str, dtype: str) -> None:
        self.folder, self.split, self.dtype = folder, split, dtype
        self.counts = {"documents": 0, "bytes": 0, "tokens": 0}
        self._tokens = open(folder / f"{split}.tokens", "wb")  # noqa: SIM115 - closed by __exit__
        self._spans, self._sizes = array("q"), array("q")
        self._begin = self._span_bytes = 0

    def __enter__(self) -> _SplitWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._tokens.close()
        np.save(self.folder / f"{self.split}.spans.npy", np.array(self._spans, dtype="<i8").reshape(-1, 2))
        np.save(self.folder / f"{self.split}.sizes.npy", np.array(self._sizes, dtype="<i8"))

    def begin_span(self, context: int) -> None:
        """Start a span; the first span of the split is preceded by the token `context`."""
        if not self.counts["tokens"]:
            self.write(np.array([context]))
        self._begin, self._span_bytes = self.counts["tokens"], 0

    def write(self, ids: np.ndarray, n_bytes: int = 0) -> None:
        """Append tokens, which encode `n_bytes` bytes of the span."""
        self._tokens.write(ids.astype(self.dtype).tobytes())
        self.counts["tokens"] += len(ids)
        self._span_bytes += n_bytes

    def end_span(self, end: int | None) -> None:
        """End the span, and its document if an end token is given."""
        self._spans.extend((self._begin, self.counts["tokens"]))
        self._sizes.append(self._span_bytes)
        self.counts["documents"] += 1
        self.counts["bytes"] += self._span_bytes
        if end is not None:
            self.write(np.array([end]))
