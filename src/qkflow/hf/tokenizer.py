"""Our tokenizers in transformers."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from qkflow.data import Tokenizer
from qkflow.hub.tokens import library_tokenizer, tokenizer_config


def to_transformers(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The same tokens for transformers; the end-of-document token begins, ends and pads a text.

    >>> from qkflow.data import ByteTokenizer
    >>> to_transformers(ByteTokenizer())("hi", return_tensors="np").input_ids.tolist()
    [[104, 105]]
    """
    options = {key: value for key, value in tokenizer_config(tokenizer).items() if key != "tokenizer_class"}
    return PreTrainedTokenizerFast(tokenizer_object=library_tokenizer(tokenizer), **options)
