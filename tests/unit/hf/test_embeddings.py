"""Embeddings as inputs, other vocabularies, the head as a module, and the model without a head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from qkflow.data import ByteTokenizer
from qkflow.errors import CheckpointError, UsageError
from qkflow.hf import QKFlowForCausalLM, QKFlowModel, read_folder, to_transformers

MakeModel = Callable[..., QKFlowForCausalLM]
TOKENS = torch.tensor([[104, 105, 7, 8, 9], [72, 101, 108, 108, 111]])
LEFT = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
STREAMS = ["standard", "qdelta", "kuramoto", "group:group=so3"]


@pytest.mark.parametrize("mechanism", STREAMS)
def test_embeddings_are_read_like_their_tokens(causal: MakeModel, mechanism: str) -> None:
    model = causal(mechanism)
    embedded = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
    labels = TOKENS.masked_fill(LEFT.cumsum(1) < 2, -100)
    outputs = model(inputs_embeds=embedded, attention_mask=LEFT, labels=labels, output_attentions=True)
    expected = model(TOKENS, attention_mask=LEFT, output_attentions=True)
    assert torch.equal(outputs.logits, expected.logits)
    assert torch.equal(outputs.attentions[1], expected.attentions[1])
    outputs.loss.backward()
    assert embedded.grad is not None
    assert embedded.grad[1].any()
    assert not embedded.grad[0, :2].any()  # padding
    options: dict[str, Any] = {"attention_mask": LEFT, "max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    for beams in (1, 2):
        generated = model.generate(inputs_embeds=embedded.detach(), num_beams=beams, **options)
        assert torch.equal(generated, model.generate(TOKENS, num_beams=beams, **options)[:, 5:])


def test_a_classifier_reads_embeddings(causal: MakeModel, tmp_path: Path) -> None:
    causal("standard").save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    embedded = model.get_input_embeddings()(TOKENS)
    outputs = model(inputs_embeds=embedded, attention_mask=LEFT)
    assert torch.equal(outputs.logits, model(TOKENS, attention_mask=LEFT).logits)


def test_invalid_embeddings_are_refused(causal: MakeModel) -> None:
    model = causal("standard")
    with pytest.raises(UsageError, match=r"must be \[batch, tokens, 32\], got \[1, 2, 16\]"):
        model(inputs_embeds=torch.zeros(1, 2, 16))
    with pytest.raises(UsageError, match="got both"):
        model(TOKENS, inputs_embeds=torch.zeros(2, 5, 32))


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("mechanism", STREAMS)
def test_a_resized_vocabulary_keeps_the_old_tokens(
    causal: MakeModel, tmp_path: Path, mechanism: str, mean: bool
) -> None:
    model = causal(mechanism)
    before, width = model(TOKENS).logits, model.config.hidden_size
    embedding = model.resize_token_embeddings(260, pad_to_multiple_of=8, mean_resizing=mean)
    assert embedding is model.get_input_embeddings()
    assert embedding.weight.shape == (264, width)
    outputs = model(TOKENS % 5 + 259)
    assert outputs.logits.shape == (2, 5, 264)
    assert bool(outputs.logits.isfinite().all())
    torch.testing.assert_close(model(TOKENS).logits[..., :257], before, rtol=0, atol=1e-12)
    model.save_pretrained(tmp_path)
    assert read_folder(tmp_path).config.vocabulary == model.config.vocab_size == 264
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    model.resize_token_embeddings(257)
    assert torch.equal(model(TOKENS).logits, before)


def test_new_tokens_have_initial_or_mean_embeddings(causal: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for mean in (True, False):
        model = causal("standard", tied=False)
        if not mean:  # nothing computes the mean
            for name in ("embeddings", "lm_head"):
                monkeypatch.delattr(PreTrainedModel, f"_init_added_{name}_weights_with_mean")
        old = [weight.clone() for weight in (model.model.embedding.weight, model.model.head.weight)]
        model.resize_token_embeddings(400, mean_resizing=mean)
        for before, after in zip(old, (model.model.embedding.weight, model.model.head.weight), strict=True):
            assert torch.equal(after[:257], before)
            if mean:
                torch.testing.assert_close(after[257:], before.mean(0).expand(143, -1), rtol=0, atol=1e-3)
            else:
                assert 0.015 < float(after[257:].detach().std()) < 0.025


def test_an_empty_vocabulary_is_refused(causal: MakeModel) -> None:
    with pytest.raises(UsageError, match="at least 1, got 0"):
        causal("standard").resize_token_embeddings(0)


def test_generation_stops_after_a_stop_string(causal: MakeModel) -> None:
    model, tokenizer = causal("standard"), to_transformers(ByteTokenizer())
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 256}
    with torch.no_grad():
        model.model.embedding.weight[128:] *= 0.01  # the most likely tokens are letters
    whole = model.generate(TOKENS[1:], **options)[0].tolist()
    stop = tokenizer.decode(whole[7:9])
    stopped = model.generate(TOKENS[1:], stop_strings=[stop, "never"], tokenizer=tokenizer, **options)[0].tolist()
    assert len(stop) == 2
    assert tokenizer.decode(stopped).endswith(stop)
    assert stopped == whole[: len(stopped)]
    assert len(stopped) < len(whole)


class LowRank(nn.Module):
    """A linear layer with an additive low-rank update, which starts at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(2, base.out_features, bias=False, dtype=base.weight.dtype)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_an_adapter_on_the_head_of_a_phase_model_trains(causal: MakeModel) -> None:
    model = causal("kuramoto").requires_grad_(False)
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    model.set_output_embeddings(LowRank(head).requires_grad_())
    assert isinstance(model.get_output_embeddings(), LowRank)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(TOKENS, labels=TOKENS).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.1


def test_a_tied_head_is_the_embedding(causal: MakeModel) -> None:
    model = causal("standard")
    assert model.get_output_embeddings() is None
    with pytest.raises(UsageError, match="set_input_embeddings"):
        model.set_output_embeddings(nn.Linear(32, 257))


@pytest.mark.parametrize("mechanism", STREAMS)
def test_the_model_without_a_head_returns_the_input_of_the_head(
    causal: MakeModel, tmp_path: Path, mechanism: str, caplog: pytest.LogCaptureFixture
) -> None:
    language_model = causal(mechanism)
    language_model.save_pretrained(tmp_path / "whole")
    model = AutoModel.from_pretrained(tmp_path / "whole")
    assert isinstance(model, QKFlowModel)
    assert "head" not in caplog.text
    outputs = model(TOKENS, attention_mask=LEFT, output_hidden_states=True, output_attentions=True)
    expected = language_model(TOKENS, attention_mask=LEFT, output_hidden_states=True, output_attentions=True)
    assert torch.equal(outputs.last_hidden_state, expected.hidden_states[-1])
    assert torch.equal(outputs.attentions[0], expected.attentions[0])
    step = model(TOKENS[:, :1], past_key_values=outputs.past_key_values)
    expected_step = language_model(TOKENS[:, :1], past_key_values=expected.past_key_values, output_hidden_states=True)
    torch.testing.assert_close(step.last_hidden_state, expected_step.hidden_states[-1], rtol=0, atol=1e-12)
    assert torch.equal(model(TOKENS, return_dict=False)[0], model(TOKENS).last_hidden_state)
    model.save_pretrained(tmp_path / "base")
    again = AutoModel.from_pretrained(tmp_path / "base")
    assert torch.equal(again(TOKENS).last_hidden_state, model(TOKENS).last_hidden_state)
    if language_model.get_output_embeddings() is None:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        assert torch.equal(loaded(TOKENS).logits, language_model(TOKENS).logits)
    else:
        with pytest.raises(CheckpointError, match=r"'model\.head\.weight' is only in the model"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "base")


def test_a_classifier_starts_from_a_model_without_a_head(causal: MakeModel, tmp_path: Path) -> None:
    causal("standard").save_pretrained(tmp_path / "whole")
    base = AutoModel.from_pretrained(tmp_path / "whole")
    base.save_pretrained(tmp_path / "base")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=3)
    hidden = model(TOKENS, output_hidden_states=True).hidden_states[-1]
    assert torch.equal(hidden, base(TOKENS).last_hidden_state)
    model.save_pretrained(tmp_path / "classifier")
    with pytest.raises(UsageError, match="AutoModelForSequenceClassification"):
        AutoModel.from_pretrained(tmp_path / "classifier")
