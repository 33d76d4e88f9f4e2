"""`QKFlowForSequenceClassification`: losses, saving, and loading from a language model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification

from qkflow.errors import CheckpointError, UsageError
from qkflow.hf import QKFlowConfig, QKFlowForCausalLM, QKFlowForSequenceClassification
from qkflow.layout import Layout
from qkflow.models import Classifier, ClassifierConfig

TOKENS = torch.tensor([[104, 105, 7, 8], [72, 101, 108, 108], [1, 2, 3, 4]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])


def tiny_classifier(**options: Any) -> QKFlowForSequenceClassification:
    torch.manual_seed(2)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 0}
    return AutoModelForSequenceClassification.from_config(QKFlowConfig(**shape, **options)).eval()


def test_logits_are_those_of_the_classifier_with_padding_on_either_side() -> None:
    config = ClassifierConfig(width=16, layers=1, heads=2, classes=3, vocabulary=257, mechanism="coupled")
    torch.manual_seed(2)
    classifier = Classifier(config)
    torch.manual_seed(2)
    wrapped = QKFlowForSequenceClassification(QKFlowConfig.from_model_config(config))
    assert wrapped.config.num_labels == 3
    expected = classifier(TOKENS, Layout.padded([2, 4, 3], 4, side="left"))
    assert torch.equal(wrapped(TOKENS, attention_mask=MASK).logits, expected)
    flipped = torch.stack([row.roll(-int((keep == 0).sum())) for row, keep in zip(TOKENS, MASK, strict=True)])
    right = wrapped(flipped, attention_mask=MASK.flip(1), output_attentions=True, output_hidden_states=True)
    torch.testing.assert_close(right.logits, expected)
    assert (len(right.attentions), len(right.hidden_states)) == (1, 2)
    assert torch.equal(wrapped(TOKENS, return_dict=False)[0], classifier(TOKENS))


def test_the_loss_depends_on_the_problem_type() -> None:
    labels = torch.tensor([0, 2, 1])
    single = tiny_classifier(num_labels=3)
    out = single(TOKENS, labels=labels)
    torch.testing.assert_close(out.loss, F.cross_entropy(out.logits, labels))
    several = torch.tensor([[1.0, 0, 1], [0, 1, 0], [1, 1, 1]])
    out = tiny_classifier(num_labels=3, problem_type="multi_label_classification")(TOKENS, labels=several)
    torch.testing.assert_close(out.loss, F.binary_cross_entropy_with_logits(out.logits, several))
    number = torch.tensor([0.5, -1.0, 2.0])
    out = tiny_classifier(num_labels=1)(TOKENS, labels=number)
    assert out.logits.shape == (3, 1)
    torch.testing.assert_close(out.loss, F.mse_loss(out.logits[:, 0], number))


@pytest.mark.parametrize("labels", [1, 3])
def test_saving_and_loading_changes_no_bit(tmp_path: Path, labels: int) -> None:
    model = tiny_classifier(num_labels=labels)
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert again.config.num_labels == labels
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    with pytest.raises(UsageError, match="AutoModelForSequenceClassification"):
        QKFlowForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="expected 5"):
        QKFlowForSequenceClassification.from_pretrained(tmp_path, num_labels=5)


@pytest.mark.parametrize("mechanism", ["standard", "kuramoto"])  # with a tied head, and with a separate head
def test_a_language_model_is_loaded_as_a_classifier_with_a_new_head(
    causal: Callable[..., QKFlowForCausalLM], tmp_path: Path, mechanism: str
) -> None:
    language_model = causal(mechanism, tied=mechanism == "standard").float()
    language_model.save_pretrained(tmp_path)
    torch.manual_seed(4)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=4)
    assert model(TOKENS, attention_mask=MASK).logits.shape == (3, 4)
    stream, _ = language_model.model.read(TOKENS)
    assert torch.equal(model(TOKENS, output_hidden_states=True).hidden_states[-1], stream)
    assert 0.5 < float(model.model.head.weight.detach().std()) * model.model.read_width**0.5 < 1.5
    torch.manual_seed(5)
    other = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=4)
    assert not torch.equal(other.model.head.weight, model.model.head.weight)


def test_an_empty_sequence_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one token"):
        tiny_classifier(num_labels=2)(TOKENS, attention_mask=torch.tensor([[0] * 4, [1] * 4, [1] * 4]))
