"""Tokenizers: bytes, byte-level BPE trained on the corpus, GPT-2's BPE from local files, and word lists.

Decoding the tokens of a text returns its exact bytes (word lists: with single spaces between words). The
end-of-document token decodes to nothing, and no text encodes to it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from qkflow import io
from qkflow.errors import UsageError, unknown

TOKENIZER_FILE = "tokenizer.json"
EXPORTED_TOKENIZER_FILE = "qkflow_tokenizer.json"
GPT2_VOCABULARY = ("vocab.json", "encoder.json", "gpt2_encoder.json")
GPT2_MERGES = ("merges.txt", "vocab.bpe", "gpt2_vocab.bpe")
GPT2_END = "<|endoftext|>"

Ids = Iterable[int] | np.ndarray


class Tokenizer(ABC):
    """Base class of all tokenizers."""

    kind: str
    """`bytes`, `bpe`, `gpt2` or `words`."""
    vocabulary: int
    """Number of tokens, including the end-of-document token."""
    end: int
    """The end-of-document token."""

    @abstractmethod
    def encode(self, text: bytes) -> list[int]:
        """Return the tokens of a text, without an end token."""

    def encode_batch(self, texts: list[bytes]) -> list[np.ndarray]:
        """Return `encode` of each text as an array."""
        return [np.array(self.encode(text), dtype=np.uint32) for text in texts]

    @abstractmethod
    def decode(self, ids: Ids) -> bytes:
        """Return the bytes of the tokens; end tokens are skipped."""

    def piece(self, token: int) -> bytes:
        """Return the bytes that one token adds to a text, for streaming."""
        return self.decode([token])

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return the state that `load_tokenizer` needs, as JSON data."""


class ByteTokenizer(Tokenizer):
    """One token per byte; 256 is the end token.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("é".encode()), tokenizer.decode([104, 105, 256])
    ([195, 169], b'hi')
    """

    kind: str = "bytes"
    vocabulary: int = 257
    end: int = 256

    def encode(self, text: bytes) -> list[int]:
        """Return the bytes as numbers."""
        return list(text)

    def encode_batch(self, texts: list[bytes]) -> list[np.ndarray]:
        """Return views of the bytes."""
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]

    def decode(self, ids: Ids) -> bytes:
        """Return the numbers as bytes."""
        tokens = _checked_ids(ids, self.vocabulary)
        return bytes(tokens[tokens != self.end].astype(np.uint8))

    def to_json(self) -> dict[str, Any]:
        """Return the kind, which is all there is."""
        return {"kind": self.kind}


class WordTokenizer(Tokenizer):
    """One token per word of a fixed list; the token after the last word is the end token.

    >>> tokenizer = WordTokenizer(["one", "two", "."])
    >>> tokenizer.encode(b"two one ."), tokenizer.decode([1, 0, 2, 3])
    ([1, 0, 2], b'two one .')
    """

    kind: str = "words"

    def __init__(self, words: Iterable[str]) -> None:
        self.words = tuple(words)
        self.end = len(self.words)
        self.vocabulary = self.end + 1
        self._ids = {word.encode(): number for number, word in enumerate(self.words)}
        if len(self._ids) < self.end or any(word.split() != [word] for word in self.words):
            raise UsageError("the words of a word tokenizer must be distinct and must not contain spaces")

    def encode(self, text: bytes) -> list[int]:
        """Return the tokens of the words between spaces; an unknown word raises a `UsageError`."""
        words = text.split()
        for word in words:
            if word not in self._ids:
                raise UsageError(
                    f"{word.decode(errors='replace')!r} is not in the vocabulary: use the {self.end} words of this "
                    f"task, such as {self.words[0]!r} or {self.words[-1]!r}"
                )
        return [self._ids[word] for word in words]

    def decode(self, ids: Ids) -> bytes:
        """Return the words, separated by single spaces."""
        tokens = _checked_ids(ids, self.vocabulary)
        return " ".join([self.words[token] for token in tokens[tokens != self.end].tolist()]).encode()

    def piece(self, token: int) -> bytes:
        """Return the word of a token after a space."""
        return b" " + self.decode([token]) if token != self.end else b""

    def to_json(self) -> dict[str, Any]:
        """Return the words in order."""
        return {"kind": self.kind, "words": list(self.words)}


class BPETokenizer(Tokenizer):
    """Byte-level BPE with the `tokenizers` library. The end token is not in its model, so no text can encode to it."""

    def __init__(self, kind: str, model: Any, end: int) -> None:
        self.kind = kind
        self.model = model
        self.end = end
        words = {token: word for word, token in model.get_vocab().items() if token != end}
        self.vocabulary = max(end, *words) + 1
        byte_of = {letter: bytes([byte]) for byte, letter in bytes_to_unicode().items()}
        self._bytes = [b"".join(byte_of[letter] for letter in words.get(n, "")) for n in range(self.vocabulary)]

    def encode(self, text: bytes) -> list[int]:
        """Return the tokens of a UTF-8 text; any other text raises a `UsageError`."""
        return self.model.encode(_decode_utf8(text), add_special_tokens=False).ids

    def encode_batch(self, texts: list[bytes]) -> list[np.ndarray]:
        """Return `encode` of each text, using all cores."""
        encodings = self.model.encode_batch_fast([_decode_utf8(text) for text in texts], add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Ids) -> bytes:
        """Return the bytes of the tokens, which may end within a character."""
        return b"".join([self._bytes[token] for token in _checked_ids(ids, self.vocabulary).tolist()])

    def to_json(self) -> dict[str, Any]:
        """Return merges and vocabulary in the format of the `tokenizers` library."""
        return {"kind": self.kind, "end": self.end, "model": json.loads(self.model.to_str())}


def train_bpe(texts: Iterable[bytes], vocabulary: int) -> BPETokenizer:
    """Train byte-level BPE with at most `vocabulary` tokens; fewer if the text has too few repeated pairs."""
    library = _tokenizers_library()
    model = _byte_level(library, library.models.BPE())
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary - 1,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(bytes_to_unicode().values()),
    )
    model.train_from_iterator((_decode_utf8(text) for text in texts), trainer=trainer)
    return BPETokenizer("bpe", model, end=model.get_vocab_size())


def load_gpt2(folder: str | None) -> BPETokenizer:
    """Load GPT-2's tokenizer from its two local files; the end token is `<|endoftext|>` (50256)."""
    vocabulary, merges = gpt2_files(folder)
    library = _tokenizers_library()
    try:
        model = _byte_level(library, library.models.BPE.from_file(str(vocabulary), str(merges)))
    except Exception as error:  # the library raises plain Exception
        raise UsageError(
            f"{vocabulary} and {merges} are not GPT-2's vocabulary ({error}): download them again"
        ) from error
    words = model.get_vocab()
    if GPT2_END not in words or not set(bytes_to_unicode().values()) <= words.keys():
        raise UsageError(f"{vocabulary} lacks {GPT2_END} or one of the 256 bytes: use GPT-2's own vocabulary files")
    return BPETokenizer("gpt2", model, end=words[GPT2_END])


def gpt2_files(folder: str | None) -> tuple[Path, Path]:
    """Return the vocabulary file and the merges file in `folder`, under any of their usual names."""
    if folder is None:
        raise UsageError("tokens gpt2 needs --vocabulary-files: the folder with GPT-2's vocab.json and merges.txt")
    paths = []
    for names in (GPT2_VOCABULARY, GPT2_MERGES):
        candidates = [path for name in names if (path := Path(folder).expanduser() / name).is_file()]
        if not candidates:
            raise UsageError(f"{folder} contains none of {', '.join(names)}: use the folder with GPT-2's two files")
        paths.append(candidates[0])
    return paths[0], paths[1]


def gpt2_digest(folder: str | None) -> str:
    """Return a hash of the content of the two files."""
    checksums = [io.checksum(path) for path in gpt2_files(folder)]
    return hashlib.sha256("".join(checksums).encode()).hexdigest()


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write a tokenizer as one JSON file."""
    io.write_file(path, json.dumps(tokenizer.to_json(), ensure_ascii=False) + "\n")


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a file written by `save_tokenizer`."""
    data = json.loads(path.read_text())
    if data["kind"] == ByteTokenizer.kind:
        return ByteTokenizer()
    if data["kind"] == WordTokenizer.kind:
        return WordTokenizer(data["words"])
    if data["kind"] not in ("bpe", "gpt2"):
        raise unknown("tokenizer", str(data["kind"]), ["bytes", "bpe", "gpt2", "words"])
    return _load_bpe(data["kind"], data["model"], data["end"], path)


def saved_tokenizer(folder: str | None) -> Tokenizer:
    """Return the tokenizer of a run folder or an exported model; raise a `UsageError` if there is none."""
    if folder is None:
        raise UsageError("tokens saved needs --vocabulary-files: a run folder or a folder written by `qkflow export`")
    path = Path(folder).expanduser()
    tokenizer = find_tokenizer(path)
    if tokenizer is None:
        raise UsageError(
            f"{path} contains no qkflow tokenizer: use a run folder or a folder written by `qkflow export`"
        )
    return tokenizer


def find_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer in a folder, or None if there is none that qkflow can read.

    | file                    | in                               | format                          |
    |-------------------------|----------------------------------|---------------------------------|
    | `qkflow_tokenizer.json` | an exported model                | qkflow's                        |
    | `tokenizer.json`        | a run                            | qkflow's, which has a `kind`    |
    | `tokenizer.json`        | a model saved by transformers    | that of the tokenizers library  |
    """
    names = (EXPORTED_TOKENIZER_FILE, TOKENIZER_FILE)
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        return None
    try:
        data = json.loads(path.read_bytes())
        return load_tokenizer(path) if "kind" in data else _from_library_json(data, path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{path} is damaged ({type(error).__name__}): restore it from a copy, or export the model again"
        ) from error


def _from_library_json(data: dict[str, Any], path: Path) -> Tokenizer | None:
    """Convert an exported tokenizer back: the library stores the model plus one added token for the end."""
    special = [token for token in data["added_tokens"] if token["special"]]
    model, pre_tokenizer = data["model"], data["pre_tokenizer"] or {}
    if len(data["added_tokens"]) != 1 or not special or data["normalizer"] is not None:
        return None
    end = special[0]["id"]
    if model["type"] == "WordLevel" and pre_tokenizer.get("type") == "Split":
        words = sorted(model["vocab"], key=model["vocab"].__getitem__)
        return WordTokenizer(words) if end == len(words) else None
    if model["type"] != "BPE" or pre_tokenizer.get("type") != "ByteLevel" or pre_tokenizer.get("add_prefix_space"):
        return None
    if not model["merges"]:
        tokenizer = ByteTokenizer()
        return tokenizer if (len(model["vocab"]), end) == (tokenizer.end, tokenizer.end) else None
    kind = "gpt2" if GPT2_END in model["vocab"] else "bpe"
    return _load_bpe(kind, {**data, "added_tokens": [], "post_processor": None}, end, path)


def _load_bpe(kind: str, data: dict[str, Any], end: int, path: Path) -> BPETokenizer:
    """Build a BPE tokenizer from the library's JSON data, read from `path`."""
    library = _tokenizers_library()
    try:
        model = library.Tokenizer.from_str(json.dumps(data))
        ids = model.get_vocab().values()
        if not (isinstance(end, int) and 0 <= end <= len(ids) and 0 <= max(ids) <= len(ids)):
            raise UsageError(f"its {len(ids)} tokens are not numbered consecutively, or the end token {end} is wrong")
        return BPETokenizer(kind, model, end=end)
    except Exception as error:  # the library raises plain Exception
        raise UsageError(
            f"{path} is not a valid tokenizer ({error}): delete its folder and prepare the corpus again"
        ) from error


def _byte_level(library: Any, model: Any) -> Any:
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer


def _tokenizers_library() -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ImportError:
        raise UsageError("BPE needs the tokenizers library: pip install tokenizers, or use --tokens bytes") from None


def bytes_to_unicode() -> dict[int, str]:
    """Return GPT-2's printable character for each byte: itself if it prints in Latin-1, else one from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}


def _decode_utf8(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the text is not UTF-8 at byte {error.start}: use --tokens bytes, or convert it to UTF-8"
        ) from None


def _checked_ids(ids: Ids, vocabulary: int) -> np.ndarray:
    tokens = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64)
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < vocabulary):
        invalid = tokens[(tokens < 0) | (tokens >= vocabulary)][0]
        raise UsageError(f"token {invalid} is not in the vocabulary: expected 0 to {vocabulary - 1}")
    return tokens
