"""config.json: the shape of a model under the names that transformers uses, and the keys that may appear in it.

Values are validated before transformers sees them: it would create a name for each of a billion labels, and download
and import an `attn_implementation` from the Hub.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, NamedTuple

import torch

from qkflow.config import from_dict, to_dict
from qkflow.errors import UsageError, short_repr, unknown
from qkflow.models import ClassifierConfig, DecoderConfig

MODEL_TYPE = "qkflow"
BASE_MODEL = "QKFlowModel"
CAUSAL_LM = "QKFlowForCausalLM"
CLASSIFIER = "QKFlowForSequenceClassification"

_STACK_FIELDS = {
    "vocab_size": "vocabulary",
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "hidden",
    "mechanism": "mechanism",
    "dropout": "dropout",
    "rms_norm_eps": "norm_eps",
}
"""Keys of config.json and the fields of our configs that they hold."""
_DECODER_FIELDS = {**_STACK_FIELDS, "tie_word_embeddings": "tied"}
_CLASSIFIER_FIELDS = {
    **_STACK_FIELDS,
    "classifier_norm": "norm",
    "classifier_spread": "spread",
    "classifier_qk_start": "qk_start",
}
MODEL_KEYS = frozenset({*_DECODER_FIELDS, *_CLASSIFIER_FIELDS})
CODE_KEYS = ("auto_map", "custom_pipelines")
"""Keys that name code in the folder."""


class _Rule(NamedTuple):
    """What a value may be if it is not null."""

    expected: str
    accepts: Callable[[Any], bool]


MAX_LABELS = 100_000
_DTYPES = ("bfloat16", "float16", "float32", "float64")


def _is_small_dict(value: Any) -> bool:
    return isinstance(value, dict) and len(value) <= MAX_LABELS


def _is_int(value: Any) -> bool:
    return type(value) is int


_STRING = _Rule("a string", lambda value: isinstance(value, str | PathLike))
_BOOL = _Rule("true or false", lambda value: isinstance(value, bool))
_TOKEN_ID = _Rule("a token id", _is_int)
_DTYPE = _Rule(
    f"one of {', '.join(_DTYPES)}",
    lambda value: isinstance(value, str | torch.dtype) and str(value).removeprefix("torch.") in _DTYPES,
)

TRANSFORMERS_KEYS: Mapping[str, _Rule] = {
    "_name_or_path": _STRING,
    "architectures": _Rule("a list of names", lambda value: isinstance(value, list)),
    "attn_implementation": _Rule("'eager'", lambda value: value == "eager"),
    "bos_token_id": _TOKEN_ID,
    "chunk_size_feed_forward": _Rule("0", lambda value: value == 0),
    "dtype": _DTYPE,
    "eos_token_id": _Rule(
        "a token id or a list of token ids",
        lambda value: all(_is_int(token) for token in (value if isinstance(value, list) else [value])),
    ),
    "id2label": _Rule(
        f"an object of label ids and names, at most {MAX_LABELS:,}",
        lambda value: _is_small_dict(value) and all(str(key).isdecimal() for key in value),
    ),
    "is_decoder": _BOOL,
    "is_encoder_decoder": _Rule("false", lambda value: value is False),
    "label2id": _Rule(
        f"an object of label names and ids, at most {MAX_LABELS:,}",
        lambda value: _is_small_dict(value) and all(_is_int(label) for label in value.values()),
    ),
    "model_type": _STRING,
    "name_or_path": _STRING,
    "num_labels": _Rule(
        f"a number of labels, at most {MAX_LABELS:,}", lambda value: _is_int(value) and 0 < value <= MAX_LABELS
    ),
    "output_attentions": _BOOL,
    "output_hidden_states": _BOOL,
    "pad_token_id": _TOKEN_ID,
    "problem_type": _STRING,
    "return_dict": _BOOL,
    "tie_last_hidden_states": _BOOL,
    "torch_dtype": _DTYPE,
    "transformers_version": _STRING,
    "use_cache": _BOOL,
}
"""Keys that transformers itself may write, none of which names a file or code."""


def validate_keys(data: Mapping[str, Any], source: str = "config.json") -> None:
    """Raise `UsageError` for unknown keys, keys that name code, and values that transformers cannot use.

    Values of `MODEL_KEYS` are validated when the model's config is built.

    >>> validate_keys({"num_labels": 10**9})
    Traceback (most recent call last):
    qkflow.errors.UsageError: config.json has num_labels = 1000000000: expected a number of labels, at most 100,000
    """
    for key, value in data.items():
        if key in CODE_KEYS:
            raise UsageError(
                f"{source} has {key!r}, which names code to run: a qkflow model needs none, do not trust it"
            )
        if key not in MODEL_KEYS | TRANSFORMERS_KEYS.keys():
            raise unknown(f"key in {source}", key, MODEL_KEYS | TRANSFORMERS_KEYS.keys())
        if value is not None and key in TRANSFORMERS_KEYS and not TRANSFORMERS_KEYS[key].accepts(value):
            raise UsageError(f"{source} has {key} = {short_repr(value)}: expected {TRANSFORMERS_KEYS[key].expected}")


def decoder_config(data: Mapping[str, Any]) -> DecoderConfig:
    """The `DecoderConfig` that a config.json describes.

    >>> decoder_config({"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64})
    DecoderConfig(width=32, layers=1, heads=2, hidden=64, vocabulary=257, mechanism='standard', dropout=0.0, \
norm_eps=1e-05, tied=None)
    """
    return _model_config(DecoderConfig, data, _DECODER_FIELDS)


def classifier_config(data: Mapping[str, Any], labels: int) -> ClassifierConfig:
    """The `ClassifierConfig` that a config.json describes. One label (regression) is built as two classes."""
    return _model_config(
        ClassifierConfig, {"classifier_norm": True, **data}, _CLASSIFIER_FIELDS, classes=max(labels, 2)
    )


def model_keys(config: DecoderConfig | ClassifierConfig) -> dict[str, Any]:
    """The keys of config.json that describe the shape of a model.

    >>> model_keys(DecoderConfig(width=32, layers=1, heads=2, hidden=64))["hidden_size"]
    32
    """
    fields = _DECODER_FIELDS if isinstance(config, DecoderConfig) else _CLASSIFIER_FIELDS
    values = to_dict(config)
    return {key: values[field] for key, field in fields.items()}


def _model_config(kind: Any, data: Mapping[str, Any], fields: Mapping[str, str], **extra: Any) -> Any:
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        if key not in data:
            raise UsageError(f"config.json has no {key!r}: expected a folder written by `qkflow export`")
    values = {field: data[key] for key, field in fields.items() if key in data}
    return from_dict(kind, {**values, **extra}, where=" of config.json")


def architecture(data: Mapping[str, Any]) -> str:
    """The model class that a config.json names: `CAUSAL_LM` (the default), `CLASSIFIER` or `BASE_MODEL`."""
    names = data.get("architectures") or [CAUSAL_LM]
    if not isinstance(names, list) or len(names) != 1 or names[0] not in (CAUSAL_LM, CLASSIFIER, BASE_MODEL):
        raise UsageError(
            f"config.json has the architectures {names!r}: expected {CAUSAL_LM}, {CLASSIFIER} or {BASE_MODEL}"
        )
    return names[0]


def label_count(data: Mapping[str, Any]) -> int:
    """The number of labels in a config.json; 2, the default of transformers, if it has none."""
    labels = data.get("id2label")
    return len(labels) if isinstance(labels, dict) else 2
