"""Our tokenizers as the `tokenizers` library and transformers read them: the same numbers for every text.

The end-of-document token begins, ends and pads a text. No text spells it: transformers is told to take its name for
ordinary text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from qkflow.data import Tokenizer, WordTokenizer, save_tokenizer
from qkflow.data.text.tokenizer_io import EXPORTED_TOKENIZER_FILE, TOKENIZER_FILE
from qkflow.data.text.tokenizers import BPETokenizer, ByteTokenizer, bytes_to_unicode
from qkflow.errors import UsageError
from qkflow.io import write_json

END = "<|endoftext|>"
_SPACES = r"[ \t\n\r\x0b\x0c]+"
"""What parts words: the same as for bytes in Python."""


def library_tokenizer(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """One of our tokenizers in the library's form, with its end token.

    >>> from qkflow.data import ByteTokenizer
    >>> library_tokenizer(ByteTokenizer()).encode("hé").ids
    [104, 195, 169]
    """
    made = _KINDS[type(tokenizer)](tokenizer) if type(tokenizer) in _KINDS else None
    if made is None:
        known = ", ".join(sorted(kind.__name__ for kind in _KINDS))
        raise UsageError(f"a {type(tokenizer).__name__} has no form in the tokenizers library: expected one of {known}")
    made.add_special_tokens([AddedToken(_end_name(tokenizer), special=True, normalized=False)])
    if made.token_to_id(_end_name(tokenizer)) != tokenizer.end:
        raise UsageError(f"the end token is {tokenizer.end}, not the first one free: this tokenizer cannot be exported")
    return made


def tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """What transformers has to know besides: tokenizer_config.json."""
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
    """Write a tokenizer into a folder, for transformers and for qkflow."""
    made = library_tokenizer(tokenizer)
    (folder / TOKENIZER_FILE).write_text(json.dumps(json.loads(made.to_str()), ensure_ascii=False, indent=2) + "\n")
    write_json(folder / "tokenizer_config.json", tokenizer_config(tokenizer))
    save_tokenizer(tokenizer, folder / EXPORTED_TOKENIZER_FILE)


def _end_name(tokenizer: Tokenizer) -> str:
    words = tokenizer.words if isinstance(tokenizer, WordTokenizer) else ()
    name = END
    while name in words:
        name = f"<{name}>"
    return name


def _bytes(_: Any) -> tokenizers.Tokenizer:
    model = models.BPE(vocab={letter: byte for byte, letter in bytes_to_unicode().items()}, merges=[])
    return _byte_level(tokenizers.Tokenizer(model))


def _pairs(tokenizer: BPETokenizer) -> tokenizers.Tokenizer:
    return _byte_level(tokenizers.Tokenizer.from_str(tokenizer.model.to_str()))


def _words(tokenizer: WordTokenizer) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.WordLevel(vocab={word: number for number, word in enumerate(tokenizer.words)}))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(_SPACES), behavior="removed")
    return made


def _byte_level(made: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


_KINDS: dict[type, Callable[[Any], tokenizers.Tokenizer]] = {
    ByteTokenizer: _bytes,
    BPETokenizer: _pairs,
    WordTokenizer: _words,
}
