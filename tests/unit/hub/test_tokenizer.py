"""Tokenizers in transformers: the same ids for every text, and the text back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from qkflow.data import ByteTokenizer, Tokenizer, WordTokenizer
from qkflow.data.text.tokenizers import find_tokenizer, train_bpe
from qkflow.hub.tokenizer import END, to_tokenizers, write_tokenizer

WORDS = WordTokenizer(["one", "two", "three", "."])
TEXT = "The naïve fox jumps over 42 lazy dogs; 漢字 and 🦊! "
TOKENIZERS: dict[str, Tokenizer] = {"bytes": ByteTokenizer(), "bpe": train_bpe([TEXT.encode()] * 4, 300)}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreTrainedTokenizerBase]:
    """Each tokenizer, written and then loaded by transformers."""
    loaded = {}
    for kind, tokenizer in {**TOKENIZERS, "words": WORDS}.items():
        folder = tmp_path_factory.mktemp(kind)
        write_tokenizer(tokenizer, folder)
        loaded[kind] = AutoTokenizer.from_pretrained(folder)
    return loaded


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_ids_are_the_same_for_any_text_and_decode_to_it(
    converted: dict[str, PreTrainedTokenizerBase], kind: str
) -> None:
    tokenizer = TOKENIZERS[kind]

    @settings(deadline=None, max_examples=15)
    @given(st.text() | st.text("aeio .\n<|>endoftx", max_size=40) | st.just(TEXT + END + "x"))
    def check(text: str) -> None:
        ids = converted[kind](text).input_ids
        assert ids == tokenizer.encode(text.encode())
        assert converted[kind].decode(ids) == text
        assert converted[kind].decode([*ids, tokenizer.end], skip_special_tokens=True) == text

    check()


def test_words_are_split_at_the_same_whitespace(converted: dict[str, PreTrainedTokenizerBase]) -> None:
    for text in ("two one .", " two\n\tone  . ", "", "three"):
        assert converted["words"](text).input_ids == WORDS.encode(text.encode())
    assert converted["words"].decode([1, 0, 3]) == "two one ."
    with pytest.raises(Exception, match="UNK"):
        converted["words"]("four")


def test_the_end_token_is_bos_eos_and_left_padding(converted: dict[str, PreTrainedTokenizerBase]) -> None:
    for kind, tokenizer in {**TOKENIZERS, "words": WORDS}.items():
        loaded = converted[kind]
        assert loaded.eos_token_id == loaded.pad_token_id == loaded.bos_token_id == tokenizer.end
        assert len(loaded) == tokenizer.vocabulary
    batch = converted["bytes"](["hi", "there"], padding=True)
    assert batch.input_ids[0] == [256, 256, 256, 104, 105]
    assert batch.attention_mask[0] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("kind", ["bytes", "bpe", "words"])
def test_a_tokenizer_saved_by_transformers_is_read_back(
    converted: dict[str, PreTrainedTokenizerBase], tmp_path: Path, kind: str
) -> None:
    converted[kind].save_pretrained(tmp_path)
    again = find_tokenizer(tmp_path)
    assert again is not None
    assert type(again) is type({**TOKENIZERS, "words": WORDS}[kind])
    assert again.to_json() == {**TOKENIZERS, "words": WORDS}[kind].to_json()


def test_a_word_with_the_name_of_the_end_token_keeps_it() -> None:
    tokenizer = WordTokenizer([END, "x"])
    assert to_tokenizers(tokenizer).encode("x").ids == [1]
    assert to_tokenizers(tokenizer).token_to_id(END) == 0
    assert to_tokenizers(tokenizer).token_to_id(f"<{END}>") == tokenizer.end
