"""`QKFlowConfig`: saving, loading, and refusing unknown keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qkflow.errors import UsageError
from qkflow.hf import QKFlowConfig, QKFlowForCausalLM
from qkflow.hub.config_json import MODEL_KEYS, TRANSFORMERS_KEYS
from qkflow.models import ClassifierConfig, DecoderConfig

HYBRID = DecoderConfig(width=32, layers=2, heads=2, hidden=8, mechanism=("standard", "qdelta"), tied=False, dropout=0.1)


def test_a_saved_config_is_loaded(tmp_path: Path) -> None:
    config = QKFlowConfig.from_model_config(HYBRID, end=256)
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(again, QKFlowConfig)
    assert again.decoder_config() == HYBRID
    assert (again.bos_token_id, again.eos_token_id, again.pad_token_id) == (256, 256, 256)
    assert again.to_dict().keys() <= MODEL_KEYS | TRANSFORMERS_KEYS.keys()
    named = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 257}
    assert {name: getattr(again, name) for name in named} == named


def test_a_classifier_config_keeps_its_labels() -> None:
    config = ClassifierConfig(width=16, layers=1, heads=2, classes=5, vocabulary=40, spread=0.5, qk_start=0.1)
    wrapped = QKFlowConfig.from_model_config(config)
    assert wrapped.num_labels == 5
    assert wrapped.classifier_config(5) == config


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        ({"hiden_size": 3}, "did you mean 'hidden_size'"),
        ({"auto_map": {}}, "names code to run"),
        ({"num_hidden_layers": 0}, "layers must be at least 1"),
        ({"mechanism": ["standard"]}, "one per layer"),
    ],
)
def test_an_invalid_config_is_refused(options: dict[str, Any], fragment: str) -> None:
    with pytest.raises(UsageError, match=fragment):
        QKFlowForCausalLM(QKFlowConfig(**options))


def test_a_classifier_needs_a_label() -> None:
    with pytest.raises(UsageError, match="at least one label"):
        QKFlowConfig().classifier_config(0)


def test_overrides_of_from_pretrained_change_the_config_but_not_the_weights(tmp_path: Path) -> None:
    model = QKFlowForCausalLM(QKFlowConfig.from_model_config(HYBRID))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dropout=0.3, dtype=torch.bfloat16)
    assert again.model.config.dropout == 0.3
    assert again.dtype == torch.bfloat16
    assert torch.equal(again.model.embedding.weight, model.model.embedding.weight.bfloat16())
