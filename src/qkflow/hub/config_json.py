"""config.json: a model's shape under the names that transformers and its tools look for, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qkflow.config import from_dict, to_dict
from qkflow.errors import UsageError, unknown
from qkflow.hub.allowed_keys import COMMON, refuse_odd
from qkflow.models import ClassifierConfig, DecoderConfig

MODEL_TYPE = "qkflow"
CAUSAL = "QKFlowForCausalLM"
CLASSIFIER = "QKFlowForSequenceClassification"

STACK = {
    "vocab_size": "vocabulary",
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "hidden",
    "mechanism": "mechanism",
    "dropout": "dropout",
    "rms_norm_eps": "norm_eps",
}
"""Our fields by their names in config.json, of every model."""
DECODER = {**STACK, "tie_word_embeddings": "tied"}
CLASSIFIERS = {**STACK, "classifier_norm": "norm", "classifier_spread": "spread", "classifier_qk_start": "qk_start"}

OURS = frozenset({*DECODER, *CLASSIFIERS})
CODE = ("auto_map", "custom_pipelines")
"""Where a config.json names code of its folder."""


def refuse_unknown(given: Mapping[str, Any], where: str = "config.json") -> None:
    """Raise `UsageError` for a key that a qkflow model has no use for, and for code that it would bring along.

    Values of keys that are not ours are held to what transformers can use; ours are checked where a model is made.
    """
    for key, value in given.items():
        if key in CODE:
            raise UsageError(f"{where} has {key!r}, code of its own: a qkflow model needs none, do not trust this one")
        if key not in OURS | COMMON.keys():
            raise unknown(f"key in {where}", key, OURS | COMMON.keys())
        if key in COMMON:
            refuse_odd(key, value, where)


def decoder_config(data: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a description has.

    >>> decoder_config({"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64})
    DecoderConfig(width=32, layers=1, heads=2, hidden=64, vocabulary=257, mechanism='standard', dropout=0.0, \
norm_eps=1e-05, tied=None)
    """
    return _config(DecoderConfig, data, DECODER)


def classifier_config(data: Mapping[str, Any], labels: int) -> ClassifierConfig:
    """The classifier that a description has, for so many labels; a single one, a number to predict, counts as two."""
    own = {"classifier_norm": True, **data}
    return _config(ClassifierConfig, own, CLASSIFIERS, classes=max(labels, 2))


def describe(config: DecoderConfig | ClassifierConfig) -> dict[str, Any]:
    """The part of config.json that a model's shape decides.

    >>> describe(DecoderConfig(width=32, layers=1, heads=2, hidden=64))["hidden_size"]
    32
    """
    names = DECODER if isinstance(config, DecoderConfig) else CLASSIFIERS
    values = to_dict(config)
    return {name: values[own] for name, own in names.items()}


def _config(kind: Any, data: Mapping[str, Any], names: Mapping[str, str], **more: Any) -> Any:
    values = {own: data[name] for name, own in names.items() if name in data}
    theirs = {own: name for name, own in names.items()}
    missing = [theirs[own] for own in ("width", "layers", "heads", "hidden") if own not in values]
    if missing:
        raise UsageError(f"config.json has no {missing[0]!r}: expected what `qkflow export` writes")
    return from_dict(kind, {**values, **more}, where=" of config.json")
