"""Text to numbers and back: bytes, byte-level BPE trained on the corpus, GPT-2's BPE from local files, a task's words.

Each gives back exactly the bytes it was given (words: with single spaces between them). The end-of-document token
stands for no bytes, and no text becomes it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from qkflow import io
from qkflow.errors import UsageError, unknown

GPT2_VOCABULARY = ("vocab.json", "encoder.json", "gpt2_encoder.json")
GPT2_MERGES = ("merges.txt", "vocab.bpe", "gpt2_vocab.bpe")
GPT2_END = "<|endoftext|>"

Ids = Iterable[int] | np.ndarray


@runtime_checkable
class Tokenizer(Protocol):
    """What every tokenizer can do."""

    kind: str
    """`bytes`, `bpe`, `gpt2` or `words`."""
    vocabulary: int
    """How many tokens there are, the end-of-document token included."""
    end: int
    """The end-of-document token."""

    def encode(self, text: bytes) -> list[int]:
        """The tokens of a text, without an end token."""
        ...

    def encode_batch(self, texts: list[bytes]) -> list[np.ndarray]:
        """`encode` of each text, as arrays, faster than one by one."""
        ...

    def decode(self, ids: Ids) -> bytes:
        """The bytes of some tokens; end tokens give none."""
        ...

    def piece(self, token: int) -> bytes:
        """What one token adds to a text that goes on: pieces of tokens joined are their text."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Everything that `load_tokenizer` needs, as plain data."""
        ...


class ByteTokenizer:
    """A token for each byte, and 256 for the end.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("é".encode()), tokenizer.decode([104, 105, 256])
    ([195, 169], b'hi')
    """

    kind: str = "bytes"
    vocabulary: int = 257
    end: int = 256

    def encode(self, text: bytes) -> list[int]:
        """The bytes as numbers."""
        return list(text)

    def encode_batch(self, texts: list[bytes]) -> list[np.ndarray]:
        """Views of the bytes."""
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]

    def decode(self, ids: Ids) -> bytes:
        """The numbers as bytes."""
        wanted = _checked(ids, self.vocabulary)
        return bytes(wanted[wanted != self.end].astype(np.uint8))

    def piece(self, token: int) -> bytes:
        """Its byte."""
        return self.decode([token])

    def to_json(self) -> dict[str, Any]:
        """Its kind says everything."""
        return {"kind": self.kind}


class WordTokenizer:
    """A token for each word of a closed list, and one more for the end.

    >>> tokenizer = WordTokenizer(["one", "two", "."])
    >>> tokenizer.encode(b"two one ."), tokenizer.decode([1, 0, 2, 3])
    ([1, 0, 2], b'two one .')
    """

    kind: str = "words"

    def __init__(self, words: Iterable[str]) -> None:
        self.words = tuple(words)
        self.end = len(self.words)
        self.vocabulary = self.end + 1
        self._numbers = {word.encode(): number for number, word in enumerate(self.words)}
        if len(self._numbers) < self.end or any(word.split() != [word] for word in self.words):
            raise UsageError("a vocabulary of words needs words that differ, without spaces in them")

    def encode(self, text: bytes) -> list[int]:
        """The numbers of the words between spaces; another word than those of the list is a `UsageError`."""
        words = text.split()
        for word in words:
            if word not in self._numbers:
                known = f"the {self.end} words of this task, such as {self.words[0]!r} or {self.words[-1]!r}"
                raise UsageError(f"{word.decode(errors='replace')!r} is not in the vocabulary: give {known}")
        return [self._numbers[word] for word in words]

    def encode_batch(self, texts: list[bytes]) -> list[np.ndarray]:
        """`encode` of each."""
        return [np.array(self.encode(text), dtype=np.uint32) for text in texts]

    def decode(self, ids: Ids) -> bytes:
        """The words with single spaces between them."""
        wanted = _checked(ids, self.vocabulary)
        return " ".join([self.words[number] for number in wanted[wanted != self.end].tolist()]).encode()

    def piece(self, token: int) -> bytes:
        """Its word, after a space."""
        return b" " + self.decode([token]) if token != self.end else b""

    def to_json(self) -> dict[str, Any]:
        """Its words in order."""
        return {"kind": self.kind, "words": list(self.words)}


class BPETokenizer:
    """Byte-level BPE through the `tokenizers` library, which is not told of the end token: no text can spell it."""

    def __init__(self, kind: str, model: Any, end: int) -> None:
        self.kind = kind
        self.model = model
        self.end = end
        words = {number: word for word, number in model.get_vocab().items() if number != end}
        self.vocabulary = max(end, *words) + 1
        known = {letter: bytes([byte]) for byte, letter in bytes_to_unicode().items()}
        self._bytes = [b"".join(known[x] for x in words.get(number, "")) for number in range(self.vocabulary)]

    def encode(self, text: bytes) -> list[int]:
        """The tokens of a UTF-8 text; other bytes are a `UsageError`."""
        return self.model.encode(_decoded(text), add_special_tokens=False).ids

    def encode_batch(self, texts: list[bytes]) -> list[np.ndarray]:
        """`encode` of each, on all cores."""
        encodings = self.model.encode_batch_fast([_decoded(text) for text in texts], add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Ids) -> bytes:
        """The bytes of the tokens, which may end inside a character."""
        return b"".join([self._bytes[number] for number in _checked(ids, self.vocabulary).tolist()])

    def piece(self, token: int) -> bytes:
        """Its bytes, with the space before a word that BPE keeps there."""
        return self.decode([token])

    def to_json(self) -> dict[str, Any]:
        """The merges and vocabulary in the format of the `tokenizers` library."""
        return {"kind": self.kind, "end": self.end, "model": json.loads(self.model.to_str())}


def train_bpe(texts: Iterable[bytes], vocabulary: int) -> BPETokenizer:
    """Byte-level BPE with at most `vocabulary` tokens in all, fewer when the text has too few pairs that repeat."""
    library = _library()
    model = _pipeline(library, library.models.BPE())
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary - 1,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(bytes_to_unicode().values()),
    )
    model.train_from_iterator((_decoded(text) for text in texts), trainer=trainer)
    return BPETokenizer("bpe", model, end=model.get_vocab_size())


def load_gpt2(folder: str | None) -> BPETokenizer:
    """GPT-2's tokens from its two local files; the end token is its own `<|endoftext|>` (50256 of 50257)."""
    vocabulary, merges = gpt2_files(folder)
    library = _library()
    try:
        model = _pipeline(library, library.models.BPE.from_file(str(vocabulary), str(merges)))
    except Exception as error:  # the library raises bare Exceptions
        raise UsageError(f"{vocabulary} and {merges} are not GPT-2's vocabulary ({error}): fetch them again") from error
    words = model.get_vocab()
    if GPT2_END not in words or not set(bytes_to_unicode().values()) <= words.keys():
        raise UsageError(f"{vocabulary} lacks {GPT2_END} or one of the 256 bytes: give GPT-2's own vocabulary files")
    return BPETokenizer("gpt2", model, end=words[GPT2_END])


def gpt2_files(folder: str | None) -> tuple[Path, Path]:
    """The vocabulary and the merges in `folder`, under any of their usual names."""
    if folder is None:
        raise UsageError("tokens gpt2 needs --vocabulary-files: the folder with vocab.json and merges.txt of GPT-2")
    found = []
    for names in (GPT2_VOCABULARY, GPT2_MERGES):
        paths = [path for name in names if (path := Path(folder).expanduser() / name).is_file()]
        if not paths:
            raise UsageError(f"{folder} has none of {', '.join(names)}: give the folder with GPT-2's two files")
        found.append(paths[0])
    return found[0], found[1]


def gpt2_digest(folder: str | None) -> str:
    """A hash of the two files' content."""
    sums = [io.checksum(path) for path in gpt2_files(folder)]
    return hashlib.sha256("".join(sums).encode()).hexdigest()


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write a tokenizer as one JSON file."""
    io.write_file(path, json.dumps(tokenizer.to_json(), ensure_ascii=False) + "\n")


def load_tokenizer(path: Path) -> Tokenizer:
    """Read what `save_tokenizer` wrote."""
    data = json.loads(path.read_text())
    if data["kind"] == ByteTokenizer.kind:
        return ByteTokenizer()
    if data["kind"] == WordTokenizer.kind:
        return WordTokenizer(data["words"])
    if data["kind"] not in ("bpe", "gpt2"):
        raise unknown("tokenizer", str(data["kind"]), ["bytes", "bpe", "gpt2", "words"])
    return pair_tokenizer(data["kind"], data["model"], data["end"], path)


def pair_tokenizer(kind: str, model: dict[str, Any], end: int, path: Path) -> BPETokenizer:
    """Byte-level BPE from the plain data that the `tokenizers` library reads, found at `path`."""
    library = _library()
    try:
        read = library.Tokenizer.from_str(json.dumps(model))
        numbers = read.get_vocab().values()
        if not (isinstance(end, int) and 0 <= end <= len(numbers) and 0 <= max(numbers) <= len(numbers)):
            raise UsageError(f"its {len(numbers)} tokens are not numbered one after the other, the end is {end}")
        return BPETokenizer(kind, read, end=end)
    except Exception as error:  # the library raises bare Exceptions
        raise UsageError(f"{path} is not a tokenizer ({error}): remove its folder and prepare it again") from error


def _pipeline(library: Any, model: Any) -> Any:
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer


def _library() -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ImportError:
        raise UsageError("BPE needs the tokenizers library: pip install tokenizers, or use --tokens bytes") from None


def bytes_to_unicode() -> dict[int, str]:
    """GPT-2's visible letter for each byte: the byte itself where it prints in Latin-1, else one from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}


def _decoded(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"the text is not UTF-8 at byte {error.start}: use --tokens bytes, or convert it") from None


def _checked(ids: Ids, vocabulary: int) -> np.ndarray:
    wanted = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64)
    if wanted.size and not (wanted.min() >= 0 and wanted.max() < vocabulary):
        wrong = wanted[(wanted < 0) | (wanted >= vocabulary)][0]
        raise UsageError(f"token {wrong} is not in the vocabulary of {vocabulary}: give tokens of this corpus")
    return wanted
