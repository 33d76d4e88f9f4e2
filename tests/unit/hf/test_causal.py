"""`QKFlowForCausalLM` computes what the bare `Decoder` computes, with the options of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from qkflow.errors import UsageError
from qkflow.hf import QKFlowConfig, QKFlowForCausalLM
from qkflow.layout import Layout
from qkflow.mechanisms import mechanisms
from qkflow.models import Decoder, DecoderConfig

MakeModel = Callable[..., QKFlowForCausalLM]
TOKENS = torch.tensor([[104, 105, 7, 8, 9], [72, 101, 108, 108, 111]])
LEFT = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


def assert_near(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def test_a_seed_initialises_the_same_model_in_transformers(shape: Callable[..., DecoderConfig]) -> None:
    config = shape(("standard+affine", "differential"))
    torch.manual_seed(5)
    decoder_model = Decoder(config)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(QKFlowConfig.from_model_config(config))
    assert model.config.decoder_config() == config
    assert {f"model.{name}" for name in decoder_model.state_dict()} == model.state_dict().keys()
    for name, tensor in decoder_model.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[f"model.{name}"])


def test_logits_are_those_of_the_decoder_and_logits_to_keep_selects_them(causal: MakeModel) -> None:
    model = causal("differential")
    expected = model.model(TOKENS)[0]
    assert torch.equal(model(TOKENS).logits, expected)
    assert_near(model(TOKENS, logits_to_keep=2).logits, expected[:, -2:])
    assert_near(model(TOKENS, logits_to_keep=torch.tensor([0, 3])).logits, expected[:, [0, 3]])
    assert torch.equal(model(TOKENS, return_dict=False)[0], expected)
    assert model(TOKENS, use_cache=False).past_key_values is None


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_logit(causal: MakeModel, side: Any) -> None:
    model = causal("qdelta")
    mask = LEFT if side == "left" else LEFT.flip(1)
    is_valid = mask[0].bool()
    outputs = model(TOKENS, attention_mask=mask).logits
    assert_near(outputs[0, is_valid], model(TOKENS[:1, is_valid]).logits[0])
    assert_near(outputs[1], model(TOKENS[1:]).logits[0])
    other = TOKENS.masked_fill(mask == 0, 200)
    assert_near(model(other, attention_mask=mask).logits[mask.bool()], outputs[mask.bool()])


def test_the_loss_ignores_masked_labels_and_divides_by_num_items_in_batch(causal: MakeModel) -> None:
    model = causal("standard").float()
    labels = TOKENS.masked_fill(LEFT == 0, -100)
    logits = model(TOKENS, attention_mask=LEFT).logits
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction="none")
    count = int((labels[:, 1:] != -100).sum())
    assert_near(model(TOKENS, attention_mask=LEFT, labels=labels).loss, losses.sum() / count, 1e-6)
    divided = model(TOKENS, attention_mask=LEFT, labels=labels, num_items_in_batch=20).loss
    assert_near(divided, losses.sum() / 20, 1e-6)


def test_positions_that_restart_separate_packed_sequences(causal: MakeModel) -> None:
    model = causal("standard")
    row = TOKENS.reshape(1, -1)
    positions = torch.arange(5).repeat(2)[None]
    outputs = model(row, position_ids=positions)
    assert_near(outputs.logits.view(2, 5, -1), model(TOKENS).logits)
    assert outputs.past_key_values is None
    assert torch.equal(model(row, torch.ones_like(row), position_ids=positions).logits, outputs.logits)
    assert torch.equal(model(TOKENS, position_ids=torch.arange(5)[None]).logits, model(TOKENS).logits)
    counted = (LEFT.cumsum(1) - 1).clamp_min(0)
    padded = model(TOKENS, attention_mask=LEFT, position_ids=counted)
    assert torch.equal(padded.logits, model(TOKENS, attention_mask=LEFT).logits)
    step = {"past_key_values": padded.past_key_values, "position_ids": torch.tensor([[3], [5]])}
    assert model(TOKENS[:, :1], **step).logits.shape == (2, 1, 257)
    with pytest.raises(UsageError, match="cannot be cached"):
        model(row, position_ids=positions, use_cache=True)
    with pytest.raises(UsageError, match="leave them out"):
        model(TOKENS, position_ids=torch.arange(5)[None] + 1)
    with pytest.raises(UsageError, match="leave them out"):
        model(TOKENS, attention_mask=LEFT, position_ids=torch.arange(5)[None])


def test_a_mask_with_zeros_between_ones_is_refused(causal: MakeModel) -> None:
    with pytest.raises(UsageError, match=r"the mask has holes in the rows \[0\]"):
        causal("standard")(TOKENS, attention_mask=torch.tensor([[1, 0, 1, 1, 1], [1] * 5]))


@pytest.mark.parametrize("mechanism", ["standard", "qdelta", "kuramoto"])
def test_padding_may_be_on_both_sides(causal: MakeModel, mechanism: str) -> None:
    model, mask = causal(mechanism), torch.tensor([[0, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    outputs = model(TOKENS, attention_mask=mask)
    rest = model(TOKENS[:, :2], past_key_values=outputs.past_key_values)
    for i, row in enumerate(mask.bool()):
        expected = model(torch.cat([TOKENS[i, row], TOKENS[i, :2]])[None]).logits[0]
        assert_near(torch.cat([outputs.logits[i, row], rest.logits[i]]), expected)


def test_invalid_inputs_are_refused(causal: MakeModel) -> None:
    model = causal("standard")
    with pytest.raises(UsageError, match="got None"):
        model()
    with pytest.raises(UsageError, match=r"attention_mask must be \[2, 5\]"):
        model(TOKENS, attention_mask=torch.ones(2, 4))
    with pytest.raises(UsageError, match="ones and zeros"):
        model(TOKENS, attention_mask=torch.ones(2, 1, 5, 5))
    with pytest.raises(UsageError, match=r"position_ids must have shape \[2, 5\]"):
        model(TOKENS, position_ids=torch.ones(2, 4))
    assert model.resize_token_embeddings(257) is model.get_input_embeddings()


@pytest.mark.parametrize("mechanism", [*sorted(mechanisms()), "standard:window=2", "kuramoto:frustrated=True"])
def test_attentions_cover_every_column_with_and_without_a_cache(causal: MakeModel, mechanism: str) -> None:
    model = causal(mechanism)
    whole = model(TOKENS, attention_mask=LEFT, output_attentions=True)
    layer = model.model.blocks[0]
    x = model.model.embed(TOKENS)
    read = layer.mechanism_norm(x) if hasattr(layer, "mechanism_norm") else x
    assert_near(whole.attentions[0], layer.mechanism.weights(read, layout=Layout.padded([3, 5], 5, side="left")))
    assert torch.equal(whole.logits, model(TOKENS, attention_mask=LEFT).logits)
    assert not whole.attentions[1][0][..., :2].any()  # padding
    cache = model(TOKENS[:, :3], attention_mask=LEFT[:, :3]).past_key_values
    rest = model(TOKENS[:, 3:], attention_mask=LEFT, past_key_values=cache, output_attentions=True)
    for full, cached in zip(whole.attentions, rest.attentions, strict=True):
        assert cached.shape[-1] == 5
        start = 3 if not cached[..., :3].any() else 0  # a recurrent state has no columns for the past
        assert_near(cached[..., start:], full[:, :, 3:, start:])


def test_hidden_states_start_with_the_embedding_and_end_with_the_input_of_the_head(causal: MakeModel) -> None:
    model = causal("coupled")
    outputs = model(TOKENS, output_hidden_states=True)
    assert len(outputs.hidden_states) == 3
    assert torch.equal(outputs.hidden_states[0], model.model.embed(TOKENS))
    assert_near(model.model.logits(outputs.hidden_states[-1]), outputs.logits)
    assert torch.equal(outputs.logits, model(TOKENS).logits)


@pytest.mark.parametrize("mechanism", ["standard+affine:sharing=layers", "gated-deltanet", "kuramoto"])
def test_checkpointing_changes_no_gradient(causal: MakeModel, mechanism: str) -> None:
    model = causal(mechanism, dropout=0.1).train()
    gradients = []
    for enabled in (False, True):
        if enabled:
            model.activation_checkpointing_enable()
            assert model.is_activation_checkpointing
        model.zero_grad()
        torch.manual_seed(1)
        out = model(TOKENS, attention_mask=LEFT)
        assert (out.past_key_values is None) == enabled
        out.logits.square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert_near(gradient, gradients[1][name])


def test_checkpointing_is_used(causal: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal("standard").train()
    model.activation_checkpointing_enable()
    called = []
    inner: Any = model._gradient_checkpointing_func
    monkeypatch.setattr(model, "_gradient_checkpointing_func", lambda *args: called.append(1) or inner(*args))
    model(TOKENS)
    assert len(called) == 2
    model.eval()(TOKENS)
    assert len(called) == 2


def test_a_model_converts_to_bfloat16(causal: MakeModel) -> None:
    model = causal("kuramoto").to(torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model(TOKENS, attention_mask=LEFT).logits.dtype == torch.bfloat16


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")  # torch.compile emits warnings
def test_a_compiled_model_is_one_graph(causal: MakeModel) -> None:
    model = causal(("standard",)).float()
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    outputs = compiled(TOKENS, labels=TOKENS)
    expected = model(TOKENS, labels=TOKENS)
    assert_near(outputs.logits, expected.logits, 1e-5)
    assert_near(outputs.loss, expected.loss, 1e-5)
