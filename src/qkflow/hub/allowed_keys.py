"""What transformers itself keeps in a config.json, and what may stand there: nothing that names a file or code.

A value is checked before transformers sees it: it would make a name for each of a billion labels, and fetch and import
an `attn_implementation` of someone's choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, NamedTuple

import torch

from qkflow.errors import UsageError

MOST_LABELS = 100_000
_TYPES = ("bfloat16", "float16", "float32", "float64")


class _Kind(NamedTuple):
    """What a value may be, if it is not null."""

    told: str
    fits: Callable[[Any], bool]


def _is_type(value: Any) -> bool:
    return str(value).removeprefix("torch.") in _TYPES and isinstance(value, str | torch.dtype)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value <= MOST_LABELS


def _are_labels(value: Any) -> bool:
    return isinstance(value, dict) and len(value) <= MOST_LABELS and all(str(key).isdecimal() for key in value)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and len(value) <= MOST_LABELS and all(type(n) is int for n in value.values())


def _are_tokens(value: Any) -> bool:
    return all(type(token) is int for token in (value if isinstance(value, list) else [value]))


_TEXT = _Kind("a text", lambda value: isinstance(value, str | PathLike))
_FLAG = _Kind("true or false", lambda value: isinstance(value, bool))
_TOKEN = _Kind("a token's number", lambda value: type(value) is int)
_TYPE = _Kind(f"one of {', '.join(_TYPES)}", _is_type)
_FEW = f"at most {MOST_LABELS:,}"

COMMON: Mapping[str, _Kind] = {
    "_name_or_path": _TEXT,
    "architectures": _Kind("a list of names", lambda value: isinstance(value, list)),
    "attn_implementation": _Kind("'eager'", lambda value: value == "eager"),
    "bos_token_id": _TOKEN,
    "chunk_size_feed_forward": _Kind("0", lambda value: value == 0),
    "dtype": _TYPE,
    "eos_token_id": _Kind("a token's number, or a list of them", _are_tokens),
    "id2label": _Kind(f"a table of numbers and labels, {_FEW}", _are_labels),
    "is_decoder": _FLAG,
    "is_encoder_decoder": _Kind("false", lambda value: value is False),
    "label2id": _Kind(f"a table of labels and numbers, {_FEW}", _are_numbers),
    "model_type": _TEXT,
    "name_or_path": _TEXT,
    "num_labels": _Kind(f"a number of labels, {_FEW}", _is_count),
    "output_attentions": _FLAG,
    "output_hidden_states": _FLAG,
    "pad_token_id": _TOKEN,
    "problem_type": _TEXT,
    "return_dict": _FLAG,
    "tie_last_hidden_states": _FLAG,
    "torch_dtype": _TYPE,
    "transformers_version": _TEXT,
    "use_cache": _FLAG,
}


def refuse_odd(key: str, value: Any, where: str) -> None:
    """Raise `UsageError` for a value of one of these keys that transformers has no use for, or should not have.

    >>> refuse_odd("num_labels", 10**9, "config.json")
    Traceback (most recent call last):
    qkflow.errors.UsageError: config.json has num_labels = 1000000000: expected a number of labels, at most 100,000
    """
    kind = COMMON[key]
    if value is not None and not kind.fits(value):
        text = repr(value)
        raise UsageError(f"{where} has {key} = {text[:60]}{'...' * (len(text) > 60)}: expected {kind.told}")
