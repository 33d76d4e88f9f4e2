"""Convert tokenizers of qkflow to the `tokenizers` library and transformers, with the same ids for every text.

The end-of-document token is the beginning-of-sequence, end-of-sequence and padding token. No text is tokenized to it:
transformers is configured to treat its name as ordinary text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from qkflow.data import Tokenizer, WordTokenizer, save_tokenizer
from qkflow.data.text.tokenizers import (
    EXPORTED_TOKENIZER_FILE,
    TOKENIZER_FILE,
    BPETokenizer,
    ByteTokenizer,
    bytes_to_unicode,
)
from qkflow.errors import UsageError
from qkflow.io import write_json

END = "<|endoftext|>"
_WHITESPACE = r"[ \t\n\r\x0b\x0c]+"
"""The whitespace of `bytes.split`."""


def to_tokenizers(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """Convert a tokenizer to one of the `tokenizers` library, with its end token.

    >>> from qkflow.data import ByteTokenizer
    >>> to_tokenizers(ByteTokenizer()).encode("hé").ids
    [104, 195, 169]
    """
    if isinstance(tokenizer, WordTokenizer):
        vocab = {word: number for number, word in enumerate(tokenizer.words)}
        converted = tokenizers.Tokenizer(models.WordLevel(vocab=vocab))
        converted.pre_tokenizer = pre_tokenizers.Split(Regex(_WHITESPACE), behavior="removed")
    elif isinstance(tokenizer, ByteTokenizer | BPETokenizer):
        if isinstance(tokenizer, ByteTokenizer):
            vocab = {letter: byte for byte, letter in bytes_to_unicode().items()}
            converted = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        else:
            converted = tokenizers.Tokenizer.from_str(tokenizer.model.to_str())
        converted.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        converted.decoder = decoders.ByteLevel()
    else:
        raise UsageError(
            f"a {type(tokenizer).__name__} cannot be converted to the tokenizers library: expected a ByteTokenizer,"
            " BPETokenizer or WordTokenizer"
        )
    end = _end_name(tokenizer)
    converted.add_special_tokens([AddedToken(end, special=True, normalized=False)])
    if converted.token_to_id(end) != tokenizer.end:
        raise UsageError(
            f"the end token has id {tokenizer.end}: expected {converted.token_to_id(end)}, the first free id; this"
            " tokenizer cannot be exported"
        )
    return converted


def tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    end = _end_name(tokenizer)
    return {
        "bos_token": end,
        "clean_up_tokenization_spaces": False,
        "eos_token": end,
        "model_input_names": ["input_ids", "attention_mask"],
        "pad_token": end,
        "padding_side": "left",
        "split_special_tokens": True,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer to a folder, for transformers and for qkflow."""
    content = json.loads(to_tokenizers(tokenizer).to_str())
    (folder / TOKENIZER_FILE).write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n")
    write_json(folder / "tokenizer_config.json", tokenizer_config(tokenizer))
    save_tokenizer(tokenizer, folder / EXPORTED_TOKENIZER_FILE)


def _end_name(tokenizer: Tokenizer) -> str:
    """The name of the end token, in more angle brackets if a word has this name."""
    words = tokenizer.words if isinstance(tokenizer, WordTokenizer) else ()
    name = END
    while name in words:
        name = f"<{name}>"
    return name
