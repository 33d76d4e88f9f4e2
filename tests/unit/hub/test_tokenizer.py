"""Our tokenizers in transformers give the same numbers for every text, and the text back."""

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
KINDS: dict[str, Tokenizer] = {"bytes": ByteTokenizer(), "bpe": train_bpe([TEXT.encode()] * 4, 300)}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreTrainedTokenizerBase]:
    """Each tokenizer written and loaded by transformers."""
    found = {}
    for kind, tokenizer in {**KINDS, "words": WORDS}.items():
        place = tmp_path_factory.mktemp(kind)
        write_tokenizer(tokenizer, place)
        found[kind] = AutoTokenizer.from_pretrained(place)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_any_text_has_the_same_tokens_and_comes_back(theirs: dict[str, PreTrainedTokenizerBase], kind: str) -> None:
    ours = KINDS[kind]

    @settings(deadline=None, max_examples=25)
    @given(st.text() | st.text("aeio .\n<|>endoftx", max_size=40) | st.just(TEXT + END + "x"))
    def check(text: str) -> None:
        ids = theirs[kind](text).input_ids
        assert ids == ours.encode(text.encode())
        assert theirs[kind].decode(ids) == text
        assert theirs[kind].decode([*ids, ours.end], skip_special_tokens=True) == text

    check()


def test_words_are_told_apart_by_the_same_spaces(theirs: dict[str, PreTrainedTokenizerBase]) -> None:
    for text in ("two one .", " two\n\tone  . ", "", "three"):
        assert theirs["words"](text).input_ids == WORDS.encode(text.encode())
    assert theirs["words"].decode([1, 0, 3]) == "two one ."
    with pytest.raises(Exception, match="UNK"):
        theirs["words"]("four")


def test_the_end_token_begins_ends_and_pads_on_the_left(theirs: dict[str, PreTrainedTokenizerBase]) -> None:
    for kind, ours in {**KINDS, "words": WORDS}.items():
        found = theirs[kind]
        assert found.eos_token_id == found.pad_token_id == found.bos_token_id == ours.end
        assert len(found) == ours.vocabulary
    batch = theirs["bytes"](["hi", "there"], padding=True)
    assert batch.input_ids[0] == [256, 256, 256, 104, 105]
    assert batch.attention_mask[0] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("kind", ["bytes", "bpe", "words"])
def test_what_transformers_saves_is_read_as_ours_again(
    theirs: dict[str, PreTrainedTokenizerBase], tmp_path: Path, kind: str
) -> None:
    theirs[kind].save_pretrained(tmp_path)
    again = find_tokenizer(tmp_path)
    assert again is not None
    assert type(again) is type({**KINDS, "words": WORDS}[kind])
    assert again.to_json() == {**KINDS, "words": WORDS}[kind].to_json()


def test_a_word_named_as_the_end_keeps_its_name() -> None:
    odd = WordTokenizer([END, "x"])
    assert to_tokenizers(odd).encode("x").ids == [1]
    assert to_tokenizers(odd).token_to_id(END) == 0
    assert to_tokenizers(odd).token_to_id(f"<{END}>") == odd.end
