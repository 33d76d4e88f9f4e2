"""Decoding inverts encoding for every tokenizer, and no text encodes to the end token."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data.text import tokenizers
from qkflow.data.text.prepare import cut_at_words
from qkflow.data.text.splits import Boundary, TextPiece
from qkflow.data.text.tokenizers import (
    ByteTokenizer,
    Tokenizer,
    WordTokenizer,
    load_gpt2,
    load_tokenizer,
    save_tokenizer,
    train_bpe,
)
from qkflow.errors import UsageError

QUICK = settings(deadline=None, max_examples=25)
SAMPLE = "def key(value):\n    return value <|endoftext|> 'é漢'\n\n# the end of the text\n".encode()
TRAINED = [SAMPLE, SAMPLE, SAMPLE, b"a\n    a\n\n\na" * 20]
BPE = train_bpe(TRAINED, 290)


def gpt2_like(folder: Path) -> Path:
    """Write small vocabulary files in GPT-2's format, with the end token last."""
    BPE.model.model.save(str(folder))
    words = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(words | {"<|endoftext|>": len(words)}))
    return folder


@pytest.fixture(scope="module", params=["bytes", "bpe", "gpt2"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "gpt2":
        return load_gpt2(str(gpt2_like(tmp_path_factory.mktemp("gpt2"))))
    return {"bytes": ByteTokenizer(), "bpe": BPE}[request.param]


@QUICK
@given(text=st.text() | st.sampled_from(["<|endoftext|>", "", " <|endoftext|>\n", "\0", SAMPLE.decode()]))
def test_decode_inverts_encode(tokenizer: Tokenizer, text: str) -> None:
    data = text.encode()
    ids = tokenizer.encode(data)
    assert tokenizer.decode(ids) == data
    assert all(0 <= number < tokenizer.vocabulary and number != tokenizer.end for number in ids)
    assert tokenizer.decode([tokenizer.end, *ids, tokenizer.end]) == data
    (array,) = tokenizer.encode_batch([data])
    assert array.tolist() == ids
    assert tokenizer.decode(array) == data
    assert b"".join(tokenizer.piece(number) for number in [*ids, tokenizer.end]) == data


@QUICK
@given(data=st.binary())
def test_byte_tokenizer_accepts_any_bytes(data: bytes) -> None:
    assert ByteTokenizer().decode(ByteTokenizer().encode(data)) == data


def test_saved_tokenizer_is_json_and_loads_unchanged(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path / "tokenizer.json")
    json.loads((tmp_path / "tokenizer.json").read_text())
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert (loaded.kind, loaded.vocabulary, loaded.end) == (tokenizer.kind, tokenizer.vocabulary, tokenizer.end)
    assert loaded.encode(SAMPLE) == tokenizer.encode(SAMPLE)
    assert loaded.decode(range(loaded.vocabulary)) == tokenizer.decode(range(tokenizer.vocabulary))


def test_invalid_tokenizer_file_raises(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"kind": "bite"}')
    with pytest.raises(UsageError, match="unknown tokenizer 'bite'"):
        load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text('{"kind": "bpe", "end": 3, "model": {}}')
    with pytest.raises(UsageError, match="is not a valid tokenizer"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_end_token_is_the_last_token() -> None:
    assert BPE.vocabulary == 290
    assert BPE.end == 289
    assert (ByteTokenizer().vocabulary, ByteTokenizer().end) == (257, 256)


def test_text_with_few_pairs_gives_a_smaller_vocabulary() -> None:
    assert train_bpe([b"ab"], 1000).vocabulary == 257


def test_bpe_training_is_deterministic() -> None:
    assert train_bpe(TRAINED, 290).to_json() == BPE.to_json()


def test_bpe_shortens_the_text() -> None:
    assert len(BPE.encode(SAMPLE)) < 0.7 * len(SAMPLE)


@pytest.mark.parametrize(("text", "offset"), [(b"ab\xff", 2), (b"\xc3", 0)])
def test_bpe_raises_on_invalid_utf8(text: bytes, offset: int) -> None:
    with pytest.raises(UsageError, match=f"not UTF-8 at byte {offset}: use --tokens bytes"):
        BPE.encode(text)


@pytest.mark.parametrize("token", [-1, 257, 10_000])
def test_token_outside_the_vocabulary_raises(token: int) -> None:
    with pytest.raises(UsageError, match=f"token {token} is not in the vocabulary: expected 0 to 256"):
        ByteTokenizer().decode([1, token])


@QUICK
@given(
    words=st.lists(st.sampled_from(["key", "value:", "'tis", "12,", "x", "<é>"]), min_size=1, max_size=60),
    gaps=st.lists(
        st.sampled_from([" ", "\n", "\n ", "  ", "\n\n", "\n    ", "\n\n\n", "\t", " \n"]), min_size=1, max_size=60
    ),
    size=st.integers(16, 40),
)
def test_pieces_cut_at_words_have_the_tokens_of_the_whole(words: list[str], gaps: list[str], size: int) -> None:
    parts = [part for word, gap in zip(words, gaps, strict=False) for part in (word, gap, "a", " ")]
    text = "".join(parts).encode() + b"."
    blocks = [TextPiece("train", Boundary.NONE, text[i : i + 7]) for i in range(0, len(text), 7)]
    pieces = [piece.text for piece in cut_at_words(blocks, size=size)]
    assert b"".join(pieces) == text
    assert np.concatenate(BPE.encode_batch(pieces)).tolist() == BPE.encode(text)


@QUICK
@given(text=st.text("aé漢𝄞 \n", min_size=1, max_size=200), size=st.integers(4, 40))
def test_text_without_words_is_cut_between_characters(text: str, size: int) -> None:
    pieces = [piece.text for piece in cut_at_words([TextPiece("test", Boundary.PASSAGE, text.encode())], size=size)]
    assert "".join(piece.decode() for piece in pieces) == text
    assert all(1 <= len(piece) <= size for piece in pieces)


def test_cut_at_words_never_joins_spans() -> None:
    pieces = [
        TextPiece("train", Boundary.DOCUMENT, b"a"),
        TextPiece("train", Boundary.DOCUMENT, b"b"),
        TextPiece("test", Boundary.PASSAGE, b"c"),
    ]
    assert list(cut_at_words(pieces)) == pieces


@pytest.mark.parametrize(
    "names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"), ("gpt2_encoder.json", "gpt2_vocab.bpe")]
)
def test_gpt2_files_under_all_usual_names(tmp_path: Path, names: tuple[str, str]) -> None:
    gpt2_like(tmp_path)
    for old, new in zip(("vocab.json", "merges.txt"), names, strict=True):
        (tmp_path / old).rename(tmp_path / new)
    assert load_gpt2(str(tmp_path)).encode(SAMPLE) == BPE.encode(SAMPLE)


def test_missing_or_invalid_gpt2_files_raise(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs --vocabulary-files"):
        load_gpt2(None)
    with pytest.raises(UsageError, match=r"contains none of vocab\.json"):
        load_gpt2(str(tmp_path))
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(UsageError, match=r"contains none of merges\.txt"):
        load_gpt2(str(tmp_path))
    (tmp_path / "merges.txt").write_text("not merges at all")
    with pytest.raises(UsageError, match="GPT-2"):
        load_gpt2(str(tmp_path))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(UsageError, match=r"lacks <\|endoftext\|>"):
        load_gpt2(str(tmp_path))


def test_missing_tokenizers_library_raises_only_for_bpe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match="pip install tokenizers"):
        train_bpe([b"text"], 300)
    assert ByteTokenizer().decode([104]) == b"h"


def test_gpt2_tokens_match_the_original(real: Callable[[str], Path]) -> None:
    tokenizer = load_gpt2(str(real("tokenizers")))
    assert (tokenizer.vocabulary, tokenizer.end) == (50257, 50256)
    assert tokenizer.encode(b"Hello world, it's 2024\n\n  x") == [15496, 995, 11, 340, 338, 48609, 628, 220, 2124]
    assert tokenizers.GPT2_END.encode() == tokenizer.decode(tokenizer.encode(b"<|endoftext|>"))


WORDS = ["the", "road", "k1", "é", "."]


@QUICK
@given(text=st.lists(st.sampled_from(WORDS)), space=st.sampled_from([" ", "  ", "\n"]))
def test_word_tokenizer_round_trip(text: list[str], space: str) -> None:
    tokenizer = WordTokenizer(WORDS)
    assert isinstance(tokenizer, Tokenizer)
    assert (tokenizer.vocabulary, tokenizer.end) == (6, 5)
    ids = tokenizer.encode(space.join(text).encode())
    assert ids == [WORDS.index(word) for word in text]
    assert tokenizer.encode_batch([space.join(text).encode()])[0].tolist() == ids
    assert tokenizer.decode([5, *ids, 5]).decode() == " ".join(text)
    assert b"".join(tokenizer.piece(number) for number in [*ids, 5]).decode().split() == text


def test_word_tokenizer_is_saved_and_loaded(tmp_path: Path) -> None:
    save_tokenizer(WordTokenizer(WORDS), tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.to_json() == WordTokenizer(WORDS).to_json()
    assert loaded.kind == "words"
    assert loaded.encode("é road".encode()) == [3, 1]


def test_unknown_word_raises() -> None:
    with pytest.raises(UsageError, match=r"'raod' is not in the vocabulary: use the 5 words of this task"):
        WordTokenizer(WORDS).encode(b"the raod .")
    with pytest.raises(UsageError, match="token 6 is not in the vocabulary"):
        WordTokenizer(WORDS).decode([6])


@pytest.mark.parametrize("words", [["a", "a"], ["two words"], [""]])
def test_invalid_word_list_raises(words: list[str]) -> None:
    with pytest.raises(UsageError, match="distinct and must not contain spaces"):
        WordTokenizer(words)
